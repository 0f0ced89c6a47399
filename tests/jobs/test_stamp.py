"""Stamps: which settings make vectors incomparable, and how the difference is described."""

from __future__ import annotations

import pyarrow as pa
import pytest
from msgspec.structs import replace

from penstock.errors import BadValue
from penstock.jobs.stamp import Stamp

STAMP = Stamp(model="minilm", revision="abc", dimension=384, max_tokens=256)


def test_equal_settings_have_no_difference() -> None:
    assert STAMP.difference(STAMP) == ""
    assert STAMP.difference(replace(STAMP, version="9.9")) == ""


def test_the_same_files_under_another_name_are_the_same_model() -> None:
    assert STAMP.difference(replace(STAMP, model="sentence-transformers/all-MiniLM-L6-v2")) == ""
    assert "minilm and other" in STAMP.difference(replace(STAMP, model="other", revision=""))


def test_every_other_setting_makes_a_difference() -> None:
    assert STAMP.difference(replace(STAMP, revision="def")) == "model minilm has the revisions abc and def"
    assert STAMP.difference(replace(STAMP, dimension=128)) == "dimension is 384 and 128"
    assert 'prompt is "" and "query: "' in STAMP.difference(replace(STAMP, prompt="query: "))
    assert "normalize is none and false" in STAMP.difference(replace(STAMP, normalize=False))


def test_a_stamp_survives_a_schema() -> None:
    schema = pa.schema([("id", pa.int64())], metadata=STAMP.metadata)
    assert Stamp.of_schema(schema) == STAMP
    assert Stamp.of_schema(pa.schema([("id", pa.int64())])) is None


def test_a_damaged_stamp_is_named() -> None:
    with pytest.raises(BadValue, match="stamp of these vectors is damaged"):
        Stamp.from_json("{")
