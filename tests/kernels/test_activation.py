from __future__ import annotations

import pytest
import torch

from penstock.kernels.activation import (
    ACTIVATION_CODES,
    bias_act_,
    bias_act_reference,
    gated_activation,
    gated_activation_reference,
)
from penstock.layers.activation import activation

WIDTHS = [8, 37, 1024, 1500, 3072]


@pytest.mark.parametrize("act", ACTIVATION_CODES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [True, False])
def test_bias_and_activation_equal_the_reference(
    act: str, width: int, biased: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, width, device=device) * 3
    bias = torch.randn(width, device=device) if biased else None
    expected = bias_act_reference(x, bias, act)
    out = bias_act_(x, bias, act)
    assert out is x
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("act", ACTIVATION_CODES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gate_first", [True, False])
def test_gate_times_up_equals_the_reference(
    act: str, width: int, gate_first: bool, device: torch.device
) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 2 * width, device=device) * 2
    expected = gated_activation_reference(x, act, gate_first)
    torch.testing.assert_close(gated_activation(x, act, gate_first), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("act", ACTIVATION_CODES)
def test_the_reference_equals_the_activation_of_the_layers(act: str) -> None:
    x = torch.randn(4, 50)
    assert torch.equal(bias_act_reference(x, None, act), activation(act)(x))
