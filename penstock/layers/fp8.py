"""fp8 linear layers for CUDA. Weights are scaled per output at load, and activations per token in each step;
or both are scaled in the blocks of the checkpoint.

A layer accepts rows that a norm or an activation has quantised, or quantises them itself. On other devices
the product is computed from dequantised values, which is slow and for comparison only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, bias_act_, bias_act_quantized
from penstock.kernels.blockwise import BlockQuantized, block_matmul
from penstock.kernels.few_rows import few_rows_matmul, max_few_rows
from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import (
    Activations,
    Quantized,
    dequantize,
    quantize_rows,
    scaled_matmul_reference,
)
from penstock.layers.activation import activation

_MULTIPLE = 16  # inputs and outputs must be multiples: the library has no kernel for other sizes


class Fp8Linear:
    def __init__(
        self,
        weight: Tensor | Quantized,  # a Tensor is quantised here
        bias: Tensor | None,
        act: str = "identity",
        dtype: torch.dtype | None = None,  # output dtype; None: the weight's
    ) -> None:
        # The original weight is freed with the caller's reference.
        self.weight = weight if isinstance(weight, Quantized) else quantize_rows(weight)
        self.out_features, self.in_features = self.weight.values.shape
        self.dtype = dtype or (weight.values if isinstance(weight, Quantized) else weight).dtype
        self.bias = bias
        self.act = None if act == "identity" else activation(act)
        self.kernel = act if act in ACTIVATION_CODES else None
        self._max_few_rows = max_few_rows(self.weight)

    @staticmethod
    def fits(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether the library can multiply by this weight in fp8. Its row-wise product returns bfloat16."""
        outputs, inputs = weight.shape
        if weight.is_cuda and (dtype or weight.dtype) != torch.bfloat16:
            return False
        return outputs % _MULTIPLE == 0 and inputs % _MULTIPLE == 0

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if self.kernel is not None and use_kernel(self.weight.values):
            out = bias_act_(self._product(x, None), self.bias, self.kernel)
        else:
            out = self._product(x, self.bias)
            out = out if self.act is None else self.act(out)
        return out if residual is None else out + residual

    def quantized(self, x: Activations) -> Quantized:
        """Compute `__call__` with quantised output, for another fp8 layer."""
        if self.kernel is not None and use_kernel(self.weight.values):
            return bias_act_quantized(self._product(x, None), self.bias, self.kernel)
        return quantize_rows(self(x))

    def _product(self, x: Activations, bias: Tensor | None) -> Tensor:
        x = x if isinstance(x, Quantized) else quantize_rows(x)
        if not x.values.is_cuda:
            return scaled_matmul_reference(x, self.weight, bias, self.dtype)
        if not len(x.values):
            return torch.empty((0, self.out_features), dtype=self.dtype, device=x.values.device)
        if len(x.values) <= self._max_few_rows:
            return few_rows_matmul(x, self.weight, bias, self.dtype)
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
    """A layer whose weight the checkpoint stores in fp8 blocks. It quantises its input in groups."""

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
