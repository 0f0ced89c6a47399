from __future__ import annotations

import pytest
import torch

from penstock.kernels.cast import to_bits, to_bits_reference, to_bytes, to_bytes_reference


@pytest.mark.parametrize("width", [1, 8, 37, 384])
@pytest.mark.parametrize("signed", [True, False])
def test_bytes_and_bits_equal_the_reference(width: int, signed: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    vectors = torch.randn(5, 400, device=device)[:, :width]  # rows that lie apart
    vectors[1] = 0
    got, expected = to_bytes(vectors, signed), to_bytes_reference(vectors, signed)
    assert got.dtype == expected.dtype and (got.int() - expected.int()).abs().max() <= 1
    assert (got == expected).float().mean() > 0.99
    assert torch.equal(to_bits(vectors, signed), to_bits_reference(vectors, signed))


def test_halves_are_rounded_to_even(device: torch.device) -> None:
    vectors = torch.tensor([[127.0, 0.5, 1.5, -2.5]], device=device)
    assert to_bytes(vectors, signed=True).tolist() == [[127, 0, 2, -2]]
