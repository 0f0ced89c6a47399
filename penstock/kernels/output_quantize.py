"""Quantisation of output vectors in one pass, to 8-bit integers or to one bit per component."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import jit, next_power_of_2, num_warps_for, tl


def to_int8_reference(vectors: Tensor, signed: bool) -> Tensor:
    """Scale each vector [n, width] to a largest component of ±127, and round. Add 128 if unsigned."""
    largest = vectors.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12)
    scaled = (vectors * (127.0 / largest)).round()
    return scaled.to(torch.int8) if signed else (scaled + 128).to(torch.uint8)


def to_binary_reference(vectors: Tensor, signed: bool) -> Tensor:
    """Pack the signs of components, eight per byte, the first in the highest bit. Subtract 128 if signed."""
    rows, width = vectors.shape
    bits = F.pad((vectors > 0).to(torch.uint8), (0, -width % 8)).view(rows, -1, 8)
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=vectors.device)
    packed = (bits << shifts).sum(dim=-1, dtype=torch.uint8)
    return (packed.to(torch.int16) - 128).to(torch.int8) if signed else packed


@jit(unspecialized=("stride",))
def _to_int8(
    vectors: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(vectors + row * stride + cols, mask=inside, other=0.0)
    value = value * (127.0 / tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12))
    value = (value + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to integers, halves to even
    if not SIGNED:
        value += 128.0
    tl.store(out + row * WIDTH + cols, value.to(out.dtype.element_ty), mask=inside)


def to_int8(vectors: Tensor, signed: bool) -> Tensor:
    """Compute `to_int8_reference` for fp32 vectors; rows may be strided."""
    rows, width = vectors.shape
    out = torch.empty((rows, width), dtype=torch.int8 if signed else torch.uint8, device=vectors.device)
    block = next_power_of_2(width)
    if rows:
        _to_int8[(rows,)](
            vectors,
            out,
            vectors.stride(0),
            WIDTH=width,
            BLOCK=block,
            SIGNED=signed,
            num_warps=num_warps_for(block),
        )
    return out


@jit(unspecialized=("stride",))
def _to_binary(
    vectors: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    cols = byte[:, None] * 8 + bit[None, :]
    value = tl.load(vectors + row * stride + cols, mask=cols < WIDTH, other=0.0)
    packed = tl.sum((value > 0).to(tl.int32) << (7 - bit)[None, :], axis=1)
    if SIGNED:
        packed -= 128
    tl.store(out + row * BYTES + byte, packed.to(out.dtype.element_ty), mask=byte < BYTES)


def to_binary(vectors: Tensor, signed: bool) -> Tensor:
    """Compute `to_binary_reference` for fp32 vectors; rows may be strided."""
    rows, width = vectors.shape
    size = -(-width // 8)
    out = torch.empty((rows, size), dtype=torch.int8 if signed else torch.uint8, device=vectors.device)
    block = next_power_of_2(size)
    if rows:
        _to_binary[(rows,)](
            vectors,
            out,
            vectors.stride(0),
            WIDTH=width,
            BYTES=size,
            BLOCK=block,
            SIGNED=signed,
            num_warps=num_warps_for(8 * block),
        )
    return out
