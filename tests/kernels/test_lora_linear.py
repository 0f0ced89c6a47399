"""A layer and its adapters in one launch: the reference, and the size of tiles. tests/gpu/test_lora.py runs
the kernel."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import lora_linear
from penstock.kernels.activation import gated_activation_reference
from penstock.kernels.lora import LowRank, apply_reference
from penstock.kernels.lora_linear import LoraLinear, lora_linear_reference


def test_the_reference_is_the_layer_with_its_adapters() -> None:
    ranks, slots = [(3, 0), (4, 2)], torch.tensor([0, -1, 1, 1, 0], dtype=torch.int32)
    low = LowRank(
        torch.randn(2, 8, 6), torch.randn(2, 10, 4), torch.tensor(ranks, dtype=torch.int32), (5, 10)
    )
    x, weight, bias = torch.randn(5, 6), torch.randn(10, 6), torch.randn(10)
    groups = [(slot, (slots == slot).nonzero().squeeze(1)) for slot in (-1, 0, 1)]
    both = apply_reference(x @ weight.t() + bias, x, low, groups, ranks)
    torch.testing.assert_close(lora_linear_reference(x, weight, bias, low, slots), both)
    found = lora_linear_reference(x, weight, bias, low, slots, "silu", False)
    torch.testing.assert_close(found, gated_activation_reference(both, "silu", False))


def made(
    monkeypatch: pytest.MonkeyPatch, inner: int, ends: tuple[int, ...], gate_first: bool | None = None
) -> LoraLinear:
    """Pretend to have a device with 132 multiprocessors."""
    monkeypatch.setattr(lora_linear, "descriptor", lambda *args: None)
    monkeypatch.setattr(lora_linear, "num_programs", lambda device: 132)
    weight = torch.empty(ends[-1], inner, dtype=torch.bfloat16)
    return LoraLinear(weight, None, ends, None if gate_first is None else "silu", gate_first)


@pytest.mark.parametrize(
    ("inner", "ends", "gate_first", "at_2048"),
    [
        (768, (768, 1536, 2304), None, 128),
        (768, (768,), None, 128),
        (768, (3072,), None, 128),
        (1024, (2048, 3072, 4096), None, 256),
        (1024, (3072, 6144), True, 256),
        (3072, (1024,), None, 128),
    ],
)
def test_tiles_have_the_size_that_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
    inner: int,
    ends: tuple[int, ...],
    gate_first: bool | None,
    at_2048: int,
) -> None:
    layer = made(monkeypatch, inner, ends, gate_first)
    assert (layer.columns(2048, 16), layer.columns(16384, 16)) == (at_2048, 256)
    assert layer.columns(16384, 64) == 128  # a B matrix of 256 columns does not fit


def test_a_tile_is_of_one_part_and_holds_a_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = made(monkeypatch, 768, (384, 768))
    assert narrow.column_choices(16) == (128,)
    assert [narrow.slots_per_pass(rank) for rank in (16, 32, 64, 128)] == [4, 2, 1, 0]
    gated = made(monkeypatch, 768, (384, 768), True)
    assert [gated.slots_per_pass(rank) for rank in (16, 32, 64)] == [2, 1, 0]
