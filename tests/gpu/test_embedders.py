"""Embedders whose code is published with their weights give the same answers on CUDA as on the CPU.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from penstock import Engine
from tests.gpu.decoders import cosine
from tests.parity.decoders import FAMILIES, ROWS
from tests.parity.embedders import EMBEDDERS, TASKS, write_jina_v5, write_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("float32", 0.99999)])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_cuda_equals_the_cpu(name: str, dtype: str, least: float, tmp_path: Path) -> None:
    embedder = EMBEDDERS[name]
    embedder.write(tmp_path)
    overrides = embedder.overrides
    with Engine(str(tmp_path), device="cpu", dtype="float32", hf_overrides=overrides) as cpu:
        expected = cpu.embed(ROWS)
    with Engine(str(tmp_path), device="cuda", dtype=dtype, hf_overrides=overrides) as cuda:
        assert cosine(cuda.embed(ROWS), expected) >= least


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.998), ("float32", 0.99999)])
@pytest.mark.parametrize("base", ["Qwen3", "EuroBert"])
def test_adapters_on_cuda_equal_those_on_the_cpu(base: str, dtype: str, least: float, tmp_path: Path) -> None:
    write_jina_v5(tmp_path, base)
    with (
        Engine(str(tmp_path), device="cpu", dtype="float32") as cpu,
        Engine(str(tmp_path), device="cuda", dtype=dtype) as cuda,
    ):
        for task in TASKS:
            assert cosine(cuda.embed(ROWS, adapter=task), cpu.embed(ROWS, adapter=task)) >= least


def test_integer_vectors_on_cuda_equal_those_on_the_cpu(tmp_path: Path) -> None:
    FAMILIES["pplx"].write(tmp_path)
    pooling = ("sentence_transformers.models.Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True})
    transformer = ("sentence_transformers.models.Transformer", "", None)
    write_modules(tmp_path, transformer, pooling, ("st_quantize.FlexibleQuantizer", "", None))
    with (
        Engine(str(tmp_path), device="cpu", dtype="float32") as cpu,
        Engine(str(tmp_path), device="cuda", dtype="float32") as cuda,
    ):
        found, expected = (engine.embed(ROWS, dtype="int8").astype(int) for engine in (cuda, cpu))
        assert np.abs(found - expected).max() <= 1 and (found == expected).mean() > 0.99
        assert (cuda.embed(ROWS, dtype="ubinary") == cpu.embed(ROWS, dtype="ubinary")).mean() > 0.99
