"""Matrix products with 4-bit weights: half a byte is read per weight, and the rows keep their precision.

For few rows, reading the weight takes most of the time, so the product dequantises as it reads. For many rows
the matrix library is faster, and `dequantize_int4` writes the dequantised weight for each product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import IS_INTERPRETED, cdiv, jit, tl, use_kernel

SPAN = 128  # inputs packed together: word i has inputs i, 32 + i, 64 + i and 96 + i
WORDS = SPAN // 4  # 16-bit words per span
HALF_RANGE = 8  # the zero point if a weight has none of its own


class PackedInt4(NamedTuple):
    """A weight equal to (codes − zeros) · scales, with a scale and a zero for each group of inputs."""

    packed: Tensor  # int16 [⌈inputs / SPAN⌉, outputs, WORDS]: the words of neighbouring outputs are adjacent
    scales: Tensor  # [groups, outputs]
    zeros: Tensor  # uint8 [groups, outputs], or [1, outputs] if the groups share them
    inputs: int

    @property
    def outputs(self) -> int:
        return self.packed.shape[1]

    @property
    def group_size(self) -> int:
        """Number of inputs per group. A single group includes the padding."""
        padded = SPAN * len(self.packed)
        return padded if len(self.scales) == 1 else self.inputs // len(self.scales)


def can_pack(inputs: int, groups: int) -> bool:
    """Whether the kernels can read groups of this size."""
    if groups == 1:
        return True
    size = inputs // groups
    return inputs % groups == 0 and (size % SPAN == 0 or SPAN % size == 0) and size >= 16


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> PackedInt4:
    """Pack uint8 codes from 0 to 15, [outputs, inputs]. Without `zeros`, the zero point is `HALF_RANGE`."""
    outputs, inputs = codes.shape
    spans = cdiv(inputs, SPAN)
    wide = F.pad(codes, (0, spans * SPAN - inputs)).view(outputs, spans, 2, 2, WORDS)
    octets = wide[:, :, :, 0] | (wide[:, :, :, 1] << 4)
    words = octets[:, :, 0].to(torch.int16) | (octets[:, :, 1].to(torch.int16) << 8)
    if zeros is None:
        zeros = torch.full((1, outputs), HALF_RANGE, dtype=torch.uint8, device=codes.device)
    return PackedInt4(words.transpose(0, 1).contiguous(), scales, zeros, inputs)


def dequantize_int4_reference(weight: PackedInt4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dequantised weight, [outputs, inputs], rounded once."""
    slices = torch.stack([(weight.packed >> shift) & 15 for shift in (0, 4, 8, 12)], dim=2)
    codes = slices.transpose(0, 1).reshape(weight.outputs, -1)[:, : weight.inputs]
    group = torch.arange(weight.inputs, device=codes.device) // weight.group_size
    zeros = weight.zeros.expand_as(weight.scales)
    wide = codes.float().sub_(zeros.float().index_select(0, group).t())
    return wide.mul_(weight.scales.float().index_select(0, group).t()).to(dtype)


