from __future__ import annotations

import pytest
import torch

from penstock.kernels.output_quantize import to_binary, to_binary_reference, to_int8, to_int8_reference


@pytest.mark.parametrize("width", [1, 8, 37, 384])
@pytest.mark.parametrize("signed", [True, False])
def test_int8_and_binary_equal_the_reference(width: int, signed: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(5, 400, device=device)[:, :width]  # strided rows
    vectors[1] = 0
    got, expected = to_int8(vectors, signed), to_int8_reference(vectors, signed)
    assert got.dtype == expected.dtype and (got.int() - expected.int()).abs().max() <= 1
    assert (got == expected).float().mean() > 0.99
    assert torch.equal(to_binary(vectors, signed), to_binary_reference(vectors, signed))


def test_halves_are_rounded_to_even(device: torch.device) -> None:
    vectors = torch.tensor([[127.0, 0.5, 1.5, -2.5]], device=device)
    assert to_int8(vectors, signed=True).tolist() == [[127, 0, 2, -2]]
