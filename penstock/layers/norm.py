"""Normalisation layers."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import fused
from penstock.kernels.norm import add_norm, add_norm_reference, norm_add_norm, norm_add_norm_reference


class Norm:
    """Over the last axis, in fp32."""

    rms: ClassVar[bool] = False

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def join(self, x: Tensor, residual: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
        """(x + residual, the same normalised). `x` may be overwritten; `keep` says if the sum is wanted."""
        if fused(x):
            return add_norm(x, residual, self.weight, self.bias, self.eps, rms=self.rms, keep=keep)
        return add_norm_reference(x, residual, self.weight, self.bias, self.eps, rms=self.rms)


class LayerNorm(Norm):
    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    """Families that store weight − 1 add it on loading."""

    rms = True

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight, None, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def sandwich(x: Tensor, residual: Tensor, before: RMSNorm, after: RMSNorm) -> tuple[Tensor, Tensor]:
    """(before(x) + residual, the same normalised by `after`). `x` may be overwritten."""
    kernel = norm_add_norm if fused(x) else norm_add_norm_reference
    return kernel(x, residual, before.weight, after.weight, after.eps)
