"""Feed-forward blocks."""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, gated_activation, gated_activation_quantized
from penstock.kernels.gate_up import GateUp
from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import Activations
from penstock.layers.activation import activation
from penstock.layers.adapted_linear import AdaptedLinear, current_form, unwrap
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.linear import Linear, LinearLayer


class MLP:
    """down(up(x)); `up` applies the activation."""

    def __init__(self, up: LinearLayer, down: LinearLayer) -> None:
        self.up = up
        self.down = down
        self.quantized: Fp8Linear | None = None
        if isinstance(plain := unwrap(up), Fp8Linear) and isinstance(unwrap(down), Fp8Linear):
            self.quantized = plain

    @property
    def input_layer(self) -> LinearLayer:
        """The linear layer that reads the input."""
        return self.up

    def __call__(
        self,
        x: Activations,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]; `residual` of the same shape is added last.

        `out` and `scratch` are optional tensors for the result and for the output of `up`.
        """
        if self.quantized is not None and not _is_adapted(self.up):
            return self.down(self.quantized.quantized(x), residual, out)
        return self.down(self.up(x, out=scratch), residual, out)


class GatedMLP:
    """down(act(gate(x)) · up(x)).

    `gate_up` computes gate and up in one product. `gate_first` says whether the first half is the gate.
    """

    def __init__(self, gate_up: LinearLayer, down: LinearLayer, act: str, gate_first: bool = True) -> None:
        self.gate_up = gate_up
        self.down = down
        self.act = activation(act)
        self.kernel = act if act in ACTIVATION_CODES else None
        self.gate_first = gate_first
        if isinstance(gate_up, AdaptedLinear) and self.kernel is not None:
            gate_up.gate = self.kernel, gate_first
        self.fused_gate_up: GateUp | None = None
        plain = unwrap(gate_up)
        if isinstance(plain, Linear) and plain.bias is None and not isinstance(unwrap(down), Fp8Linear):
            self.fused_gate_up = GateUp.of(plain.weight, act, gate_first)

    @property
    def input_layer(self) -> LinearLayer:
        """The linear layer that reads the input."""
        return self.gate_up

    def __call__(
        self,
        x: Activations,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """Compute the block as in `MLP`; `scratch` is as wide as gate and up together."""
        if self.fused_gate_up is not None and not _is_adapted(self.gate_up) and self.fused_gate_up.serves(x):
            return self.down(self.fused_gate_up(x), residual, out)
        down_form = current_form(self.down)
        if (
            self.kernel is not None
            and isinstance(self.gate_up, AdaptedLinear)
            and self.gate_up.is_active
            and not isinstance(down_form, Fp8Linear)
        ):
            gated = self.gate_up.gated(x, self.kernel, self.gate_first, scratch)
            if gated is not None:
                return self.down(gated, residual, out)
        both = self.gate_up(x, out=scratch)
        if self.kernel is not None and use_kernel(both):
            if isinstance(down_form, Fp8Linear):
                return self.down(
                    gated_activation_quantized(both, self.kernel, self.gate_first), residual, out
                )
            return self.down(gated_activation(both, self.kernel, self.gate_first), residual, out)
        first, second = both.chunk(2, dim=-1)  # views, [tokens, intermediate] each
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down(self.act(gate).mul_(up), residual, out)


def _is_adapted(layer: LinearLayer) -> bool:
    """Whether adapters change this layer in the current step."""
    return isinstance(layer, AdaptedLinear) and layer.is_active