def int4_matmul_reference(x: Tensor, weight: PackedInt4, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of the dequantised weight, rounded once."""
    wide = None if bias is None else bias.float()
    return F.linear(x.float(), dequantize_int4_reference(weight), wide).to(x.dtype)


@jit()
def _difference(
    word: tl.tensor, zero: tl.tensor, like: tl.tensor, SLICE: tl.constexpr, ASM: tl.constexpr
) -> tl.tensor:
    """code − zero, both from 0 to 15, in the type of `like`. The codes are those of one slice of the words.

    Half-precision numbers are assembled from bits: 128 + n in bfloat16, 1024 + n in float16. The constant
    cancels out, and every operation is exact. With `ASM`, two numbers take two instructions; compiled code
    takes about ten.
    """
    kind: tl.constexpr = like.dtype.element_ty
    bits: tl.constexpr = 0x4300 if kind == tl.bfloat16 else 0x6400
    if kind == tl.float32:
        code = ((word >> (4 * SLICE)) & 15).to(tl.float32)
        found = code - zero.to(tl.float32)
    elif ASM:
        pair: tl.constexpr = "0x43004300" if kind == tl.bfloat16 else "0x64006400"
        # 0xEA: (shifted & mask) | pair. The mask removes what one word shifts into the other.
        code = tl.inline_asm_elementwise(
            f"{{ .reg .b32 s; shr.u32 s, $1, {4 * SLICE}; lop3.b32 $0, s, 0x000F000F, {pair}, 0xEA; }}",
            "=r,r",
            [word],
            dtype=like.dtype.element_ty,
            is_pure=True,
            pack=2,
        )
        found = code - (zero.to(tl.int16) | bits).to(kind, bitcast=True)
    else:
        code = (((word >> (4 * SLICE)) & 15) | bits).to(kind, bitcast=True)
        found = code - (zero.to(tl.int16) | bits).to(kind, bitcast=True)
    return found


@jit()
def _dot(w: tl.tensor, a: tl.tensor, total: tl.tensor, SWAP: tl.constexpr) -> tl.tensor:
    return tl.dot(w, tl.trans(a), total) if SWAP else tl.dot(a, tl.trans(w), total)


@jit(unspecialized=("rows",))
def _int4_matmul(
    x: tl.tensor,  # [rows, K]
    packed: tl.tensor,  # int16 [⌈K / 128⌉, N, 32]
    scales: tl.tensor,  # [groups, N]
    zeros: tl.tensor,  # uint8 [groups, N] or [1, N]
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N], or fp32 [PARTS, rows, N]
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale
    ZEROS: tl.constexpr,  # each group has its own zeros
    BIAS: tl.constexpr,
    SWAP: tl.constexpr,  # weights are the first operand, which leaves fewer rows of a tile empty
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the inputs of a tile
    AHEAD: tl.constexpr,  # row tiles computed before the next tile of outputs
    ASM: tl.constexpr,
) -> None:
    """Compute one tile over a part of the inputs.

    The product of each group, or of each span if that is smaller, is multiplied by its scale. For groups of
    fewer than 32 inputs, the weights are scaled instead.
    """
    spans: tl.constexpr = (K + 127) // 128
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    share: tl.constexpr = (spans + PARTS - 1) // PARTS
    down = tl.cdiv(rows, BLOCK_M)
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    first = (program // (AHEAD * across)) * AHEAD
    height = tl.minimum(down - first, AHEAD)
    own = program % (AHEAD * across)
    row = (first + own % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (own // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_col = tl.minimum(col, N - 1)  # columns past the end are computed but not stored
    lane = tl.arange(0, 32)
    here = row[:, None] < rows
    x_at = x + row[:, None].to(tl.int64) * STRIDE + lane[None, :]
    w_at = packed + from_col[:, None] * 32 + lane[None, :]
    begin = part * share
    if SWAP:
        nothing = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = nothing
    zero = tl.load(zeros + from_col)
    if GROUP >= 128:
        at = ((begin * 128) // GROUP) * N + from_col
        factor = tl.load(scales + at).to(tl.float32)
        if ZEROS:
            zero = tl.load(zeros + at)
    for step in range(share):
        span = begin + step  # spans past the end, and codes of the padding, are multiplied by 0
        word = tl.load(w_at + tl.minimum(span, spans - 1) * (N * 32))
        if GROUP >= 128:  # load the next scales before a product needs them
            next_at = ((tl.minimum(span + 1, spans - 1) * 128) // GROUP) * N + from_col
            next_factor = tl.load(scales + next_at).to(tl.float32)
            if ZEROS:
                next_zero = tl.load(zeros + next_at)
        product = nothing
        for piece in tl.static_range(4):
            start = span * 128 + piece * 32
            if PARTS * share * 128 == K:
                a = tl.load(x_at + start, mask=here, other=0.0)
            else:
                a = tl.load(x_at + start, mask=here & (lane[None, :] < K - start), other=0.0)
            if GROUP >= 32:
                if GROUP < 128:
                    at = tl.minimum(start // GROUP, groups - 1) * N + from_col
                    factor = tl.load(scales + at).to(tl.float32)
                    if ZEROS:
                        zero = tl.load(zeros + at)
                product = _dot(_difference(word, zero[:, None], x, piece, ASM), a, product, SWAP)
                if (piece * 32 + 32) % min(GROUP, 128) == 0:
                    total += product * (factor[:, None] if SWAP else factor[None, :])
                    product = nothing
            else:
                group = tl.minimum((start + lane) // GROUP, groups - 1)
                wide_at = group[None, :] * N + from_col[:, None]
                wide_zero = tl.load(zeros + wide_at) if ZEROS else zero[:, None]
                w = _difference(word, wide_zero, x, piece, ASM).to(tl.float32)
                w = (w * tl.load(scales + wide_at).to(tl.float32)).to(x.dtype.element_ty)
                total = _dot(w, a, total, SWAP)
        if GROUP >= 128:
            factor = next_factor
            if ZEROS:
                zero = next_zero
    if SWAP:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + from_col).to(tl.float32)[None, :]
    to = out + (part * rows + row)[:, None].to(tl.int64) * N + col[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=here & (col[None, :] < N))


@jit(unspecialized=("size",))
def _sum_parts(
    parts: tl.tensor,  # fp32 [PARTS, rows, N]
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N]
    size: tl.tensor,  # rows · N
    N: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum the parts of a block of outputs, always in the same order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    total = tl.load(parts + at, mask=here, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * size + at, mask=here, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=here)


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
    """Dequantise one span of inputs for a block of outputs."""
    spans: tl.constexpr = (K + 127) // 128
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    span = tl.program_id(0) % spans
    col = (tl.program_id(0) // spans) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_col = tl.minimum(col, N - 1)
    inputs = tl.arange(0, 128)
    # Each word is read four times, by the threads that write its four inputs.
    word = tl.load(packed + span * (N * 32) + from_col[:, None] * 32 + (inputs % 32)[None, :])
    code = ((word >> (inputs // 32 * 4).to(tl.int16)[None, :]) & 15).to(tl.float32)
    inputs += span * 128
    at = tl.minimum(inputs // GROUP, groups - 1)[None, :] * N + from_col[:, None]
    code -= tl.load(zeros + (at if ZEROS else from_col[:, None])).to(tl.float32)
    value = code * tl.load(scales + at).to(tl.float32)
    to = out + col[:, None].to(tl.int64) * K + inputs[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(col[:, None] < N) & (inputs[None, :] < K))


class Int4Tile(NamedTuple):
    rows: int
    cols: int
    warps: int
    stages: int
    swap: bool = True


# (maximum number of rows, tile). Few rows need narrow tiles, so that enough programs read the weight. With
# fewer than 32 columns per warp, the compiler moves dequantised weights through shared memory.
INT4_TILES: tuple[tuple[int, Int4Tile], ...] = (
    (16, Int4Tile(16, 64, 2, 5)),
    (32, Int4Tile(32, 64, 2, 5)),
    (64, Int4Tile(64, 128, 4, 4)),
)
_DEQUANTIZED_OUTPUTS = 32  # per program
_PROCESSORS = 132  # multiprocessors of an H200; fixed, so that inputs are split alike on every device
_MIN_SPANS = 4  # per program: with fewer, starting a program takes longer than its product
_MAX_PARTS = 16
_SUMMED = 512  # outputs per program of `_sum_parts`


def int4_tile_for(rows: int) -> Int4Tile:
    """The tile for this many rows. Above the table's last entry, several tiles cover the rows."""
    return next((tile for most, tile in INT4_TILES if rows <= most), INT4_TILES[-1][1])


def num_parts_for(tile: Int4Tile, outputs: int, inputs: int) -> int:
    """The number of programs that share the inputs of one tile.

    Only splits whose programs all run at once are considered. The best one leaves the fewest spans to the
    busiest multiprocessor. A multiprocessor with one or two programs waits longer for memory, which counts as
    two or one more spans. The number depends on the tile and not on the rows, so the result of a row does not
    depend on the other rows of its tile.
    """
    tiles, spans = cdiv(outputs, tile.cols), cdiv(inputs, SPAN)
    max_programs = (4 if tile.rows <= 32 else 2) * _PROCESSORS  # larger tiles take more registers
    found = []
    for parts in range(1, _MAX_PARTS + 1):
        share = cdiv(spans, parts)
        if parts > 1 and (share < _MIN_SPANS or parts * tiles > max_programs):
            break
        if cdiv(spans, share) == parts:
            per_processor = cdiv(parts * tiles, _PROCESSORS)
            found.append((per_processor * share + max(0, 3 - per_processor), parts))
    return min(found)[1]


def int4_matmul(
    x: Tensor,
    weight: PackedInt4,
    bias: Tensor | None = None,
    tile: Int4Tile | None = None,
    parts: int | None = None,
) -> Tensor:
    """Compute `int4_matmul_reference`: x [rows, inputs] → [rows, outputs]. Rows may be strided."""
    if not use_kernel(x):
        return int4_matmul_reference(x, weight, bias)
    rows, outputs, spans = len(x), weight.outputs, len(weight.packed)
    tile = int4_tile_for(rows) if tile is None else tile
    if parts is None:
        parts = num_parts_for(tile, outputs, weight.inputs) if rows <= tile.rows else 1
    parts = cdiv(spans, cdiv(spans, parts))  # no part is empty
    assert x.stride(1) == 1 and weight.packed.is_contiguous() and weight.scales.is_contiguous()
    assert weight.packed.numel() < 1 << 31
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    sums = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device) if parts > 1 else out
    any_bias = weight.scales if bias is None else bias
    _int4_matmul[(cdiv(rows, tile.rows) * cdiv(outputs, tile.cols) * parts,)](
        x,
        weight.packed,
        weight.scales,
        weight.zeros,
        any_bias,
        sums,
        rows,
        STRIDE=x.stride(0),
        N=outputs,
        K=weight.inputs,
        GROUP=weight.group_size,
        ZEROS=len(weight.zeros) > 1,
        BIAS=bias is not None and parts == 1,
        SWAP=tile.swap,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.cols,
        PARTS=parts,
        AHEAD=8,
        ASM=not IS_INTERPRETED,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts > 1:
        _sum_parts[(cdiv(rows * outputs, _SUMMED),)](
            sums,
            any_bias,
            out,
            rows * outputs,
            N=outputs,
            BIAS=bias is not None,
            PARTS=parts,
            BLOCK=_SUMMED,
            num_warps=4,
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
        weight.zeros,
        out,
        N=weight.outputs,
        K=weight.inputs,
        GROUP=weight.group_size,
        ZEROS=len(weight.zeros) > 1,
        BLOCK_N=_DEQUANTIZED_OUTPUTS,
        num_warps=4,
    )
    return out
