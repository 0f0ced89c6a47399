"""Dynamic int8 linear layers for CPUs: weights scaled per output channel, activations per token.

A token's scale and zero point depend only on its own values, so a row's result does not depend on its batch.
The product runs on unsigned levels. The zero points add an outer product of two vectors to the result, which
is subtracted before scale and bias are applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.cpu_shapes import pad_rows, padded_size
from penstock.layers.yield_points import yield_point

_MAGIC = float(1 << 23)  # adding it to a float leaves the value, rounded to an integer, in the low bits


class Int8Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None, act: str = "identity") -> None:
        self.out_features, self.in_features = weight.shape
        scale = weight.float().abs().amax(dim=1).clamp_min(1e-8) / 127
        quantised = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight: Tensor = _onednn().qlinear_prepack(quantised, None)
        self.weight_scale = scale
        self.weight_zero = torch.zeros(self.out_features, dtype=torch.int64)
        self.weight_sums = quantised.float().sum(dim=1) * scale  # [out]
        self.bias = torch.zeros(self.out_features) if bias is None else bias.float()
        self.act = None if act == "identity" else activation(act)
        # Without VNNI, pairs of products are added in 16 bits, so eight-bit levels would overflow: use seven.
        # One level stays free at both ends, because rounding the zero point shifts the outermost values by
        # up to half a level.
        self.levels = (255 if has_vnni() else 127) - 2

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        yield_point()
        x = dequantize(x)
        low = x.amin(dim=1, keepdim=True).clamp_max_(0)
        high = x.amax(dim=1, keepdim=True).clamp_min_(0)
        scale = (high - low).clamp_min_(1e-8) / self.levels  # [tokens, 1]
        inverse = scale.reciprocal()
        zero = (-low * inverse).round_().add_(1)  # [tokens, 1], integers
        levels = torch.addcmul(zero + _MAGIC, x, inverse).view(torch.int32).to(torch.uint8)
        product: Tensor = _onednn().qlinear_pointwise(
            pad_rows(levels, padded_size(len(x))),
            1.0,
            0,
            self.weight,
            self.weight_scale,
            self.weight_zero,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )[: len(x)]
        product.addr_(zero.squeeze(1), self.weight_sums, alpha=-1)
        out = torch.addcmul(self.bias, product, scale)
        if self.act is not None:
            out = self.act(out)
        return out if residual is None else out.add_(residual)


def has_vnni() -> bool:
    """Whether the CPU accumulates products of bytes in 32 bits, without intermediate overflow."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported()) if supported is not None else False


def _onednn() -> Any:
    return torch.ops.onednn
