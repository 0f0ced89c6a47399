"""Block-scaled fp8: rows and weights are within one rounding step, and their product equals the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import blockwise, language
from penstock.kernels.blockwise import (
    DENSE_TILES,
    GROUP,
    BlockQuantized,
    DenseTile,
    block_matmul,
    block_matmul_reference,
    dense_block_matmul,
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
    quantize_groups_reference,
)
from penstock.kernels.quantize import FP8, FP8_MAX
from penstock.layers.fp8_blocks import join_blocks

SHAPES = [(1, 128, 128), (5, 256, 128), (17, 130, 200), (33, 48, 72), (70, 384, 132), (130, 128, 64)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))


def draw(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Random values whose magnitude changes from group to group."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator)
    steps = torch.logspace(-2, 2, -(-shape[1] // GROUP)).repeat_interleave(GROUP)[: shape[1]]
    return (noise * steps).to(device)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_a_group_is_scaled_by_its_own_largest_value(
    rows: int, inputs: int, outputs: int, device: torch.device
) -> None:
    x = draw(device, rows, inputs)
    got, expected = quantize_groups(x), quantize_groups_reference(x)
    assert got.values.dtype == FP8 and got.scales.shape == (rows, -(-inputs // GROUP))
    torch.testing.assert_close(got.scales, expected.scales)
    assert (got.values.float() == expected.values.float()).float().mean() > 0.99
    by_value = got.scales.repeat_interleave(GROUP, dim=1)[:, :inputs]
    assert ((dequantize_groups(got) - x).abs() <= (x.abs() / 16).maximum(2.0**-10 * by_value) * 1.01).all()


def test_strided_rows_zeros_and_non_finite_values_are_quantised(device: torch.device) -> None:
    x = draw(device, 4, 400)[:, :300]
    x[1] = 0
    x[2, 200] = float("nan")
    got = dequantize_groups(quantize_groups(x))
    assert (got[1] == 0).all() and got[2, 200].isnan() and got[2, :128].isfinite().all()
    torch.testing.assert_close(got[0], dequantize_groups(quantize_groups_reference(x[:1]))[0])


@pytest.mark.parametrize(("outputs", "inputs"), [(128, 256), (200, 130), (24, 48)])
def test_a_block_of_a_weight_is_scaled_by_its_own_largest_value(
    outputs: int, inputs: int, device: torch.device
) -> None:
    weight = draw(device, outputs, inputs)
    blocks = quantize_blocks(weight)
    assert blocks.scales.shape == (-(-outputs // GROUP), -(-inputs // GROUP))
    for i, j in torch.cartesian_prod(*(torch.arange(size) for size in blocks.scales.shape)).tolist():
        own = weight[i * GROUP : (i + 1) * GROUP, j * GROUP : (j + 1) * GROUP]
        torch.testing.assert_close(blocks.scales[i, j] * FP8_MAX, own.abs().max())
        stands = dequantize_blocks(blocks)[i * GROUP : (i + 1) * GROUP, j * GROUP : (j + 1) * GROUP]
        assert ((stands - own).abs() <= (own.abs() / 16).clamp_min(2.0**-10 * blocks.scales[i, j])).all()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_the_product_equals_the_product_of_the_dequantised_operands(
    rows: int, inputs: int, outputs: int, biased: bool, device: torch.device
) -> None:
    x, weight = draw(device, rows, inputs), quantize_blocks(draw(device, outputs, inputs, seed=1))
    bias = draw(device, 1, outputs, seed=2)[0] if biased else None
    expected = block_matmul_reference(x, weight, bias)
    got = block_matmul(x, weight, bias)
    torch.testing.assert_close(got, expected, atol=float(expected.abs().max()) * 1e-3, rtol=1e-3)


@pytest.mark.parametrize("tile", [entry[1] for entry in DENSE_TILES] + [DenseTile(16, 128, 4, 3)], ids=str)
@pytest.mark.parametrize("early", [True, False])
def test_every_tile_gives_the_same(tile: DenseTile, early: bool, device: torch.device) -> None:
    x, weight = draw(device, 21, 260), quantize_blocks(draw(device, 140, 260, seed=1))
    expected = block_matmul_reference(x, weight, None)
    got = dense_block_matmul(quantize_groups(x) if early else x, weight, None, tile, x.dtype)
    torch.testing.assert_close(got, expected, atol=float(expected.abs().max()) * 1e-3, rtol=1e-3)


def test_rows_of_a_product_are_written_in_order(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more row tiles than fit in one group, and the last group has fewer."""
    monkeypatch.setattr(blockwise, "DENSE_TILES", ((1 << 62, DenseTile(16, 32, 4, 3), False),))
    x, weight = draw(device, 170, 128), quantize_blocks(draw(device, 80, 128, seed=1))
    expected = block_matmul_reference(x, weight, None)
    torch.testing.assert_close(block_matmul(x, weight), expected, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("sizes", [(256, 128, 40), (96, 32, 32), (130, 128)])
def test_joined_weights_keep_their_scales(sizes: tuple[int, ...], device: torch.device) -> None:
    parts = [quantize_blocks(draw(device, size, 160, seed=n) * 7.0**n) for n, size in enumerate(sizes)]
    joined = join_blocks(parts)
    torch.testing.assert_close(
        dequantize_blocks(joined), torch.cat([dequantize_blocks(part) for part in parts])
    )
    x = draw(device, 9, 160, seed=9)
    got = block_matmul(x, BlockQuantized(joined.values, joined.scales.contiguous()))
    for own, part in zip(got.split(list(sizes), dim=1), parts, strict=True):
        expected = block_matmul_reference(x, part, None)
        torch.testing.assert_close(own, expected, atol=float(expected.abs().max()) * 1e-3, rtol=1e-3)


def test_a_batch_without_rows_gives_an_empty_result(device: torch.device) -> None:
    weight = quantize_blocks(draw(device, 40, 128))
    assert block_matmul(torch.empty(0, 128, device=device), weight).shape == (0, 40)
