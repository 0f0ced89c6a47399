"""Heads: the processing of pooled vectors before they are returned, for all rows of a variant at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import output_quantize
from penstock.kernels import pooling as kernel
from penstock.kernels.language import use_kernel
from penstock.layers.linear import LinearLayer
from penstock.types import OutputDtype, PoolingParams, Task, Variant

BINARY_DTYPES = (OutputDtype.BINARY, OutputDtype.UBINARY)

VectorModule = Callable[[Tensor], Tensor]  # fp32 [rows, width] → [rows, width]


class Dense:
    """A projection after pooling, with its activation and an optional residual."""

    def __init__(self, linear: LinearLayer, residual: LinearLayer | None, add_input: bool) -> None:
        self.linear = linear
        self.residual = residual
        self.add_input = add_input

    def __call__(self, pooled: Tensor) -> Tensor:
        out = self.linear(pooled)
        if self.residual is not None:
            return out + self.residual(pooled)
        return out + pooled if self.add_input else out


class LayerNorm:
    """A layer norm after pooling."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, pooled: Tensor) -> Tensor:
        return F.layer_norm(pooled, self.weight.shape, self.weight, self.bias, self.eps)


def unit(vectors: Tensor, selected: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalise the selected vectors, or all, to unit length."""
    return (kernel.normalize_rows if use_kernel(vectors) else kernel.normalize_rows_reference)(
        vectors, selected, dtype
    )


def quantize(vectors: Tensor) -> Tensor:
    """Replace each component x by round(127 · tanh(x)), as fp32: the integers that pplx-embed returns."""
    return vectors.float().tanh().mul_(127).round_()


def cast(vectors: Tensor, dtype: OutputDtype, *, are_integers: bool = False) -> Tensor:
    """Convert fp32 vectors to an output dtype.

    int8 and uint8 scale each vector so that its largest component becomes ±127. Directions, and so cosines,
    are kept to about 1 %; lengths are not. uint8 adds 128. With `are_integers`, the components are integers
    from -127 to 127 and are not scaled. binary and ubinary keep the sign of each component, eight per byte,
    the first in the highest bit.
    """
    match dtype:
        case OutputDtype.FLOAT32:
            return vectors
        case OutputDtype.FLOAT16:
            return vectors.to(torch.float16)
        case OutputDtype.BFLOAT16:
            return vectors.to(torch.bfloat16).view(torch.uint16)
        case OutputDtype.INT8 if are_integers:
            return vectors.to(torch.int8)
        case OutputDtype.UINT8 if are_integers:
            return (vectors + 128).to(torch.uint8)
        case OutputDtype.INT8 | OutputDtype.UINT8:
            to_int8 = output_quantize.to_int8 if use_kernel(vectors) else output_quantize.to_int8_reference
            return to_int8(vectors, dtype is OutputDtype.INT8)
        case OutputDtype.BINARY | OutputDtype.UBINARY:
            to_binary = (
                output_quantize.to_binary if use_kernel(vectors) else output_quantize.to_binary_reference
            )
            return to_binary(vectors, dtype is OutputDtype.BINARY)


def _is_raw_vector(params: PoolingParams) -> bool:
    return params.task is Task.EMBED and not params.normalize


class PoolerOutput(NamedTuple):
    """Each variant's values in its output dtype."""

    values: list[Tensor]
    finite: list[Tensor]  # uint8, 0 if a row was not finite before its cast; empty if all outputs are fp32


def to_output(
    values: list[Tensor], variants: tuple[Variant, ...], *, quantizes: bool = False
) -> PoolerOutput:
    """Cast each variant's values. Other dtypes than fp32 need flags that say whether values were finite.

    With `quantizes`, the model's vectors are integers unless they were normalised.
    """
    dtypes = [variant.params.dtype for variant in variants]
    outputs = [
        cast(value, params.dtype, are_integers=quantizes and _is_raw_vector(params))
        for value, params in zip(values, (variant.params for variant in variants), strict=True)
    ]
    if all(dtype is OutputDtype.FLOAT32 for dtype in dtypes):
        return PoolerOutput(outputs, [])
    return PoolerOutput(outputs, [value.isfinite().all(dim=-1).to(torch.uint8) for value in values])
