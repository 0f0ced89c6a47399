"""Merged adapters and jina-embeddings-v4 on CUDA: weights are read in bulk, and the answers are the same as
on the CPU.

pytest -m gpu tests/gpu/test_merged_adapters.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock import Engine
from penstock.types import PoolingParams, Task
from tests.gpu.decoders import cosine
from tests.inputs.images.pictures import noise
from tests.parity import decoders
from tests.parity.jina_v4 import TASKS, JinaV4
from tests.parity.lora import write_adapter
from tests.parity.page_retrievers import colpali_layout
from tests.parity.qwen_vl import make_row, request_of
from tests.parity.reference import Vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PRECISIONS = [("bfloat16", 0.998), ("float32", 0.99999)]
# Minimum cosine of a token's vector of 20 numbers: bfloat16 on a CPU reaches 0.985 with these weights.
TOKEN_PRECISIONS = [("bfloat16", 0.95), ("float32", 0.9999)]
PAGES = [make_row(4, (6, 8), 5, seed=3), make_row(9, seed=5), make_row(2, (16, 20), 3, seed=6)]
PICTURES = [noise(50, 38), noise(33, 90, seed=3)]


@pytest.mark.parametrize(("dtype", "least"), PRECISIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["v_proj", "embed_tokens"], "modules_to_save": ["norm"]},
    ],
    ids=["linear", "dora", "table"],
)
def test_an_adapter_is_merged_on_the_device(
    options: dict[str, Any], dtype: str, least: float, tmp_path: Path
) -> None:
    folder = decoders.FAMILIES["qwen3"].write(tmp_path / "base")
    base: Any = transformers.Qwen3Model.from_pretrained(folder).eval()
    write_adapter(base, tmp_path / "adapter", **options)
    texts = ["water finds its level", "a river runs", "the capital of france"]
    with Engine(str(tmp_path / "adapter"), device="cpu", dtype="float32") as cpu:
        expected = cpu.embed(texts)
    with Engine(str(tmp_path / "adapter"), device="cuda", dtype=dtype) as gpu:
        assert cosine(gpu.embed(texts), expected) > least


@pytest.mark.parametrize(("dtype", "least"), TOKEN_PRECISIONS)
def test_a_page_retriever_is_merged_on_the_device(dtype: str, least: float, tmp_path: Path) -> None:
    retriever = colpali_layout("qwen2_5_vl", "ColQwen2_5", old=True)(tmp_path / "base")
    targets = r".*(model|visual\.blocks).*(gate_proj|qkv|q_proj|o_proj)$|.*custom_text_proj$"
    write_adapter(retriever.model, tmp_path / "adapter", target_modules=targets)
    options = {"base_model": str(tmp_path / "base")}

    def vectors(engine: Engine) -> Vectors:
        request = request_of("pages", PAGES, PoolingParams(Task.TOKEN_EMBED))
        found: Vectors = engine.local.engine.submit(request).result(60).values  # type: ignore[assignment]
        return found

    with Engine(str(tmp_path / "adapter"), device="cpu", dtype="float32", **options) as cpu:
        expected = vectors(cpu)
    with Engine(str(tmp_path / "adapter"), device="cuda", dtype=dtype, **options) as gpu:
        assert cosine(vectors(gpu), expected) > least


@pytest.mark.parametrize(("dtype", "least"), TOKEN_PRECISIONS)
def test_jina_v4_gives_the_vectors_of_the_cpu(dtype: str, least: float, tmp_path: Path) -> None:
    JinaV4(tmp_path / "jina")
    inputs = ["the page of the book", *PICTURES, "a river"]
    with (
        Engine(str(tmp_path / "jina"), device="cpu", dtype="float32") as cpu,
        Engine(str(tmp_path / "jina"), device="cuda", dtype=dtype) as gpu,
    ):
        for task in TASKS:
            assert cosine(gpu.embed(inputs, adapter=task), cpu.embed(inputs, adapter=task)) > least
            own, expected = (each.token_embed(inputs, adapter=task) for each in (gpu, cpu))
            assert cosine(np.concatenate(own), np.concatenate(expected)) > least
