"""Rerankers on CUDA: the CPU's scores, with the rows' shared prefix computed once.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from penstock import Engine
from tests.checkpoints import WORDS, write_cross_encoder
from tests.parity.rerankers import QWEN3, write, write_listwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
QUERY = "how long is the water?"
DOCUMENTS = [" ".join(WORDS[i % 40 : i % 40 + 1 + i % 12]) for i in range(100)]


def both(folder: Path, dtype: str, **options: Any) -> tuple[Any, Any]:
    with Engine(str(folder), device="cpu", **options) as cpu:
        expected = cpu.score(QUERY, DOCUMENTS, use_activation=False, truncate_prompt_tokens=-1)
    with Engine(str(folder), device="cuda", dtype=dtype, max_num_batched_tokens=2048, **options) as cuda:
        return expected, cuda.score(QUERY, DOCUMENTS, use_activation=False, truncate_prompt_tokens=-1)


@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-3), ("float16", 5e-2), ("bfloat16", 3e-1)])
def test_cross_encoders_score_as_on_the_cpu(tmp_path: Path, dtype: str, near: float) -> None:
    expected, got = both(write_cross_encoder(tmp_path), dtype)
    np.testing.assert_allclose(got, expected, atol=near)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_decoder_rerankers_score_as_on_the_cpu(tmp_path: Path, tied: bool, caching: bool) -> None:
    folder = write(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    expected, got = both(folder, "float32", hf_overrides=QWEN3, enable_prefix_caching=caching)
    np.testing.assert_allclose(got, expected, atol=5e-3)


def test_listwise_rerankers_score_as_on_the_cpu(tmp_path: Path) -> None:
    expected, got = both(write_listwise(tmp_path), "float32")
    np.testing.assert_allclose(got, expected, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["Qwen3-Reranker-0.6B", "zerank-2", "ctxl-rerank-v2-instruct-multilingual-1b"]
)
def test_rerankers_known_by_name_score_as_on_the_cpu(tmp_path: Path, name: str) -> None:
    expected, got = both(write(tmp_path / name, "Qwen3ForCausalLM"), "float32")
    np.testing.assert_allclose(got, expected, atol=5e-3)
