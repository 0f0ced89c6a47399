"""Normalisation layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class LayerNorm:
    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm:
    """Over the last axis, squares summed in fp32. Families that store weight − 1 add it on loading."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self.shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)
