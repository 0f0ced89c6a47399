"""Block-scaled fp8: one scale per 128 × 128 block of a weight and per 128 values of a row, and the product.

Checkpoints with `weight_block_size` use this format. Rows are quantised in a separate pass. With few rows,
the product quantises them as it reads them, because reading the weight takes most of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import (
    cdiv,
    jit,
    next_power_of_2,
    num_warps_for,
    tl,
    use_kernel,
    wait_for_inputs,
)
from penstock.kernels.limits import limits_of, num_stages
from penstock.kernels.quantize import FP8, FP8_MAX

GROUP = 128  # values along each axis that share a scale
_MIN_MAGNITUDE = 1e-12  # prevents a scale of 0 for a group of zeros


class GroupQuantized(NamedTuple):
    """Rows equal to values · scales, with one scale per `GROUP` values."""

    values: Tensor  # fp8 [rows, width]
    scales: Tensor  # fp32 [rows, ⌈width / GROUP⌉]


class BlockQuantized(NamedTuple):
    """A weight, or the weights of all experts, equal to values · scales, with one scale per block.

    Each output has its own scales if the weight joins parts whose outputs are not multiples of `GROUP`.
    """

    values: Tensor  # fp8 [..., outputs, inputs]
    scales: Tensor  # fp32 [..., ⌈outputs / GROUP⌉ or outputs, ⌈inputs / GROUP⌉]


def quantize_groups_reference(x: Tensor) -> GroupQuantized:
    rows, width = x.shape
    groups = cdiv(width, GROUP)
    wide = F.pad(x.float(), (0, groups * GROUP - width)).view(rows, groups, GROUP)
    largest = wide.abs().amax(dim=2, keepdim=True).clamp_min(_MIN_MAGNITUDE)
    values = (wide * (FP8_MAX / largest)).to(FP8).view(rows, -1)[:, :width]
    return GroupQuantized(values.contiguous(), (largest / FP8_MAX)[:, :, 0])


def dequantize_groups(x: GroupQuantized) -> Tensor:
    """Dequantised rows, fp32 [rows, width]."""
    scales = x.scales.repeat_interleave(GROUP, dim=1)[:, : x.values.shape[1]]
    return x.values.float() * scales


def quantize_blocks(weight: Tensor) -> BlockQuantized:
    """Scale each block of a weight [outputs, inputs] so that its largest value becomes `FP8_MAX`."""
    outputs, inputs = weight.shape
    down, across = cdiv(outputs, GROUP), cdiv(inputs, GROUP)
    wide = F.pad(weight.float(), (0, across * GROUP - inputs, 0, down * GROUP - outputs))
    wide = wide.view(down, GROUP, across, GROUP)
    largest = wide.abs().amax(dim=(1, 3), keepdim=True).clamp_min(_MIN_MAGNITUDE)
    values = (wide * (FP8_MAX / largest)).to(FP8).view(down * GROUP, -1)[:outputs, :inputs]
    return BlockQuantized(values.contiguous(), (largest / FP8_MAX).view(down, across))


def dequantize_blocks(weight: BlockQuantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of one weight, [outputs, inputs]."""
    outputs, inputs = weight.values.shape
    scales = weight.scales
    if len(scales) != outputs:
        scales = scales.repeat_interleave(GROUP, dim=0)[:outputs]
    scales = scales.repeat_interleave(GROUP, dim=1)[:, :inputs]
    return (weight.values.float() * scales).to(dtype)


def block_matmul_reference(x: Tensor, weight: BlockQuantized, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b of the quantised rows and the weight, rounded once."""
    wide = None if bias is None else bias.float()
    return F.linear(dequantize_groups(quantize_groups_reference(x)), dequantize_blocks(weight), wide).to(
        x.dtype
    )


@jit()
def quantize_group(value: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Quantise one group of each row to the dtype of `like`, and return values and scales.

    `value` is fp32 [rows, GROUP], and 0 past the end of a row.
    """
    largest = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12)
    scaled = value * (448.0 / largest)[:, None]
    return scaled.to(like.dtype.element_ty), largest / 448.0


@jit(overlaps=True)
def _quantize_groups(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # groups per program
) -> None:
    wait_for_inputs()
    parts: tl.constexpr = (GROUPS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    group = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    cols = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + row * STRIDE + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    small, scale = quantize_group(value, values)
    tl.store(values + row * WIDTH + cols, small, mask=cols < WIDTH)
    tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)


def empty_groups(rows: int, width: int, device: torch.device) -> GroupQuantized:
    return GroupQuantized(
        torch.empty((rows, width), dtype=FP8, device=device),
        torch.empty((rows, cdiv(width, GROUP)), dtype=torch.float32, device=device),
    )


def quantize_groups(x: Tensor) -> GroupQuantized:
    """Compute `quantize_groups_reference`, with the kernel if the device supports it; rows may be strided."""
    if not use_kernel(x):
        return quantize_groups_reference(x)
    rows, width = x.shape
    assert x.stride(1) == 1
    out = empty_groups(rows, width, x.device)
    groups = cdiv(width, GROUP)
    block = min(next_power_of_2(groups), 16)
    if rows:
        _quantize_groups[(rows * cdiv(groups, block),)](
            x,
            *out,
            STRIDE=x.stride(0),
            WIDTH=width,
            GROUPS=groups,
            BLOCK=block,
            num_warps=min(num_warps_for(block * GROUP), 8),
        )
    return out


