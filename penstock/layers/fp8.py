"""fp8 linear layers for CUDA: weights scaled per output row at load, activations per token as they come; or
both in the blocks that a checkpoint stores.

A layer takes rows that are quantised already, as norms and activations hand them on, or does it itself.
Elsewhere than on CUDA the same product is made of what the fp8 values stand for: slow, for comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, bias_act_, bias_act_quantized
from penstock.kernels.blockwise import BlockQuantized, block_matmul
from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import (
    Activations,
    Quantized,
    dequantize,
    quantize_rows,
    scaled_matmul_reference,
)
from penstock.layers.activation import activation

_STEP = 16  # inputs and outputs come in multiples of it, or the library has no kernel


class Fp8Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None, act: str = "identity") -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = quantize_rows(weight)  # the weight as it was is freed with the caller's reference
        self.dtype = weight.dtype
        self.bias = bias
        self.act = None if act == "identity" else activation(act)
        self.kernel = act if act in ACTIVATION_CODES else None

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether the library multiplies such weights in fp8; its row-wise product gives bfloat16."""
        outputs, inputs = weight.shape
        if weight.is_cuda and weight.dtype != torch.bfloat16:
            return False
        return outputs % _STEP == 0 and inputs % _STEP == 0

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self.kernel is not None and use_kernel(self.weight.values):
            out = bias_act_(self._product(x, None), self.bias, self.kernel)
        else:
            out = self._product(x, self.bias)
            out = out if self.act is None else self.act(out)
        return out if residual is None else out + residual

    def quantized(self, x: Activations) -> Quantized:
        """The same for another fp8 layer: an activation that is a kernel quantises what it writes."""
        if self.kernel is not None and use_kernel(self.weight.values):
            return bias_act_quantized(self._product(x, None), self.bias, self.kernel)
        return quantize_rows(self(x))

    def _product(self, x: Activations, bias: Tensor | None) -> Tensor:
        x = x if isinstance(x, Quantized) else quantize_rows(x)
        if not x.values.is_cuda:
            return scaled_matmul_reference(x, self.weight, bias, self.dtype)
        if not len(x.values):
            return torch.empty((0, self.out_features), dtype=self.dtype, device=x.values.device)
        return torch._scaled_mm(
            x.values,
            self.weight.values.t(),
            scale_a=x.scales,
            scale_b=self.weight.scales.t(),
            bias=bias,
            out_dtype=self.dtype,
            use_fast_accum=True,
        )


class BlockLinear:
    """On a weight that the checkpoint stores in blocks. It quantises its rows itself, in groups."""

    def __init__(self, weight: BlockQuantized, bias: Tensor | None, act: str, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.weight = weight
        self.bias = bias
        self.dtype = dtype
        self.act = None if act == "identity" else activation(act)
        self.kernel = act if act in ACTIVATION_CODES else None

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = dequantize(x, self.dtype)
        if self.kernel is not None and use_kernel(x):
            out = bias_act_(block_matmul(x, self.weight), self.bias, self.kernel)
        else:
            out = block_matmul(x, self.weight, self.bias)
            out = out if self.act is None else self.act(out)
        return out if residual is None else out + residual
