"""fp8 on CUDA: the library's product equals its reference, models are close to fp32 on the CPU, no step
waits, and weights are held once.

pytest -m gpu tests/gpu/test_fp8.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock import Engine
from penstock.checkpoint.find import find
from penstock.errors import ModelLoadError
from penstock.kernels.language import set_kernel_devices
from penstock.kernels.quantize import Quantized, dequantize, quantize_rows, quantize_rows_reference
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.linear import Linear
from penstock.layers.mlp import MLP, GatedMLP
from penstock.runner.inputs import pool_arrays, pool_batch
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan, Request
from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert
from tests.gpu import decoders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no CUDA device that multiplies float8",
    ),
]
SHAPES = [(1, 768, 2304), (17, 384, 1152), (130, 3072, 768), (512, 4096, 6144), (64, 14336, 4096)]
SHAPES += [(1, 4096, 6144), (100, 4096, 4096), (100, 4096, 24576)]  # the first two by the kernel for few rows
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-r": {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
}
DEEP = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 6}


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


def row_cosines(a: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=1)


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("act", ["identity", "gelu", "tanh"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_gives_what_its_fp8_values_stand_for(
    tokens: int, inputs: int, outputs: int, act: str, biased: bool
) -> None:
    weight, x = draw(outputs, inputs, scale=inputs**-0.5), draw(tokens, inputs, seed=1)
    bias = draw(outputs, seed=2) if biased else None
    residual = draw(tokens, outputs, seed=3)
    layer, exact = Fp8Linear(weight, bias, act), Linear(weight, bias, act)
    rounded = Linear(dequantize(layer.weight), None if bias is None else bias.float(), act)
    got = layer(x)
    assert got.dtype == torch.bfloat16 and got.is_contiguous()
    # The library accumulates with fewer bits than fp32 has.
    assert row_cosines(got, rounded(dequantize(quantize_rows(x)))).min() > 0.9999
    assert row_cosines(got, exact(x)).min() > 0.998
    torch.testing.assert_close(layer(x, residual), got + residual)
    handed = layer.quantized(x)
    assert isinstance(handed, Quantized)
    assert row_cosines(dequantize(handed), got).min() > 0.999


def test_the_kernel_quantises_as_the_reference() -> None:
    x = draw(300, 4096)
    got, expected = quantize_rows(x), quantize_rows_reference(x)
    torch.testing.assert_close(got.scales, expected.scales)
    assert (got.values.float() == expected.values.float()).float().mean() > 0.99
    huge = torch.full((1, 64), 3e38, device="cuda").bfloat16()
    assert dequantize(quantize_rows(huge)).isfinite().all()


def test_blocks_stay_near_the_plain_ones() -> None:
    x, down = draw(65, 256), draw(256, 512, scale=512**-0.5, seed=2)
    for up, block in ((512, MLP), (1024, GatedMLP)):
        weight = draw(up, 256, scale=1 / 16, seed=1)
        inner = "gelu" if block is MLP else "identity"
        layers = [kind(weight, None, inner) for kind in (Fp8Linear, Linear)]
        more = () if block is MLP else ("silu",)
        got, expected = (
            block(first, type(first)(down, None), *more)(x)  # type: ignore[arg-type]
            for first in layers
        )
        assert row_cosines(got, expected).min() > 0.995


def write_encoder(folder: Path, name: str) -> Path:
    """Write an encoder whose weights are small enough that errors do not grow from layer to layer."""
    config = BERT_CONFIG | DEEP | ENCODERS[name]
    tensors = bert_tensors(config)
    for key, tensor in tensors.items():
        if tensor.dim() == 2 and key.startswith("encoder."):
            tensor.mul_(4 * tensor.shape[1] ** -0.5)
    return write_bert(folder, tensors=tensors, config=config)


def make_rows(limit: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(5, 100, n).tolist() for n in (1, 2, 3, 9, 17, 31, 33, limit - 4, limit - 3)]


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_stay_near_the_cpu(name: str, tmp_path: Path) -> None:
    folder, rows = str(write_encoder(tmp_path, name)), make_rows(60)
    with Engine(folder, device="cpu") as cpu:
        expected = cpu.embed(rows)
    with Engine(folder, device="cuda", quantization="fp8") as cuda:
        got = cuda.embed(rows)
        alone = np.concatenate([cuda.embed([row]) for row in rows])
    assert decoders.cosine(got, expected) >= 0.99
    assert decoders.cosine(got, alone) >= 0.999


@pytest.mark.parametrize("name", ["mistral", "gritlm", "qwen3", "gemma3"])
def test_decoders_stay_near_the_cpu(name: str, tmp_path: Path) -> None:
    folder, rows = str(decoders.write(tmp_path, name)), decoders.make_rows()
    with Engine(folder, device="cpu", dtype="float32") as cpu:
        expected, tokens = cpu.embed(rows), np.concatenate(cpu.token_embed(rows, normalize=False))
    with Engine(folder, device="cuda", quantization="fp8", max_num_batched_tokens=1024) as cuda:
        assert decoders.cosine(cuda.embed(rows), expected) >= 0.99
        got = np.concatenate(cuda.token_embed(rows, normalize=False))
    assert decoders.cosine(got, tokens) >= 0.99


def test_real_weights_stay_near_the_cpu() -> None:
    texts = [
        f"Report {n} says that the harvest of {1900 + n} was {n % 7} times the usual." for n in range(64)
    ]
    folder = os.environ.get("PENSTOCK_MINILM")  # if the package of the default model is not installed
    try:
        find(folder, None)
    except ModelLoadError as error:
        pytest.skip(str(error))
    with Engine(folder, device="cpu") as cpu:
        expected = cpu.embed(texts)
    with Engine(folder, device="cuda", quantization="fp8") as cuda:
        assert decoders.cosine(cuda.embed(texts), expected) >= 0.99


def test_excluded_layers_stay_unquantised(tmp_path: Path) -> None:
    options = {"device": "cuda", "quantization": "fp8", "unquantized_layers": (0, 5)}
    with Engine(str(write_encoder(tmp_path, "bert")), **options) as cuda:
        layers = cuda.local.engine.core.runner.model.layers  # type: ignore[attr-defined]
        kinds = [isinstance(layer.qkv, Fp8Linear) for layer in layers]
    assert kinds == [False, True, True, True, True, False]


def test_kernels_off_gives_the_same(tmp_path: Path) -> None:
    """The references take more passes, but give the same values as the fused kernels."""
    folder, rows = str(write_encoder(tmp_path, "bert")), make_rows(60)
    with Engine(folder, device="cuda", quantization="fp8") as cuda:
        got = cuda.embed(rows)
        set_kernel_devices()
        try:
            plainly = cuda.embed(rows)
        finally:
            set_kernel_devices("cuda")
    assert decoders.cosine(got, plainly) >= 0.997  # the kernels quantise before values are rounded to bf16


def test_a_step_never_waits_and_can_be_captured(tmp_path: Path) -> None:
    rows = make_rows(60)
    with Engine(str(write_encoder(tmp_path, "bert")), device="cuda", quantization="fp8") as cuda:
        runner = cuda.local.engine.core.runner
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        tokens = np.array([token for row in rows for token in row], dtype=np.int32)
        request = Request("test", tokens, lengths)
        plan = build_plan([ScheduledRows(request, np.arange(len(rows), dtype=np.int32))])
        expected = runner.launch(plan).result().outputs[0].copy()
        torch.cuda.set_sync_debug_mode("error")
        try:
            future = runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        np.testing.assert_allclose(future.result().outputs[0], expected, atol=1e-3)
        with torch.inference_mode():
            assert isinstance(runner, ModelRunner) and isinstance(plan, PoolPlan)
            batch = pool_batch(plan, None, None, iter(runner.staging.send(pool_arrays(plan, None))))
            eager = runner.model(batch)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = runner.model(batch)
            graph.replay()
            torch.cuda.synchronize()
            assert row_cosines(captured, eager).min() > 0.9999


def test_loading_holds_one_copy_of_the_weights() -> None:
    from penstock.layers.build import LayerBuilder
    from penstock.weights.stream import DummySource

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    build = LayerBuilder(DummySource(0, torch.bfloat16, torch.device("cuda")), "fp8")
    layers = [build.linear(f"layers.{i}.mlp.down_proj", 4096, 4096, bias=False) for i in range(16)]
    size = 4096 * 4096
    assert torch.cuda.memory_allocated() - before < len(layers) * size * 1.01
    assert torch.cuda.max_memory_allocated() - before < (len(layers) + 5) * size
