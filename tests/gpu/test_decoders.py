"""Decoders on CUDA: grouped heads, causal and sliding attention give the same answers as on the CPU.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from tests.gpu.decoders import MODELS, cosine, make_rows, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("float32", 0.99999)])
@pytest.mark.parametrize("name", MODELS)
def test_cuda_equals_the_cpu(name: str, dtype: str, least: float, tmp_path: Path) -> None:
    folder, rows = write(tmp_path, name), make_rows()
    with Engine(str(folder), device="cpu", dtype="float32") as cpu:
        expected = np.concatenate(cpu.token_embed(rows, normalize=False))
        vectors = cpu.embed(rows)
    with Engine(str(folder), device="cuda", dtype=dtype, max_num_batched_tokens=1024) as cuda:
        got = np.concatenate(cuda.token_embed(rows, normalize=False))
        alone = np.concatenate([cuda.token_embed([row], normalize=False)[0] for row in rows])
        assert cosine(cuda.embed(rows), vectors) >= least
    assert cosine(got, expected) >= least
    assert cosine(got, alone) >= least
