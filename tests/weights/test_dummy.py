"""Dummy weights resemble real ones where speed depends on values: no zeros, and routers spread tokens."""

from __future__ import annotations

import pytest
import torch

from penstock.checkpoint.quantization import Layout, StoredFormat, StoredWeight
from penstock.kernels.blockwise import (
    BlockQuantized,
    dequantize_blocks,
    quantize_groups_reference,
)
from penstock.kernels.experts import route_reference
from penstock.layers.fp8_blocks import ExpertStack
from penstock.weights.quantized import QuantizedReader, ScaledFp8
from penstock.weights.stream import DummySource, Wanted

CPU = torch.device("cpu")
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 2048, 768, 128, 8  # sizes of Qwen3-30B-A3B


def normed_rows(count: int) -> torch.Tensor:
    """Rows like the output of a norm with weights of one."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_spreads_tokens_over_all_experts(dtype: torch.dtype) -> None:
    router = DummySource(0, dtype, CPU).take("model.layers.0.mlp.gate.weight", EXPERTS, HIDDEN)
    logits = normed_rows(2048).to(dtype) @ router.t()
    shares, chosen = route_reference(logits, CHOSEN, normalize=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    mean = 2048 * CHOSEN / EXPERTS
    assert counts.min() > mean / 4 and counts.max() < mean * 4
    assert 0.5 < logits.float().std() < 2  # neither uniform nor dominated by one expert
    assert shares.min() > 0.01


@pytest.mark.parametrize("blocks", [True, False], ids=["fp8 blocks", "bf16"])
def test_no_product_of_an_expert_vanishes(blocks: bool) -> None:
    source = DummySource(0, torch.bfloat16, CPU)
    stacks = {
        name: ExpertStack(1, halves, outputs, inputs, source, blocks=blocks)
        for name, halves, outputs, inputs in (
            ("up", 2, INTERMEDIATE, HIDDEN),
            ("down", 1, HIDDEN, INTERMEDIATE),
        )
    }
    for name, stack in stacks.items():
        stack.fill([f"model.layers.0.mlp.experts.0.{name}_{half}" for half in range(stack.halves)])
    up, down = (one_expert(stack.all) for stack in stacks.values())
    rows = normed_rows(64)
    gate, value = (rows @ up.t()).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * value
    quantized = quantize_groups_reference(inner)
    assert (quantized.values.float() == 0).float().mean() < 0.05  # share of zero activations
    out = inner @ down.t()
    assert 0.02 < inner.std() < 50 and 0.02 < out.std() < 50
    assert (out.bfloat16() == 0).float().mean() < 0.001


def test_fp8_values_use_the_range_of_the_format() -> None:
    """Tiny values would round to zero, and products of zeros run faster than any real model."""
    source = DummySource(0, torch.bfloat16, CPU)
    values = source.read_fp8("model.layers.0.mlp.experts.0.gate_proj.weight", (256, HIDDEN)).float()
    assert (values == 0).float().mean() < 0.01 and 0.9 < values.std() < 1.1
    by_row = QuantizedReader(source, StoredFormat("fp8", ())).read(
        "model.layers.0.self_attn.q_proj", 256, HIDDEN, StoredWeight(Layout.FP8)
    )
    assert isinstance(by_row, ScaledFp8)
    product = normed_rows(8) @ by_row.dequantize(torch.float32).t()
    assert (by_row.values.float() == 0).float().mean() < 0.01 and product.std() > 0.1


def test_each_expert_has_weights_of_its_own() -> None:
    source = DummySource(0, torch.bfloat16, CPU)
    names = [f"model.layers.0.mlp.experts.{number}.gate_proj.weight" for number in range(2)]
    both = torch.empty((2, 128, 256), dtype=torch.float8_e4m3fn)
    source.fill(both, [Wanted(name, (128, 256)) for name in names])
    assert not torch.equal(both[0].float(), both[1].float())


def one_expert(weights: torch.Tensor | BlockQuantized) -> torch.Tensor:
    if isinstance(weights, BlockQuantized):
        return dequantize_blocks(BlockQuantized(weights.values[0], weights.scales[0]))
    return weights[0].float()
