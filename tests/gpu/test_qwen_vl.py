"""Qwen-VL on CUDA: towers, positions, and decoding after images give the same answers as on the CPU.

pytest -m gpu tests/gpu/test_qwen_vl.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.types import PoolingParams, SamplerParams, Task
from tests.generation.streams import read_stream
from tests.gpu.decoders import cosine
from tests.parity.qwen_vl import PREFIXES, Row, make_model, make_row, request_of, write_model
from tests.parity.reference import Vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS = [
    make_row(12),
    make_row(3, (4, 6), 5, seed=1),
    make_row((2, 2), 2, (16, 20), 1, (4, 4), 4, seed=2),
    make_row((24, 24), seed=4),
    make_row(40, seed=5),
]


def vectors(engine: Engine, name: str) -> Vectors:
    """The hidden states of all tokens, and the vector of each row."""
    states = engine.local.engine.submit(
        request_of(name, ROWS, PoolingParams(Task.TOKEN_EMBED, normalize=False))
    )
    rows = engine.local.engine.submit(request_of(name + "-rows", ROWS, PoolingParams(Task.EMBED)))
    return np.concatenate((states.result().values, rows.result().values))


def tokens(engine: Engine, row: Row, name: str) -> list[int]:
    params = SamplerParams(max_tokens=8, temperature=0.0, ignore_eos=True)

    async def read() -> list[int]:
        request = request_of(name, [row], PoolingParams(Task.GENERATE), sampling=params)
        parts = [part async for part in read_stream(engine.local.engine, request)]
        return [token for part in parts for token in part.token_ids.tolist()]

    return asyncio.run(read())


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.998), ("float32", 0.99999)])
@pytest.mark.parametrize("kind", PREFIXES)
def test_cuda_equals_the_cpu_with_images(kind: str, dtype: str, least: float, tmp_path: Path) -> None:
    folder = write_model(tmp_path / kind, make_model(kind))
    with Engine(str(folder), device="cpu", dtype="float32", enable_generation=True) as cpu:
        expected = vectors(cpu, "cpu")
        continued = [tokens(cpu, row, f"cpu-{number}") for number, row in enumerate(ROWS)]
    with Engine(str(folder), device="cuda", dtype=dtype, enable_generation=True) as cuda:
        assert cosine(vectors(cuda, "cuda"), expected) >= least
        again = vectors(cuda, "again")  # now with cached image features
        assert cosine(again, expected) >= least
        if dtype == "float32":
            assert [tokens(cuda, row, f"cuda-{n}") for n, row in enumerate(ROWS)] == continued
