"""Products with 4-bit weights: the kernel reads half a byte a weight and multiplies in the rows' precision.

For few rows, reading the weight takes most of the time, so the product dequantises as it reads. For many rows
the matrix library is faster, and `dequantize_int4` writes the weight for it once a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import cdiv, jit, tl, use_kernel

SPAN = 128  # inputs that are packed together: byte i has input i in its low bits, and input 64 + i
HALF_RANGE = 8  # the zero of weights that have no zero points


class PackedInt4(NamedTuple):
    """A weight equal to (codes − zeros) · scales, with a scale and a zero for each group of inputs."""

    packed: Tensor  # uint8 [outputs, ⌈inputs / SPAN⌉ · SPAN / 2]
    scales: Tensor  # [groups, outputs]
    zeros: Tensor | None  # uint8 [groups, outputs]; None: `HALF_RANGE`
    inputs: int

    @property
    def outputs(self) -> int:
        return len(self.packed)

    @property
    def group_size(self) -> int:
        """Inputs of a group. One group covers the padding as well."""
        padded = 2 * self.packed.shape[1]
        return padded if len(self.scales) == 1 else self.inputs // len(self.scales)


def can_pack(inputs: int, groups: int) -> bool:
    """Whether the kernels can read groups of this size."""
    if groups == 1:
        return True
    size = inputs // groups
    return inputs % groups == 0 and (size % SPAN == 0 or SPAN % size == 0) and size >= 16


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedInt4:
    """Pack uint8 codes [outputs, inputs] of 0 to 15."""
    outputs, inputs = codes.shape
    spans = cdiv(inputs, SPAN)
    wide = F.pad(codes, (0, spans * SPAN - inputs)).view(outputs, spans, 2, SPAN // 2)
    packed = wide[:, :, 0] | (wide[:, :, 1] << 4)
    return PackedInt4(packed.reshape(outputs, -1), scales, zeros, inputs)


def dequantize_int4_reference(weight: PackedInt4, dtype: torch.dtype = torch.float32) -> Tensor:
    """[outputs, inputs], rounded once."""
    spans = weight.packed.view(weight.outputs, -1, SPAN // 2)
    codes = torch.stack((spans & 15, spans >> 4), dim=2).view(weight.outputs, -1)[:, : weight.inputs]
    group = torch.arange(weight.inputs, device=codes.device) // weight.group_size
    wide = codes.float()
    if weight.zeros is None:
        wide -= HALF_RANGE
    else:
        wide -= weight.zeros.float().index_select(0, group).t()
    return wide.mul_(weight.scales.float().index_select(0, group).t()).to(dtype)


def int4_matmul_reference(x: Tensor, weight: PackedInt4, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of the dequantised weight, rounded once."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), dequantize_int4_reference(weight), wide).to(x.dtype)


@jit()
def _difference(code: tl.tensor, zero: tl.tensor, like: tl.tensor) -> tl.tensor:
    """code − zero, both from 0 to 15, in the type of `like`.

    Half-precision numbers are made from their bits, which takes one instruction a number: 128 + n in
    bfloat16, 1024 + n in float16. The constant cancels out, and every step is exact.
    """
    if like.dtype.element_ty == tl.bfloat16:
        left = (code.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        found = left - (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif like.dtype.element_ty == tl.float16:
        left = (code.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        found = left - (zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        found = code.to(like.dtype.element_ty) - zero.to(like.dtype.element_ty)
    return found


@jit(unspecialized=("rows",))
def _int4_matmul(
    x: tl.tensor,  # [rows, K]
    packed: tl.tensor,  # uint8 [N, ⌈K / 128⌉ · 64]
    scales: tl.tensor,  # [groups, N]
    zeros: tl.tensor,  # uint8 [groups, N]
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N]
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    SWAP: tl.constexpr,  # weights come first, which leaves fewer rows of a tile empty
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,  # row tiles computed before the next tile of outputs
) -> None:
    """Compute one tile. A group of at least 128 inputs is scaled after its product, smaller ones before."""
    spans: tl.constexpr = (K + 127) // 128
    down = tl.cdiv(rows, BLOCK_M)
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = (program // (AHEAD * across)) * AHEAD
    height = tl.minimum(down - first, AHEAD)
    own = program % (AHEAD * across)
    row = (first + own % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (own // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_row = tl.minimum(row, rows - 1).to(tl.int64)  # rows outside are computed and not stored
    from_col = tl.minimum(col, N - 1)
    half = tl.arange(0, 64)
    x_at = x + from_row[:, None] * STRIDE + half[None, :]
    w_at = packed + from_col[:, None].to(tl.int64) * (spans * 64) + half[None, :]
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if GROUP >= 128:
        factor = tl.load(scales + from_col).to(tl.float32)
        zero = tl.load(zeros + from_col) if ZEROS else tl.full((BLOCK_N,), 8, tl.uint8)
    for span in range(spans):
        octet = tl.load(w_at + span * 64)
        if K % 128 == 0:
            a_low = tl.load(x_at + span * 128)
            a_high = tl.load(x_at + span * 128 + 64)
        else:  # codes of the padding are multiplied by 0
            left = K - span * 128
            a_low = tl.load(x_at + span * 128, mask=half[None, :] < left, other=0.0)
            a_high = tl.load(x_at + span * 128 + 64, mask=half[None, :] + 64 < left, other=0.0)
        if GROUP >= 128:
            # Load the next scales before a product needs them.
            next_at = ((tl.minimum(span + 1, spans - 1) * 128) // GROUP) * N + from_col
            next_factor = tl.load(scales + next_at).to(tl.float32)
            next_zero = tl.load(zeros + next_at) if ZEROS else zero
            low = _difference(octet & 15, zero[:, None], x)
            high = _difference(octet >> 4, zero[:, None], x)
            if SWAP:
                product = tl.dot(low, tl.trans(a_low))
                product = tl.dot(high, tl.trans(a_high), product)
                total += product * factor[:, None]
            else:
                product = tl.dot(a_low, tl.trans(low))
                product = tl.dot(a_high, tl.trans(high), product)
                total += product * factor[None, :]
            factor, zero = next_factor, next_zero
        else:
            groups: tl.constexpr = (K + GROUP - 1) // GROUP
            near = tl.minimum(span * (128 // GROUP) + half // GROUP, groups - 1)
            far = tl.minimum(span * (128 // GROUP) + (half + 64) // GROUP, groups - 1)
            low_at = near[None, :] * N + from_col[:, None]
            high_at = far[None, :] * N + from_col[:, None]
            low_zero = tl.load(zeros + low_at) if ZEROS else tl.full((BLOCK_N, 64), 8, tl.uint8)
            high_zero = tl.load(zeros + high_at) if ZEROS else tl.full((BLOCK_N, 64), 8, tl.uint8)
            low = _difference(octet & 15, low_zero, x)
            high = _difference(octet >> 4, high_zero, x)
            low = (low.to(tl.float32) * tl.load(scales + low_at).to(tl.float32)).to(x.dtype.element_ty)
            high = (high.to(tl.float32) * tl.load(scales + high_at).to(tl.float32)).to(x.dtype.element_ty)
            if SWAP:
                total = tl.dot(low, tl.trans(a_low), total)
                total = tl.dot(high, tl.trans(a_high), total)
            else:
                total = tl.dot(a_low, tl.trans(low), total)
                total = tl.dot(a_high, tl.trans(high), total)
    if SWAP:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + from_col).to(tl.float32)[None, :]
    at = out + row[:, None].to(tl.int64) * N + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (col[None, :] < N))


@jit()
def _dequantize_int4(
    packed: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,  # [N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Dequantise one span of inputs of a few outputs."""
    spans: tl.constexpr = (K + 127) // 128
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    span = tl.program_id(0) % spans
    col = (tl.program_id(0) // spans) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_col = tl.minimum(col, N - 1)
    half = tl.arange(0, 64)
    octet = tl.load(packed + from_col[:, None].to(tl.int64) * (spans * 64) + span * 64 + half[None, :])
    for part in tl.static_range(2):
        inputs = span * 128 + part * 64 + half
        at = tl.minimum(inputs // GROUP, groups - 1)[None, :] * N + from_col[:, None]
        code = ((octet >> (4 * part)) & 15).to(tl.float32)
        code -= tl.load(zeros + at).to(tl.float32) if ZEROS else 8.0
        value = code * tl.load(scales + at).to(tl.float32)
        to = out + col[:, None].to(tl.int64) * K + inputs[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=(col[:, None] < N) & (inputs[None, :] < K))


class Int4Tile(NamedTuple):
    rows: int
    cols: int
    warps: int
    stages: int
    swap: bool = False


# (maximum number of rows, tile). Few rows need narrow tiles, so that enough programs read the weight.
INT4_TILES: tuple[tuple[int, Int4Tile], ...] = (
    (16, Int4Tile(16, 32, 4, 6, swap=True)),
    (32, Int4Tile(32, 64, 4, 5, swap=True)),
    (64, Int4Tile(64, 64, 4, 4)),
    (1 << 62, Int4Tile(64, 128, 4, 4)),
)
_DEQUANTIZED_OUTPUTS = 32  # per program


def int4_matmul(
    x: Tensor, weight: PackedInt4, bias: Tensor | None = None, tile: Int4Tile | None = None
) -> Tensor:
    """Compute `int4_matmul_reference`: x [rows, inputs] → [rows, outputs]. Rows may be strided."""
    if not use_kernel(x):
        return int4_matmul_reference(x, weight, bias)
    rows = len(x)
    if tile is None:
        tile = next(entry[1] for entry in INT4_TILES if rows <= entry[0])
    assert x.stride(1) == 1 and weight.packed.is_contiguous() and weight.scales.is_contiguous()
    out = torch.empty((rows, weight.outputs), dtype=x.dtype, device=x.device)
    if rows:
        _int4_matmul[(cdiv(rows, tile.rows) * cdiv(weight.outputs, tile.cols),)](
            x,
            weight.packed,
            weight.scales,
            weight.packed if weight.zeros is None else weight.zeros,
            weight.scales if bias is None else bias,
            out,
            rows,
            STRIDE=x.stride(0),
            N=weight.outputs,
            K=weight.inputs,
            GROUP=weight.group_size,
            ZEROS=weight.zeros is not None,
            BIAS=bias is not None,
            SWAP=tile.swap,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.cols,
            AHEAD=8,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def dequantize_int4(weight: PackedInt4, out: Tensor) -> Tensor:
    """Write `dequantize_int4_reference` to `out` [outputs, inputs], contiguous."""
    if not use_kernel(out):
        return out.copy_(dequantize_int4_reference(weight, out.dtype))
    assert out.is_contiguous() and out.shape == (weight.outputs, weight.inputs)
    _dequantize_int4[(cdiv(weight.outputs, _DEQUANTIZED_OUTPUTS) * cdiv(weight.inputs, SPAN),)](
        weight.packed,
        weight.scales,
        weight.packed if weight.zeros is None else weight.zeros,
        out,
        N=weight.outputs,
        K=weight.inputs,
        GROUP=weight.group_size,
        ZEROS=weight.zeros is not None,
        BLOCK_N=_DEQUANTIZED_OUTPUTS,
        num_warps=4,
    )
    return out
