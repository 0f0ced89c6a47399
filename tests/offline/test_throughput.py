"""Throughput measurements: rows and tokens are counted, and each kind of model runs its own task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from penstock import Engine
from penstock.errors import BadValue
from penstock.offline.throughput import measure, random_rows
from tests.checkpoints import write_bert, write_cross_encoder, write_late, write_splade

NULL = {"device": "null", "share_identical": False}


@pytest.mark.parametrize(
    ("write", "task"),
    [
        (write_bert, "embed"),
        (write_late, "token_embed"),
        (write_splade, "sparse"),
        (write_cross_encoder, "classify"),
    ],
)
def test_a_model_computes_what_it_is_for(write: Callable[[Path], Path], task: str, tmp_path: Path) -> None:
    with Engine(str(write(tmp_path)), **NULL) as engine:
        with mock.patch.object(engine, task, wraps=getattr(engine, task)) as called:
            measure(engine, ["the water", "oil"], [4, 3], 0.01)
        assert called.call_count >= 2


def test_rows_and_tokens_are_those_that_ran(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path)), **NULL) as engine:
        lengths = [3, 5] * 4
        with mock.patch.object(engine, "embed", wraps=engine.embed) as called:
            found = measure(engine, random_rows(engine, lengths), lengths, 0.01)
    sizes = {len(call.args[0]) for call in called.call_args_list}
    assert found.rows > 0 and found.rows % max(sizes) == 0
    assert found.tokens == 4 * found.rows
    assert found.rows_per_s == pytest.approx(found.rows / found.seconds)


def test_random_rows_differ_and_have_the_wanted_lengths(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path)), **NULL) as engine:
        rows = random_rows(engine, [20, 30, 30])
        vocabulary = engine.spec.vocab_size
    assert [len(row) for row in rows] == [20, 30, 30]
    assert rows[1] != rows[2]
    assert all(0 <= token < vocabulary for row in rows for token in row)


def test_an_error_of_the_engine_ends_the_measurement(tmp_path: Path) -> None:
    with Engine(str(write_bert(tmp_path)), **NULL) as engine:
        calls = 0

        def fail(*_: object, **__: object) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise BadValue("no")

        with mock.patch.object(engine, "embed", fail), pytest.raises(BadValue, match="no"):
            measure(engine, ["the water"], [4], 0.01)
