"""fp8 rows are within one rounding step of their values, whichever kernel writes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import language
from penstock.kernels.activation import (
    ACTIVATION_CODES,
    bias_act_quantized,
    bias_act_reference,
    gated_activation_quantized,
    gated_activation_reference,
)
from penstock.kernels.norm import (
    add_norm_quantized,
    add_norm_reference,
    norm_add_norm_quantized,
    norm_add_norm_reference,
)
from penstock.kernels.quantize import (
    FP8,
    FP8_MAX,
    Quantized,
    dequantize,
    quantize_rows,
    quantize_rows_reference,
)

SHAPES = [(1, 16), (5, 384), (3, 37), (2, 1000), (2, 1536)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))


def draw(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    """Random values of many magnitudes within a row and between rows."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator)
    rows = torch.logspace(-3, 3, shape[0])[:, None] if len(shape) > 1 else torch.ones(())
    return (noise * noise.abs() * rows).to(device)


def assert_stands_for(got: Quantized, expected: Tensor) -> None:
    """Check that each value is within half of its fp8 step: 1/16 of the value, or near zero half of the
    smallest step. The tolerance is a little larger, because the order of arithmetic may differ."""
    assert got.values.dtype == FP8 and got.values.shape == expected.shape
    assert got.scales.dtype == torch.float32 and got.scales.shape == (len(expected), 1)
    bound = (expected.abs() / 16).maximum(2.0**-10 * got.scales) * 1.01
    assert ((dequantize(got) - expected).abs() <= bound).all()
    largest = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(got.scales * FP8_MAX, largest, atol=1e-11, rtol=1e-4)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("of", [quantize_rows, quantize_rows_reference])
def test_a_row_is_scaled_by_its_own_largest_value(
    of: type[Quantized], rows: int, width: int, device: torch.device
) -> None:
    x = draw(device, rows, width)
    assert_stands_for(of(x), x)


def test_rows_may_be_strided(device: torch.device) -> None:
    x = draw(device, 6, 64)[:, :48]
    assert_stands_for(quantize_rows(x), x)


@pytest.mark.parametrize("of", [quantize_rows, quantize_rows_reference])
def test_zeros_stay_zero_and_non_finite_values_show(of: type[Quantized], device: torch.device) -> None:
    x = torch.zeros(3, 32, device=device)
    x[1, 7] = float("nan")
    got = dequantize(of(x))
    assert (got[[0, 2]] == 0).all()
    assert got[1, 7].isnan()


def test_the_kernel_equals_the_reference(device: torch.device) -> None:
    x = draw(device, 4, 96)
    got, expected = quantize_rows(x), quantize_rows_reference(x)
    torch.testing.assert_close(got.scales, expected.scales)
    assert (got.values.float() == expected.values.float()).float().mean() > 0.99


@pytest.mark.parametrize("act", ACTIVATION_CODES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("width", [48, 1500])
def test_an_activation_can_write_quantised_rows(
    act: str, biased: bool, width: int, device: torch.device
) -> None:
    x = draw(device, 3, width)
    bias = draw(device, width, seed=1) if biased else None
    assert_stands_for(bias_act_quantized(x, bias, act), bias_act_reference(x, bias, act))


@pytest.mark.parametrize("act", ACTIVATION_CODES)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("width", [48, 1500])
def test_a_gated_activation_can_write_quantised_rows(
    act: str, gate_first: bool, width: int, device: torch.device
) -> None:
    x = draw(device, 3, 2 * width)
    assert_stands_for(
        gated_activation_quantized(x, act, gate_first), gated_activation_reference(x, act, gate_first)
    )


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize(("rms", "biased"), [(False, True), (False, False), (True, False)])
def test_a_norm_can_write_quantised_rows_and_the_sum_or_the_norm(
    rows: int, width: int, rms: bool, biased: bool, device: torch.device
) -> None:
    x, residual = draw(device, rows, width), draw(device, rows, width, seed=1)
    weight = draw(device, width, seed=2)
    bias = draw(device, width, seed=3) if biased else None
    total, normed = add_norm_reference(x, residual, weight, bias, 1e-5, rms=rms)
    got_sum, got = add_norm_quantized(x.clone(), residual, weight, bias, 1e-5, rms=rms)
    torch.testing.assert_close(got_sum, total)
    assert_stands_for(got, normed)
    kept, got = add_norm_quantized(x.clone(), residual, weight, bias, 1e-5, rms=rms, post=True)
    torch.testing.assert_close(kept, normed, atol=1e-4, rtol=1e-4)
    assert_stands_for(got, normed)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_a_norm_before_and_after_the_sum_can_write_quantised_rows(
    rows: int, width: int, device: torch.device
) -> None:
    x, residual = draw(device, rows, width), draw(device, rows, width, seed=1)
    before, weight = draw(device, width, seed=2), draw(device, width, seed=3)
    total, normed = norm_add_norm_reference(x, residual, before, weight, 1e-6)
    got_sum, got = norm_add_norm_quantized(x.clone(), residual, before, weight, 1e-6)
    torch.testing.assert_close(got_sum, total, atol=1e-4, rtol=1e-4)
    assert_stands_for(got, normed)


def test_a_batch_without_rows_gives_an_empty_result(device: torch.device) -> None:
    assert quantize_rows(torch.empty(0, 16, device=device)).values.shape == (0, 16)
    assert gated_activation_quantized(torch.empty(0, 32, device=device), "silu", True).values.shape == (0, 16)
