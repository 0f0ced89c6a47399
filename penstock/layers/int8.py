"""Dynamic int8 linear layers for CPUs: weights scaled per output channel, activations per token.

A token's scale comes from its own values alone, so a row's answer does not depend on what shares its
batch. The product runs on unsigned activations with one fixed zero point; what is known about the
input's sign decides which. Scale and bias are applied to the product in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.layers.activation import activation

# Input comes out of → (zero point, least value it can have). After an activation nearly all of the
# range is positive, and so are nearly all of the 256 levels.
_ZERO_POINTS = {
    "relu": (0, 0.0),
    "gelu": (16, 0.17),
    "gelu_new": (16, 0.171),
    "gelu_pytorch_tanh": (16, 0.171),
}
_SYMMETRIC = 128
_LEVELS = 255
_MAGIC = float(1 << 23)  # a float of this size keeps integers in its low bits, rounded to nearest


class Int8Linear:
    def __init__(
        self, weight: Tensor, bias: Tensor | None, act: str = "identity", input_act: str = ""
    ) -> None:
        self.out_features, self.in_features = weight.shape
        scale = weight.float().abs().amax(dim=1).clamp_min(1e-8) / 127
        quantised = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.weight: Tensor = _onednn().qlinear_prepack(quantised, None)
        self.weight_scale = scale
        self.weight_zero = torch.zeros(self.out_features, dtype=torch.int64)
        self.bias = torch.zeros(self.out_features) if bias is None else bias.float()
        self.act = None if act == "identity" else activation(act)
        zero, self.below_zero = _ZERO_POINTS.get(input_act, (_SYMMETRIC, 0.0))
        self.symmetric = zero == _SYMMETRIC
        halve = 1 if has_vnni() else 2  # pairs of products must fit 16 bits where they are added in them
        self.zero, self.above_zero = zero // halve, (_LEVELS - zero) // halve
        self.shift = torch.tensor(_MAGIC + self.zero)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        scale = self._token_scale(x)  # [tokens, 1]
        shifted = torch.addcmul(self.shift, x, scale.reciprocal())
        levels = shifted.view(torch.int32).to(torch.uint8)
        product: Tensor = _onednn().qlinear_pointwise(
            levels,
            1.0,
            self.zero,
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
        )
        out = torch.addcmul(self.bias, product, scale)
        if self.act is not None:
            out = self.act(out)
        return out if residual is None else out.add_(residual)

    def _token_scale(self, x: Tensor) -> Tensor:
        if self.symmetric:
            return (x.abs().amax(dim=1, keepdim=True) / self.above_zero).clamp_min_(1e-8)
        least = max(self.below_zero / max(self.zero, 1), 1e-8)
        return (x.amax(dim=1, keepdim=True) / self.above_zero).clamp_min_(least)


def has_vnni() -> bool:
    """Whether the CPU adds products of bytes in 32 bits, with no overflow on the way."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return bool(supported()) if supported is not None else False


def _onednn() -> Any:
    return torch.ops.onednn
