"""Static embeddings on CUDA equal those on the CPU.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from tests.checkpoints import WORDS, write_static

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXTS = ["", *(" ".join(WORDS[i : i + 1 + i % 40]) for i in range(500))]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_cuda_gives_the_vectors_of_the_cpu(tmp_path: Path, dtype: str) -> None:
    folder = str(write_static(tmp_path))
    with Engine(folder, device="cpu") as cpu, Engine(folder, device="cuda", dtype=dtype) as cuda:
        assert not cuda.settings.graphs
        for options in ({}, {"dimensions": 16}, {"normalize": False}):
            np.testing.assert_allclose(cuda.embed(TEXTS, **options), cpu.embed(TEXTS, **options), atol=1e-5)
        for a, b in zip(cuda.token_embed(TEXTS[:9]), cpu.token_embed(TEXTS[:9]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
