"""Late-interaction models: CUDA gives the CPU's vectors, with and without rows that have a key limit.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from penstock.offline.engine import Engine
from tests.parity.colbert import LATE
from tests.parity.reference import cosines, make_texts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LEAST_OF_BF16 = {"Lfm2": 0.997}  # for the worst token; on a CPU, bf16 is as far from fp32
TEXTS = [text for text in make_texts(24, seed=5) if text]


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("float16", 0.9999), ("float32", 0.99999)])
@pytest.mark.parametrize("query_length", [8, 40])  # within ModernBERT's window, and beyond it
@pytest.mark.parametrize("name", LATE)
def test_cuda_equals_the_cpu(name: str, query_length: int, dtype: str, least: float, tmp_path: Path) -> None:
    late = LATE[name]
    if not hasattr(transformers, f"{late.case.name}Config"):
        pytest.skip(f"this transformers has no {late.case.name}")
    if dtype == "bfloat16":
        least = LEAST_OF_BF16.get(late.case.name, least)
    late.write(tmp_path, 0.1, **{"query_maxlen" if late.stanford else "query_length": query_length})
    with Engine(str(tmp_path), device="cpu", dtype="float32") as cpu:
        expected = {kind: cpu.token_embed(TEXTS, input_type=kind) for kind in ("query", "document")}
    with Engine(str(tmp_path), device="cuda", dtype=dtype) as cuda:
        for kind, rows in expected.items():
            got = cuda.token_embed(TEXTS, input_type=kind)
            assert [row.shape for row in got] == [row.shape for row in rows]
            assert cosines(np.concatenate(got), np.concatenate(rows)).min() >= least
