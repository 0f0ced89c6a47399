from __future__ import annotations

import torch
import torch.nn.functional as F

from penstock.layers.linear import Linear
from penstock.layers.mlp import MLP, GatedMLP

GENERATOR = torch.Generator().manual_seed(0)
X, WIDE = torch.randn(5, 8, generator=GENERATOR), torch.randn(12, 8, generator=GENERATOR)
DOWN, HALF = torch.randn(8, 6, generator=GENERATOR), torch.randn(8, 12, generator=GENERATOR)


def test_the_gate_is_activated_and_may_come_first_or_last() -> None:
    first, last = WIDE.chunk(2)
    down = Linear(DOWN, None)
    gate_first = GatedMLP(Linear(WIDE, None), down, "silu")(X)
    gate_last = GatedMLP(Linear(WIDE, None), down, "silu", gate_first=False)(X)
    torch.testing.assert_close(gate_first, (F.silu(X @ first.T) * (X @ last.T)) @ DOWN.T)
    torch.testing.assert_close(gate_last, (F.silu(X @ last.T) * (X @ first.T)) @ DOWN.T)


def test_the_residual_is_added_last() -> None:
    gated = GatedMLP(Linear(WIDE, None), Linear(DOWN, None), "gelu")
    torch.testing.assert_close(gated(X, residual=X), gated(X) + X)
    plain = MLP(Linear(WIDE, None, "gelu"), Linear(HALF, None))
    torch.testing.assert_close(plain(X, residual=X), F.gelu(X @ WIDE.T) @ HALF.T + X)
