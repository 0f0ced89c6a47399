"""The CUDA path: the same answers as on the CPU, and no wait for the device between launch and collect.

pytest -m gpu tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock import Engine
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import OutputDtype, PoolingParams, Request
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_bert, write_json

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CONFIG = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert", config=CONFIG)


def texts(count: int) -> list[str]:
    words = ["the", "of", "and", "to", "in", "is", "was", "it", "for", "on", "are", "as", "with", "his"]
    random = np.random.default_rng(0)
    return [" ".join(random.choice(words, random.integers(1, 60))) for _ in range(count)]


# With wide random weights, a few rows are chaotic in bf16, so their mean says more than the worst row.
BARS = [("bfloat16", 0.996, 0.9995), ("float16", 0.9998, 0.9999), ("float32", 0.99999, 0.99999)]


@pytest.mark.parametrize(("dtype", "least", "mean"), BARS)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean"])
def test_cuda_equals_the_cpu(folder: Path, dtype: str, least: float, mean: float, pooling: str) -> None:
    inputs = texts(200)
    options = {"pooler_config": {"pooling_type": pooling}}
    with Engine(str(folder), device="cpu", **options) as cpu:
        expected = cpu.embed(inputs)
    with Engine(str(folder), device="cuda", dtype=dtype, max_num_batched_tokens=512, **options) as cuda:
        got = cuda.embed(inputs)
        alone = np.concatenate([cuda.embed([text]) for text in inputs[:8]])
    cosines = (got * expected).sum(1)
    assert cosines.min() >= least and cosines.mean() >= mean
    assert np.abs(alone - got[:8]).max() <= 2e-2


@pytest.mark.parametrize("dtype", list(OutputDtype))
def test_the_device_gives_every_output_dtype(folder: Path, dtype: OutputDtype) -> None:
    inputs = texts(40)
    with (
        Engine(str(folder), device="cpu") as cpu,
        Engine(str(folder), device="cuda", dtype="float32") as cuda,
    ):
        expected, got = (engine.embed(inputs, dtype=dtype.value, dimensions=64) for engine in (cpu, cuda))
    assert expected.shape == got.shape and expected.dtype == got.dtype
    if dtype is OutputDtype.BFLOAT16:
        expected, got = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (expected, got))
    if dtype.is_packed:
        assert (expected == got).mean() > 0.99
    elif expected.dtype.kind == "f":
        assert np.abs(expected.astype(np.float64) - got.astype(np.float64)).max() <= 0.01
    else:
        assert np.abs(expected.astype(np.float64) - got.astype(np.float64)).max() <= 2


def test_a_step_never_waits_between_launch_and_collect(folder: Path) -> None:
    with Engine(str(folder), device="cuda") as engine:
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ModelRunner)
        rng = np.random.default_rng(1)
        shares = []
        for number, params in enumerate((PoolingParams(), PoolingParams(dimensions=32))):
            lengths = rng.integers(1, 60, 8).astype(np.int32)
            tokens = rng.integers(5, 100, lengths.sum()).astype(np.int32)
            request = Request(str(number), tokens, lengths, params)
            shares.append(ScheduledRows(request, np.arange(8, dtype=np.int32)))
        plan = build_plan(shares)
        runner.launch(plan).result()  # lazy set-up may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            future = runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        first, second = future.result().outputs
        assert first.shape == (8, 128) and second.shape == (8, 32)


DECODER = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "vocab_size": len(wordpiece_vocabulary()),
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_json(folder / "config.json", DECODER)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_rows_chunked_over_several_steps_equal_whole_rows(decoder: Path, dtype: str, pooling: str) -> None:
    rng = np.random.default_rng(2)
    inputs = [rng.integers(5, 100, n).tolist() for n in (1, 5, 64, 65, 130, 300, 500, 17)]
    options = {"device": "cuda", "dtype": dtype, "load_format": "dummy"}
    options["pooler_config"] = {"pooling_type": pooling}
    cut_options = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 48}
    with (
        Engine(str(decoder), **options) as whole,
        Engine(str(decoder), enable_chunked_prefill=True, **cut_options, **options) as cut,
    ):
        expected, got = whole.embed(inputs), cut.embed(inputs)
        assert (expected * got).sum(1).min() > (0.9995 if dtype == "bfloat16" else 0.99999)
        for mine, theirs in zip(cut.token_embed(inputs), whole.token_embed(inputs), strict=True):
            cosine = torch.nn.functional.cosine_similarity(*map(torch.from_numpy, (mine, theirs)), dim=1)
            assert cosine.min() > (0.999 if dtype == "bfloat16" else 0.99999)


def test_prefixes_are_shared_on_the_device(decoder: Path) -> None:
    rng = np.random.default_rng(3)
    prefix = rng.integers(5, 100, 160).tolist()
    inputs = [prefix + rng.integers(5, 100, n).tolist() for n in (3, 40, 90)]
    options = {"device": "cuda", "dtype": "float32", "load_format": "dummy"}
    with (
        Engine(str(decoder), **options) as cold,
        Engine(str(decoder), enable_prefix_caching=True, **options) as warm,
    ):
        warm.embed(inputs[:1])
        np.testing.assert_allclose(warm.embed(inputs), cold.embed(inputs), atol=1e-4)
        assert warm.local.engine.core.scheduler.chunking.pool.hit_tokens >= 3 * 160
