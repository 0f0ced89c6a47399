from __future__ import annotations

import pytest
import torch

from penstock.kernels.norm import add_norm, add_norm_reference, norm_add_norm, norm_add_norm_reference

SHAPES = [(1, 8), (5, 384), (3, 37), (7, 768), (2, 1000)]


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize(("rms", "biased"), [(False, True), (False, False), (True, False)])
def test_sum_and_norm_equal_the_reference(
    tokens: int, width: int, rms: bool, biased: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(tokens, width, device=device) * 3 + 1 for _ in range(2))
    weight = torch.rand(width, device=device) + 0.5
    bias = torch.randn(width, device=device) if biased else None
    expected_sum, expected = add_norm_reference(x, residual, weight, bias, 1e-5, rms=rms)
    total, out = add_norm(x.clone(), residual, weight, bias, 1e-5, rms=rms)
    torch.testing.assert_close(total, expected_sum)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rms", [False, True])
def test_the_norm_replaces_a_sum_that_is_not_kept(device: torch.device, rms: bool) -> None:
    torch.manual_seed(2)
    x, residual = (torch.randn(3, 100, device=device) for _ in range(2))
    weight = torch.randn(100, device=device)
    _, expected = add_norm_reference(x, residual, weight, None, 1e-5, rms=rms)
    first, out = add_norm(x, residual, weight, None, 1e-5, rms=rms, keep=False)
    assert first is x and out is x
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_summed_in_fp32(device: torch.device) -> None:
    torch.manual_seed(1)
    x, residual = (torch.randn(4, 96, device=device).bfloat16() for _ in range(2))
    weight = torch.ones(96, device=device).bfloat16()
    _, expected = add_norm_reference(x.float(), residual.float(), weight.float(), None, 1e-6, rms=False)
    total, out = add_norm(x.clone(), residual, weight, None, 1e-6, rms=False)
    assert out.dtype == total.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_a_norm_before_and_after_the_sum_equals_the_reference(
    tokens: int, width: int, device: torch.device
) -> None:
    torch.manual_seed(2)
    x, residual = (torch.randn(tokens, width, device=device) for _ in range(2))
    before, weight = (torch.rand(width, device=device) + 0.5 for _ in range(2))
    expected = norm_add_norm_reference(x, residual, before, weight, 1e-6)
    got = norm_add_norm(x.clone(), residual, before, weight, 1e-6)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_batch_without_tokens_gives_an_empty_result(device: torch.device) -> None:
    x = torch.empty(0, 16, device=device)
    weight = torch.ones(16, device=device)
    assert add_norm(x, x, weight, None, 1e-5, rms=True)[1].shape == (0, 16)
