"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL give transformers' hidden states, with and without images."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Engine
from penstock.types import PoolingParams, SamplerParams, Task
from tests.generation.streams import read_stream
from tests.parity.qwen_vl import (
    Row,
    make_model,
    make_row,
    reference_states,
    reference_tokens,
    request_of,
    write_model,
)
from tests.parity.reference import Vectors

ROWS = [
    make_row(12),
    make_row(3, (4, 6), 5, seed=1),
    make_row((2, 2), 2, (10, 6), 1, (4, 4), 4, seed=2),
    make_row(1),
    make_row((6, 8), seed=4),
    make_row(40, seed=5),
]
_ids = itertools.count()


class Subject:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.model = make_model(kind)
        self.folder = write_model(folder / kind, self.model)
        self.engine = Engine(str(self.folder), dtype="float32", device="cpu", enable_generation=True)

    def vectors(self, rows: list[Row]) -> Vectors:
        request = request_of(f"row-{next(_ids)}", rows, PoolingParams(Task.EMBED))
        return self.engine.local.engine.submit(request).result().values


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(request.param, tmp_path_factory.mktemp("qwen-vl"))
    yield made
    made.engine.close()


def expected(model: Any, rows: list[Row]) -> Vectors:
    """The normalised hidden states of the rows' last tokens."""
    last = np.stack([reference_states(model, row)[-1] for row in rows])
    return last / np.linalg.norm(last, axis=1, keepdims=True)


def test_rows_with_and_without_images_in_one_step_are_those_of_transformers(subject: Subject) -> None:
    got = subject.vectors(ROWS)
    assert np.abs(got - expected(subject.model, ROWS)).max() < 1e-5


def test_a_row_gives_the_same_vector_alone_and_among_others(subject: Subject) -> None:
    together = subject.vectors(ROWS)
    for number in (0, 2):
        assert np.abs(subject.vectors([ROWS[number]])[0] - together[number]).max() < 1e-5


def test_an_image_counts_in_the_vector_and_so_does_its_shape(subject: Subject) -> None:
    row = ROWS[1]
    (plain,) = subject.vectors([row])
    (other_pixels,) = subject.vectors([Row(row.ids, row.grids, seed=9)])
    (turned,) = subject.vectors([Row(row.ids, [(down, across) for across, down in row.grids], row.seed)])
    assert min(np.abs(plain - other_pixels).max(), np.abs(plain - turned).max()) > 1e-4


def test_greedy_tokens_behind_images_are_those_of_transformers(subject: Subject) -> None:
    params = SamplerParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    sequences = generate(subject.engine, ROWS[:3], params)
    for row, sequence in zip(ROWS, sequences, strict=False):
        assert sequence == reference_tokens(subject.model, row, 12)


def generate(engine: Engine, rows: list[Row], params: SamplerParams) -> list[list[int]]:
    """The generated tokens of each row, in requests that run together."""

    async def read(row: Row) -> list[int]:
        request = request_of(f"row-{next(_ids)}", [row], PoolingParams(Task.GENERATE), sampling=params)
        parts = [part async for part in read_stream(engine.local.engine, request)]
        return [token for part in parts for token in part.token_ids.tolist()]

    async def read_all() -> list[list[int]]:
        return list(await asyncio.gather(*map(read, rows)))

    return asyncio.run(read_all())


def test_rows_that_run_in_chunks_and_share_prefixes_keep_their_images_apart(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Images cross chunk boundaries. Rows with equal tokens but different pixels share no prefix."""
    model = make_model("qwen3_vl")
    folder = write_model(tmp_path_factory.mktemp("chunks") / "model", model)
    rows = [ROWS[2], Row(ROWS[2].ids, ROWS[2].grids, seed=11), ROWS[5], ROWS[2]]
    options = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 11}
    with Engine(str(folder), dtype="float32", device="cpu", enable_generation=True, **options) as engine:
        wanted = expected(model, rows)
        for _ in range(2):  # the second time, prefixes are cached
            for number, row in enumerate(rows):
                request = request_of(f"row-{next(_ids)}", [row], PoolingParams(Task.EMBED), reuse_prefix=True)
                (got,) = engine.local.engine.submit(request).result().values
                assert np.abs(got - wanted[number]).max() < 1e-5
        params = SamplerParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        for _ in range(2):
            for row, tokens in zip(rows, generate(engine, rows, params), strict=True):
                assert tokens == reference_tokens(model, row, 5)
