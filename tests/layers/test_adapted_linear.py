"""The tensors that adapted layers store for kernels, and when the fused product is used."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.layers.adapted_linear import AdaptedLinear
from penstock.layers.adapter_lines import MANY_SLOTS, slots_per_tile
from penstock.layers.adapter_state import AdapterSlots
from penstock.layers.linear import Linear, make_linear
from penstock.weights.adapters import PartWeights
from tests.helpers import ints


@pytest.mark.parametrize(
    ("slots", "lengths", "expected"),
    [
        ([3], [1000], 1),
        ([0, 1, 2, 3], [128] * 4, 1),
        ([0, 1] * 4, [64] * 8, 2),
        (list(range(16)), [32] * 16, 4),
        (list(range(64)), [10] * 64, MANY_SLOTS),
        ([5] * 64, [10] * 64, 1),  # adjacent rows with the same slot
        ([-1, 2] * 8, [32] * 16, 2),  # half of the lines have no adapter
        ([-1] * 8, [32] * 8, 1),
        ([], [], MANY_SLOTS),
    ],
)
def test_slots_per_tile_are_counted(slots: list[int], lengths: list[int], expected: int) -> None:
    assert slots_per_tile(ints(slots), ints(lengths)) == expected


def test_a_slot_has_zeros_beyond_its_rank() -> None:
    """The fused product multiplies by all columns of the rank bucket."""
    layer = AdaptedLinear(
        Linear(torch.randn(24, 8), None),
        "identity",
        (16, 8),
        AdapterSlots(2, 16),
        (torch.float32, torch.device("cpu")),
        has_bias=False,
    )

    def part(rank: int, size: int) -> PartWeights:
        return PartWeights(torch.randn(rank, 8), torch.randn(size, rank))

    layer.write(1, {0: part(16, 16), 1: part(5, 8)})
    layer.write(1, {0: part(3, 16)})
    low = layer._low
    assert low is not None and layer.ranks[1] == (3, 0)
    assert low.down[1, :3].abs().min() > 0 and low.up[1, :16, :3].abs().min() > 0
    assert not low.down[1, 3:].any() and not low.up[1, :16, 3:].any() and not low.up[1, 16:].any()
    layer.clear(1)
    assert not low.down[1].any() and not low.up[1].any()
    assert np.array_equal(low.ranks.numpy(), np.zeros((2, 2)))


@pytest.mark.parametrize("act", ["identity", "gelu"])
def test_the_weight_of_a_layer_with_a_bias_is_read_exactly(act: str) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 40, generator=draw), 100 * torch.randn(24, generator=draw)
    plain = make_linear(weight.clone(), bias, act, None)
    room, like = AdapterSlots(1, 4), (torch.float32, torch.device("cpu"))
    layer = AdaptedLinear(plain, act, (16, 8), room, like, has_bias=True)
    with torch.inference_mode():
        assert torch.equal(torch.cat([layer.base_rows(0), layer.base_rows(1)]), weight)
