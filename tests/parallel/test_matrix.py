"""Two, three and four ranks, with seeded and real models, give the answers of one device.

    make parallel-test

PENSTOCK_TEST_MODELS=FOLDER adds its real models, if present: minilm, bge-small, reranker-mini, smollm2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import write_bert
from tests.parallel.answers import MIN_COSINE, cosines, scores, tokens, vectors
from tests.parallel.checkpoints import EXPERTS, LLAMA, QWEN3, RERANKER, SIZES, write_checkpoint

pytestmark = pytest.mark.parallel
CPU: dict[str, Any] = {"device": "cpu", "kv_cache_gb": 0.05}
CHUNKED = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 32}
MODERNBERT = SIZES | {"architectures": ["ModernBertModel"], "model_type": "modernbert", "local_attention": 16}
SIZES_OF_RANKS = [2, 4]


def real_model(name: str) -> Path:
    folder = Path(os.environ.get("PENSTOCK_TEST_MODELS", "/nowhere")) / name
    if not folder.is_dir():
        pytest.skip(f"PENSTOCK_TEST_MODELS has no {name}")
    return folder


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
@pytest.mark.parametrize("name", ["minilm", "bge-small"])
def test_real_encoders(name: str, size: int) -> None:
    folder = real_model(name)
    found = vectors(folder, **CPU, tensor_parallel_size=size)
    assert cosines(vectors(folder, **CPU), found).min() > MIN_COSINE


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
def test_a_real_cross_encoder(size: int) -> None:
    folder, options = real_model("reranker-mini"), CPU | {"pooler_config": {"score_labels": [1, 0]}}
    found = scores(folder, **options, tensor_parallel_size=size)
    np.testing.assert_allclose(found, scores(folder, **options), atol=1e-4)


def test_a_real_generator() -> None:
    folder = real_model("smollm2")  # nine attention heads, three key heads
    assert tokens(folder, **CPU, tensor_parallel_size=3) == tokens(folder, **CPU)


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
@pytest.mark.parametrize("more", [{}, CHUNKED], ids=["whole rows", "chunks"])
def test_a_decoder_that_embeds(tmp_path: Path, size: int, more: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "model", QWEN3, pooling="lasttoken")
    found = vectors(folder, **CPU, **more, tensor_parallel_size=size)
    assert cosines(vectors(folder, **CPU, **more), found).min() > MIN_COSINE


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
def test_a_decoder_that_scores_pairs(tmp_path: Path, size: int) -> None:
    folder = write_checkpoint(tmp_path / "model", RERANKER)
    found = scores(folder, **CPU, tensor_parallel_size=size)
    np.testing.assert_allclose(found, scores(folder, **CPU), atol=1e-4)


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["llama", "experts"])
def test_greedy_tokens(tmp_path: Path, config: dict[str, Any], size: int) -> None:
    folder = write_checkpoint(tmp_path / "model", config)
    for more in ({}, CHUNKED):
        assert tokens(folder, **CPU, **more, tensor_parallel_size=size) == tokens(folder, **CPU, **more)


def test_proposed_tokens(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", LLAMA)
    ngram = {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
    found = tokens(folder, **CPU, tensor_parallel_size=2, speculative_config=ngram)
    assert found == tokens(folder, **CPU)


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
def test_more_ranks_than_key_heads(tmp_path: Path, size: int) -> None:
    folder = write_checkpoint(tmp_path / "model", LLAMA | {"num_key_value_heads": 1})
    assert tokens(folder, **CPU, tensor_parallel_size=size) == tokens(folder, **CPU)


@pytest.mark.parametrize("size", SIZES_OF_RANKS)
def test_encoders(tmp_path: Path, size: int) -> None:
    for folder in (
        write_bert(tmp_path / "bert"),
        write_checkpoint(tmp_path / "modernbert", MODERNBERT, pooling="mean_tokens"),
    ):
        found = vectors(folder, **CPU, tensor_parallel_size=size)
        assert cosines(vectors(folder, **CPU), found).min() > MIN_COSINE


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_other_number_formats(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "model", QWEN3, pooling="lasttoken")
    found = vectors(folder, **CPU, **options, tensor_parallel_size=2)
    assert cosines(vectors(folder, **CPU, **options), found).min() > 0.999


def test_dummy_weights_are_the_same_on_every_rank(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", EXPERTS)
    dummy = {"load_format": "dummy", "dtype": "float32"}
    assert tokens(folder, **CPU, **dummy, tensor_parallel_size=2) == tokens(folder, **CPU, **dummy)