@jit(unspecialized=("rows",), overlaps=True)
def _block_matmul(
    x: tl.tensor,  # [rows, K], fp8; not yet quantised if PLAIN
    x_scales: tl.tensor,  # fp32 [rows, ⌈K / 128⌉]
    weight: tl.tensor,  # fp8 [N, K]
    scales: tl.tensor,  # fp32 [⌈N / SHARE⌉, ⌈K / 128⌉]
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N]
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,  # outputs that share a scale: 128 or 1
    PLAIN: tl.constexpr,
    BIAS: tl.constexpr,
    # Make weights the first operand. Tensor cores need at least 64 rows of the first, 16 of the second.
    SWAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,  # row tiles computed before the next tile of outputs
) -> None:
    """Compute one tile. Programs that run at the same time read the same few weights and rows."""
    wait_for_inputs()
    groups: tl.constexpr = (K + 127) // 128
    down = tl.cdiv(rows, BLOCK_M)
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = (program // (AHEAD * across)) * AHEAD
    height = tl.minimum(down - first, AHEAD)
    own = program % (AHEAD * across)
    row = (first + own % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (own // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_row = tl.minimum(row, rows - 1).to(tl.int64)  # rows past the end are computed but not stored
    from_col = tl.minimum(col, N - 1)
    depth = tl.arange(0, 128)
    x_at = x + from_row[:, None] * STRIDE + depth[None, :]
    w_at = weight + from_col[:, None].to(tl.int64) * K + depth[None, :]
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if not PLAIN:
        by_row = tl.load(x_scales + from_row * groups)
    if SHARE == 128:  # a tile is within one block of the weight, so it has one scale
        s_at = scales + ((own // height) * BLOCK_N // 128) * groups
    else:
        s_at = scales + from_col * groups
    by_col = tl.load(s_at)
    for group in range(groups):
        ahead = tl.minimum(group + 1, groups - 1)  # load scales before the product needs them
        next_by_col = tl.load(s_at + ahead)
        if not PLAIN:
            next_by_row = tl.load(x_scales + from_row * groups + ahead)
        if K % 128 == 0:
            a = tl.load(x_at + group * 128)
            b = tl.load(w_at + group * 128)
        else:
            left = depth[None, :] < K - group * 128
            a = tl.load(x_at + group * 128, mask=left, other=0.0)
            b = tl.load(w_at + group * 128, mask=left, other=0.0)
        if PLAIN:
            small, factor = quantize_group(a.to(tl.float32), weight)
        else:
            small, factor = a, by_row
            by_row = next_by_row
        product = tl.dot(b, tl.trans(small)) if SWAP else tl.dot(small, tl.trans(b))
        if SHARE == 128:
            factor *= by_col
        else:
            product *= by_col[:, None] if SWAP else by_col[None, :]
        total += product * (factor[None, :] if SWAP else factor[:, None])
        by_col = next_by_col
    if SWAP:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + from_col).to(tl.float32)[None, :]
    at = out + row[:, None].to(tl.int64) * N + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (col[None, :] < N))


class DenseTile(NamedTuple):
    rows: int
    cols: int
    warps: int
    stages: int
    swap: bool = False


# (maximum number of rows, tile, whether the product quantises as it reads). Few rows need narrow tiles, so
# that enough programs read the weight.
DENSE_TILES: tuple[tuple[int, DenseTile, bool], ...] = (
    (16, DenseTile(16, 64, 4, 5, swap=True), True),
    (32, DenseTile(32, 64, 4, 5, swap=True), True),
    (256, DenseTile(64, 64, 4, 4), False),
    (1024, DenseTile(64, 128, 4, 4), False),
    (1 << 62, DenseTile(128, 128, 8, 3), False),
)


def block_matmul(x: Tensor, weight: BlockQuantized, bias: Tensor | None = None) -> Tensor:
    """Compute `block_matmul_reference`: x [rows, inputs] → [rows, outputs]. Rows may be strided."""
    if not use_kernel(x):
        return block_matmul_reference(x, weight, bias)
    _, tile, plain = next(entry for entry in DENSE_TILES if len(x) <= entry[0])
    return dense_block_matmul(x if plain else quantize_groups(x), weight, bias, tile, x.dtype)


def dense_block_matmul(
    x: Tensor | GroupQuantized,
    weight: BlockQuantized,
    bias: Tensor | None,
    tile: DenseTile,
    dtype: torch.dtype,
) -> Tensor:
    values, scales = x if isinstance(x, GroupQuantized) else (x, weight.scales)
    rows, inputs = values.shape
    outputs = len(weight.values)
    assert (
        GROUP % tile.cols == 0
        and values.stride(1) == 1
        and weight.values.is_contiguous()
        and weight.scales.is_contiguous()
    )
    out = torch.empty((rows, outputs), dtype=dtype, device=values.device)
    tile_bytes = GROUP * (tile.rows * values.itemsize + tile.cols)
    quantized_bytes = 0 if isinstance(x, GroupQuantized) else GROUP * tile.rows
    stages = num_stages(tile.stages, tile_bytes, limits_of(values.device), quantized_bytes)
    if rows:
        _block_matmul[(cdiv(rows, tile.rows) * cdiv(outputs, tile.cols),)](
            values,
            scales,
            weight.values,
            weight.scales,
            weight.scales if bias is None else bias,
            out,
            rows,
            STRIDE=values.stride(0),
            N=outputs,
            K=inputs,
            SHARE=1 if len(weight.scales) == outputs and outputs > 1 else GROUP,
            PLAIN=not isinstance(x, GroupQuantized),
            BIAS=bias is not None,
            SWAP=tile.swap,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.cols,
            AHEAD=8,
            num_warps=tile.warps,
            num_stages=stages,
        )
    return out
