"""Sparse weights on CUDA equal those on the CPU.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from tests.checkpoints import BERT_CONFIG, WORDS, write_lexical, write_splade

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TEXTS = [" ".join(WORDS[i : i + 1 + i % 40]) for i in range(50)]


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999)])
@pytest.mark.parametrize("write", [write_splade, write_lexical])
def test_cuda_gives_the_terms_of_the_cpu(
    write: Callable[[Path], Path], dtype: str, least: float, tmp_path: Path
) -> None:
    folder = str(write(tmp_path))
    with Engine(folder, device="cpu") as cpu, Engine(folder, device="cuda", dtype=dtype) as cuda:
        a, b = (_dense(engine.sparse(TEXTS)) for engine in (cpu, cuda))
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    strong = size > 0.01 * size.max()  # rows with almost no weight are only rounding errors
    assert strong.sum() > 30
    assert ((a * b).sum(1)[strong] / size[strong]).min() >= least


def _dense(rows: list[dict[int, float]]) -> np.ndarray:
    out = np.zeros((len(rows), int(BERT_CONFIG["vocab_size"])))
    for place, row in zip(out, rows, strict=True):
        place[list(row)] = list(row.values())
    return out
