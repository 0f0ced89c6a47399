"""Normalisation layers."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.norm import (
    add_norm,
    add_norm_quantized,
    add_norm_reference,
    norm_add_norm,
    norm_add_norm_quantized,
    norm_add_norm_reference,
)
from penstock.kernels.quantize import Activations
from penstock.layers.fp8 import Fp8Linear


class Norm:
    """Normalises the last axis in fp32. If only an fp8 layer reads the output, the norm quantises it."""

    rms: ClassVar[bool] = False

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.shape = tuple(weight.shape)
        self.quantizes = False

    def quantize_for(self, layer: object) -> None:
        """Quantise the output if `layer`, its only reader, is an fp8 layer."""
        self.quantizes = isinstance(getattr(layer, "base", layer), Fp8Linear)

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def pre_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Activations]:
        """Return (x + residual, the normalised sum for the next layer). May overwrite `x`."""
        if not use_kernel(x):
            return add_norm_reference(x, residual, self.weight, self.bias, self.eps, rms=self.rms)
        kernel = add_norm_quantized if self.quantizes else add_norm
        return kernel(x, residual, self.weight, self.bias, self.eps, rms=self.rms)

    def post_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Activations]:
        """Return x + residual normalised, as the next residual and for the next layer. May overwrite `x`."""
        if not use_kernel(x):
            out = self(x + residual)
            return out, out
        if self.quantizes:
            return add_norm_quantized(x, residual, self.weight, self.bias, self.eps, rms=self.rms, post=True)
        return add_norm(x, residual, self.weight, self.bias, self.eps, rms=self.rms, keep=False)


class LayerNorm(Norm):
    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    """RMS norm. If a family stores weight − 1, the 1 is added at load."""

    rms = True

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__(weight, None, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


def sandwich(x: Tensor, residual: Tensor, before: RMSNorm, after: RMSNorm) -> tuple[Tensor, Activations]:
    """Return (before(x) + residual, the sum normalised by `after`). May overwrite `x`."""
    assert before.eps == after.eps  # the kernel takes one
    if after.quantizes and use_kernel(x):
        return norm_add_norm_quantized(x, residual, before.weight, after.weight, after.eps)
    kernel = norm_add_norm if use_kernel(x) else norm_add_norm_reference
    return kernel(x, residual, before.weight, after.weight, after.eps)
