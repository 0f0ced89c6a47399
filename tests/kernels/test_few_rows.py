"""Products of few fp8 rows, with inputs shared by several programs and not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import few_rows, language
from penstock.kernels.few_rows import (
    FEW_ROWS_TILES,
    FewRowsTile,
    few_rows_matmul,
    few_rows_tile_for,
    max_few_rows,
    num_parts_for,
)
from penstock.kernels.quantize import Quantized, quantize_rows_reference, scaled_matmul_reference


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))


def draw(rows: int, width: int, device: torch.device) -> Quantized:
    return quantize_rows_reference(torch.randn(rows, width, device=device))


def check(got: Tensor, expected: Tensor) -> None:
    assert (got.float() - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 64, 70, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 1024), (80, 528), (144, 2048)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_number_of_rows_gives_the_product(
    rows: int, outputs: int, inputs: int, has_bias: bool, device: torch.device
) -> None:
    x, weight = draw(rows, inputs, device), draw(outputs, inputs, device)
    bias = torch.randn(outputs, device=device).to(torch.bfloat16) if has_bias else None
    got = few_rows_matmul(x, weight, bias, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    check(got, scaled_matmul_reference(x, weight, bias, torch.float32))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_any_number_of_programs_may_share_the_inputs(parts: int, device: torch.device) -> None:
    x, weight, bias = draw(40, 1040, device), draw(96, 1040, device), torch.randn(96, device=device)
    got = few_rows_matmul(x, weight, bias, torch.bfloat16, FewRowsTile(64, 64, 128, 3), parts)
    check(got, scaled_matmul_reference(x, weight, bias, torch.float32))


def test_a_row_does_not_depend_on_the_other_rows_of_its_tile(device: torch.device) -> None:
    x, weight = draw(40, 1024, device), draw(64, 1024, device)
    whole = few_rows_matmul(x, weight, None, torch.bfloat16)
    some = Quantized(x.values[7:40].contiguous(), x.scales[7:40].contiguous())
    assert torch.equal(few_rows_matmul(some, weight, None, torch.bfloat16), whole[7:40])


def test_no_rows_give_no_rows(device: torch.device) -> None:
    got = few_rows_matmul(draw(0, 64, device), draw(32, 64, device), None, torch.bfloat16)
    assert got.shape == (0, 32)


def test_about_as_many_programs_as_processors_read_the_weight() -> None:
    for outputs in (4096, 6144, 24576):
        for most, tile, programs in FEW_ROWS_TILES:
            parts = num_parts_for(tile, outputs)
            assert parts * -(-outputs // tile.cols) >= 0.7 * programs
            assert few_rows_tile_for(most) is tile
    assert num_parts_for(FEW_ROWS_TILES[0][1], 1 << 17) == 1


def test_only_products_that_the_library_computes_slowly_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def weight(outputs: int, inputs: int) -> Quantized:
        values = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta")
        return Quantized(values, torch.empty(outputs, 1, device="meta"))

    assert max_few_rows(weight(4096, 4096)) == 0  # on another device
    monkeypatch.setattr(few_rows, "_is_measured", lambda weight: True)
    assert max_few_rows(weight(4096, 4096)) == 128
    assert max_few_rows(weight(24576, 4096)) == 64
    assert max_few_rows(weight(1024, 1024)) == 0  # it stays in the cache
