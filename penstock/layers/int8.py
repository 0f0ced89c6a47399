"""Dynamic int8 linear layers for CPUs: weights per output channel, activations per step.

The weight is quantised once, symmetric, one scale for each output. Activations are quantised as they
arrive, asymmetric in eight bits. Bias, dequantisation and activation are fused into the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.layers.activation import activation
from penstock.layers.linear import PackedLinear


class Int8Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None, act: str = "identity") -> None:
        self.out_features, self.in_features = weight.shape
        scale = weight.abs().amax(dim=1).clamp_min(1e-8) / 127
        quantised = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight: Tensor = _onednn().qlinear_prepack(quantised, [1024, self.in_features])
        self.weight_scale = scale.float()
        self.weight_zero = torch.zeros(self.out_features, dtype=torch.int64)
        self.bias = bias
        self.fused = act in PackedLinear.FUSED
        self.op, self.algorithm = PackedLinear.FUSED.get(act, ("none", ""))
        self.act = activation(act)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        low, high = (float(bound) for bound in torch.aminmax(x))
        scale = max(high - low, 1e-8) / 255
        zero = min(255, max(0, round(-low / scale)))
        quantised = torch.quantize_per_tensor(x, scale, zero, torch.quint8).int_repr()
        out: Tensor = _onednn().qlinear_pointwise(
            quantised,
            scale,
            zero,
            self.weight,
            self.weight_scale,
            self.weight_zero,
            self.bias,
            1.0,
            0,
            torch.float32,
            self.op,
            [],
            self.algorithm,
        )
        if not self.fused:
            out = self.act(out)
        return out if residual is None else out.add_(residual)


def _onednn() -> Any:
    return torch.ops.onednn
