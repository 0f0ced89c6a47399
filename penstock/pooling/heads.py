"""Heads: what happens to pooled vectors before they leave, for all rows of a variant at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.core import OutputDtype
from penstock.kernels import pooling as kernel
from penstock.kernels.language import fused
from penstock.layers.linear import LinearLayer


class Dense:
    """A projection after the pooling, with its activation inside and an optional residual."""

    def __init__(self, linear: LinearLayer, residual: LinearLayer | None, add_input: bool) -> None:
        self.linear = linear
        self.residual = residual
        self.add_input = add_input

    def __call__(self, pooled: Tensor) -> Tensor:
        out = self.linear(pooled)
        if self.residual is not None:
            return out + self.residual(pooled)
        return out + pooled if self.add_input else out


def unit(vectors: Tensor) -> Tensor:
    """fp32 vectors of length 1."""
    return kernel.unit(vectors) if fused(vectors) else kernel.unit_reference(vectors)


def cast(vectors: Tensor, dtype: OutputDtype) -> Tensor:
    """fp32 vectors in the form that they leave in.

    int8 and uint8 scale each vector so that its largest component becomes ±127: directions, and so
    cosines, are kept to about 1 %, lengths are not. uint8 is the same plus 128. binary and ubinary
    keep the sign of each component, eight to a byte, first component in the highest bit.
    """
    match dtype:
        case OutputDtype.FLOAT32:
            return vectors
        case OutputDtype.FLOAT16:
            return vectors.to(torch.float16)
        case OutputDtype.BFLOAT16:
            return vectors.to(torch.bfloat16).view(torch.uint16)
        case OutputDtype.INT8:
            return _scaled(vectors).to(torch.int8)
        case OutputDtype.UINT8:
            return (_scaled(vectors) + 128).to(torch.uint8)
        case OutputDtype.UBINARY:
            return _signs(vectors)
        case OutputDtype.BINARY:
            return (_signs(vectors).to(torch.int16) - 128).to(torch.int8)


def _scaled(vectors: Tensor) -> Tensor:
    largest = vectors.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
    return (vectors * (127.0 / largest)).round()


def _signs(vectors: Tensor) -> Tensor:
    rows, width = vectors.shape
    bits = F.pad((vectors > 0).to(torch.uint8), (0, -width % 8)).view(rows, -1, 8)
    places = torch.arange(7, -1, -1, dtype=torch.uint8, device=vectors.device)
    return (bits << places).sum(dim=-1, dtype=torch.uint8)
