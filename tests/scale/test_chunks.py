"""Chunks travel to engines in bundles that depend only on their rows."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest

pytest.importorskip("ray", reason="bundles are rows of a dataset of Ray Data")

from penstock.jobs.rows import Chunk
from penstock.scale.chunks import BUNDLE_CHARS, BUNDLE_CHUNKS, bundled, unpacked


def chunks_of(texts: list[str]) -> list[Chunk]:
    return [
        Chunk(2 * at, 2, ["a", text], {"id": [at, at + 1]}, at / len(texts)) for at, text in enumerate(texts)
    ]


def bundle_sizes(chunks: list[Chunk]) -> list[int]:
    return [len(unpacked(table)) for table in bundled(iter(chunks))]


def test_every_chunk_is_in_one_bundle_in_order() -> None:
    chunks = chunks_of([f"b{at}" for at in range(50)])
    tables = list(bundled(iter(chunks)))
    assert all(table.num_rows == 1 for table in tables)
    found = [chunk for table in tables for chunk in unpacked(table)]
    assert [(each.first, each.texts, each.carried, each.read) for each in found] == [
        (each.first, each.texts, each.carried, each.read) for each in chunks
    ]


def test_a_chunk_of_images_is_a_bundle() -> None:
    picture: Any = object  # anything that is not a text
    assert bundle_sizes([Chunk(at, 1, [picture], {}, None) for at in range(3)]) == [1, 1, 1]


def test_short_chunks_share_a_bundle_and_long_ones_do_not() -> None:
    assert bundle_sizes(chunks_of(["b"] * (2 * BUNDLE_CHUNKS + 3))) == [BUNDLE_CHUNKS, BUNDLE_CHUNKS, 3]
    assert bundle_sizes(chunks_of(["b" * BUNDLE_CHARS] * 3)) == [1, 1, 1]
    assert bundle_sizes(chunks_of(["b", "b" * BUNDLE_CHARS, "b", "b"])) == [2, 2]


@pytest.mark.parametrize("seconds", [1e-6, 10.0])
def test_bundles_do_not_depend_on_the_speed_of_engines(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Ray resumes a read task by its number of bundles. Different bundles would lose or repeat rows."""
    chunks = chunks_of([f"b{at}" * 1000 for at in range(100)])
    expected = bundle_sizes(chunks)
    ticks = count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) * seconds)
    assert bundle_sizes(chunks) == expected
