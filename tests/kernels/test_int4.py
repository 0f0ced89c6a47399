"""Products with 4-bit weights: every tile, group size and precision, and the dequantised weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import language
from penstock.kernels.int4 import (
    INT4_TILES,
    Int4Tile,
    PackedInt4,
    can_pack,
    dequantize_int4,
    dequantize_int4_reference,
    int4_matmul,
    int4_matmul_reference,
    num_parts_for,
    pack_int4,
)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))


def draw(
    device: torch.device, outputs: int, inputs: int, group: int, *, has_zeros: bool = True
) -> tuple[PackedInt4, Tensor]:
    """A packed weight, and the dequantised weight that it represents."""
    groups = inputs // group
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    scales = (torch.rand(groups, outputs, device=device) + 0.1).to(torch.float16)
    zeros = torch.randint(0, 16, (groups, outputs), dtype=torch.uint8, device=device)
    wide = codes.view(outputs, groups, group).float()
    center = zeros.t().float()[:, :, None] if has_zeros else 8.0
    stands = ((wide - center) * scales.t().float()[:, :, None]).view(outputs, inputs)
    return pack_int4(codes, scales, zeros if has_zeros else None), stands


SHAPES = [(40, 128, 128), (33, 256, 128), (16, 384, 384), (70, 256, 256), (24, 192, 64), (48, 160, 32)]
SHAPES += [(24, 128, 16), (20, 90, 90)]


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
@pytest.mark.parametrize("has_zeros", [True, False])
def test_the_packed_weight_stands_for_its_codes(
    outputs: int, inputs: int, group: int, has_zeros: bool, device: torch.device
) -> None:
    weight, stands = draw(device, outputs, inputs, group, has_zeros=has_zeros)
    assert weight.packed.shape == (-(-inputs // 128), outputs, 32)
    torch.testing.assert_close(dequantize_int4_reference(weight), stands)
    out = torch.full((outputs, inputs), torch.nan, device=device)
    torch.testing.assert_close(dequantize_int4(weight, out), stands)


@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
@pytest.mark.parametrize(("rows", "has_zeros"), [(1, True), (21, False), (40, True), (70, True)])
def test_the_product_equals_that_of_the_dequantised_weight(
    outputs: int, inputs: int, group: int, rows: int, has_zeros: bool, device: torch.device
) -> None:
    weight, stands = draw(device, outputs, inputs, group, has_zeros=has_zeros)
    x = torch.randn(rows, inputs + 8, device=device)[:, :inputs]
    bias = torch.randn(outputs, device=device) if has_zeros else None
    expected = torch.nn.functional.linear(x, stands, bias)
    torch.testing.assert_close(int4_matmul_reference(x, weight, bias), expected, atol=1e-3, rtol=1e-4)
    tolerance = float(expected.abs().max()) * (2e-3 if x.is_cuda else 1e-5)  # TF32 on a GPU
    torch.testing.assert_close(int4_matmul(x, weight, bias), expected, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tile", [*(entry[1] for entry in INT4_TILES), Int4Tile(16, 64, 4, 3, swap=False)], ids=str
)
@pytest.mark.parametrize("group", [128, 32])
def test_every_tile_multiplies_in_half_precision(
    dtype: torch.dtype, tile: Int4Tile, group: int, device: torch.device
) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16 arithmetic")
    weight, stands = draw(device, 72, 256, group)
    x = torch.randn(21, 256, device=device).to(dtype)
    expected = torch.nn.functional.linear(x.float(), stands)
    got = int4_matmul(x, weight, tile=tile)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, atol=float(expected.abs().max()) * 1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("inputs", "group", "parts"), [(640, 128, 2), (640, 640, 3), (640, 32, 4), (576, 64, 5), (200, 200, 9)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_programs_that_share_the_inputs_give_the_same_product(
    inputs: int, group: int, parts: int, has_bias: bool, device: torch.device
) -> None:
    weight, stands = draw(device, 40, inputs, group, has_zeros=has_bias)
    x = torch.randn(19, inputs, device=device)
    bias = torch.randn(40, device=device) if has_bias else None
    expected = torch.nn.functional.linear(x, stands, bias)
    tolerance = float(expected.abs().max()) * (2e-3 if x.is_cuda else 1e-5)
    got = int4_matmul(x, weight, bias, Int4Tile(32, 32, 4, 3), parts)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=1e-3)


@pytest.mark.parametrize("tile", [entry[1] for entry in INT4_TILES], ids=str)
def test_a_row_has_the_same_product_beside_other_rows_of_its_tile(
    tile: Int4Tile, device: torch.device
) -> None:
    weight, _ = draw(device, 72, 1024, 128)
    assert num_parts_for(tile, 72, 1024) == 2
    x = torch.randn(tile.rows, 1024, device=device).half()
    whole = int4_matmul(x, weight, tile=tile)
    assert torch.equal(int4_matmul(x[3:12], weight, tile=tile), whole[3:12])


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)])
@pytest.mark.parametrize("tile", [entry[1] for entry in INT4_TILES], ids=str)
def test_the_products_of_a_large_model_fill_the_device(tile: Int4Tile, outputs: int, inputs: int) -> None:
    parts = num_parts_for(tile, outputs, inputs)
    programs, share = parts * -(-outputs // tile.cols), -(-inputs // 128) / parts
    assert 190 <= programs <= 4 * 132 and share >= 4


def test_small_products_are_not_split() -> None:
    assert num_parts_for(INT4_TILES[0][1], 768, 768) == 1
    assert num_parts_for(INT4_TILES[0][1], 1 << 20, 4096) == 1


def test_group_sizes_that_do_not_divide_a_span_are_not_packed() -> None:
    assert can_pack(512, 4) and can_pack(512, 1) and can_pack(768, 3) and can_pack(256, 8) and can_pack(96, 1)
    assert not can_pack(768, 8) and not can_pack(100, 3) and not can_pack(64, 8)


def test_a_batch_without_rows_gives_an_empty_result(device: torch.device) -> None:
    weight, _ = draw(device, 40, 128, 128)
    assert int4_matmul(torch.empty(0, 128, device=device), weight).shape == (0, 40)
