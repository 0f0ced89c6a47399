"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.activation import KINDS, gated
from penstock.kernels.language import fused
from penstock.layers.activation import activation
from penstock.layers.linear import LinearLayer


class MLP:
    """down(up(x)); the activation is `up`'s own."""

    def __init__(self, up: LinearLayer, down: LinearLayer) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last."""
        return self.down(self.up(x), residual)


class GatedMLP:
    """down(act(gate(x)) · up(x)). `gate_up` gives gate and up side by side in one product; `gate_first` says
    which half is the gate."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer, act: str, gate_first: bool = True) -> None:
        self.gate_up = gate_up
        self.down = down
        self.act = activation(act)
        self.kernel = act if act in KINDS else None
        self.gate_first = gate_first

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last."""
        both = self.gate_up(x)
        if self.kernel is not None and fused(both):
            return self.down(gated(both, self.kernel, self.gate_first), residual)
        first, second = both.chunk(2, dim=-1)  # views, [tokens, intermediate] each
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down(self.act(gate).mul_(up), residual)
