"""fp8 with a scale for each 128 × 128 block of a weight and each 128 values of a row, and its product.

This is the form of checkpoints with `weight_block_size`. A row's groups are quantised by a pass of their own,
or, where rows are few, by the product as it reads them: there the weights are what takes the time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import cdiv, jit, next_power_of_2, num_warps_for, tl, use_kernel
from penstock.kernels.quantize import FP8, FP8_MAX

GROUP = 128  # values that share a scale, along each axis
_LEAST = 1e-12  # a group of zeros has a scale too


class GroupQuantized(NamedTuple):
    """Rows that stand for values · scales, each scale for `GROUP` values."""

    values: Tensor  # fp8 [rows, width]
    scales: Tensor  # fp32 [rows, ⌈width / GROUP⌉]


class BlockQuantized(NamedTuple):
    """A weight, or one of each expert, that stands for values · scales, each scale for a block.

    Where parts whose outputs are no multiples of `GROUP` were joined, each output has scales of its own.
    """

    values: Tensor  # fp8 [..., outputs, inputs]
    scales: Tensor  # fp32 [..., ⌈outputs / GROUP⌉ or outputs, ⌈inputs / GROUP⌉]


def quantize_groups_reference(x: Tensor) -> GroupQuantized:
    rows, width = x.shape
    groups = cdiv(width, GROUP)
    wide = F.pad(x.float(), (0, groups * GROUP - width)).view(rows, groups, GROUP)
    largest = wide.abs().amax(dim=2, keepdim=True).clamp_min(_LEAST)
    values = (wide * (FP8_MAX / largest)).to(FP8).view(rows, -1)[:, :width]
    return GroupQuantized(values.contiguous(), (largest / FP8_MAX)[:, :, 0])


def dequantize_groups(x: GroupQuantized) -> Tensor:
    """fp32 [rows, width]."""
    scales = x.scales.repeat_interleave(GROUP, dim=1)[:, : x.values.shape[1]]
    return x.values.float() * scales


def quantize_blocks(weight: Tensor) -> BlockQuantized:
    """[outputs, inputs], each block scaled so that its largest value is fp8's."""
    outputs, inputs = weight.shape
    down, across = cdiv(outputs, GROUP), cdiv(inputs, GROUP)
    wide = F.pad(weight.float(), (0, across * GROUP - inputs, 0, down * GROUP - outputs))
    wide = wide.view(down, GROUP, across, GROUP)
    largest = wide.abs().amax(dim=(1, 3), keepdim=True).clamp_min(_LEAST)
    values = (wide * (FP8_MAX / largest)).to(FP8).view(down * GROUP, -1)[:outputs, :inputs]
    return BlockQuantized(values.contiguous(), (largest / FP8_MAX).view(down, across))


def dequantize_blocks(weight: BlockQuantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """What one weight stands for, [outputs, inputs]."""
    outputs, inputs = weight.values.shape
    scales = weight.scales
    if len(scales) != outputs:
        scales = scales.repeat_interleave(GROUP, dim=0)[:outputs]
    scales = scales.repeat_interleave(GROUP, dim=1)[:, :inputs]
    return (weight.values.float() * scales).to(dtype)


def block_matmul_reference(x: Tensor, weight: BlockQuantized, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b on what the quantised rows and the weight stand for, rounded once."""
    wide = None if bias is None else bias.float()
    return F.linear(dequantize_groups(quantize_groups_reference(x)), dequantize_blocks(weight), wide).to(
        x.dtype
    )


@jit()
def quantize_group(value: tl.tensor, like: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """One group of each row, fp32 [rows, GROUP] and zero outside → in the type of `like`, and its scales."""
    largest = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12)
    scaled = value * (448.0 / largest)[:, None]
    return scaled.to(like.dtype.element_ty), largest / 448.0


@jit()
def _quantize_groups(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # groups that a program holds
) -> None:
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
    """As the reference; rows may lie apart. In a kernel where there is one for the device."""
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


@jit(unspecialized=("rows",))
def _block_product(
    x: tl.tensor,  # [rows, K], in fp8 or, with PLAIN, as it came
    x_scales: tl.tensor,  # fp32 [rows, ⌈K / 128⌉]
    weight: tl.tensor,  # fp8 [N, K]
    scales: tl.tensor,  # fp32 [⌈N / SHARE⌉, ⌈K / 128⌉]
    bias: tl.tensor,
    out: tl.tensor,  # [rows, N]
    rows: tl.tensor,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,  # outputs that share a scale: 128, or 1
    PLAIN: tl.constexpr,
    BIAS: tl.constexpr,
    SWAP: tl.constexpr,  # weights stand first in the product: the tensor cores take 64 of them, but 16 rows
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,  # tiles of rows that are taken before the next tile of outputs
) -> None:
    """One tile. Programs that run together share few weights and few rows, so that both stay in the cache."""
    groups: tl.constexpr = (K + 127) // 128
    down = tl.cdiv(rows, BLOCK_M)
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    first = (program // (AHEAD * across)) * AHEAD
    height = tl.minimum(down - first, AHEAD)
    own = program % (AHEAD * across)
    row = (first + own % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (own // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_row = tl.minimum(row, rows - 1).to(tl.int64)  # what lies outside is computed and not stored
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
    if SHARE == 128:  # a tile lies within one block of the weight, so its scale is one number
        s_at = scales + ((own // height) * BLOCK_N // 128) * groups
    else:
        s_at = scales + from_col * groups
    by_col = tl.load(s_at)
    for group in range(groups):
        ahead = tl.minimum(group + 1, groups - 1)  # scales are asked for before the product needs them
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


# Up to so many rows → the tile, and whether the product quantises as it reads. Few rows: narrow tiles, or
# there are too few programs to read the weight at full speed.
DENSE_TILES: tuple[tuple[int, DenseTile, bool], ...] = (
    (16, DenseTile(16, 64, 4, 5, swap=True), True),
    (32, DenseTile(32, 64, 4, 5, swap=True), True),
    (256, DenseTile(64, 64, 4, 4), False),
    (1024, DenseTile(64, 128, 4, 4), False),
    (1 << 62, DenseTile(128, 128, 8, 3), False),
)


def block_matmul(x: Tensor, weight: BlockQuantized, bias: Tensor | None = None) -> Tensor:
    """As the reference: x [rows, inputs] → [rows, outputs]. Rows may lie apart."""
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
    if rows:
        _block_product[(cdiv(rows, tile.rows) * cdiv(outputs, tile.cols),)](
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
            num_stages=tile.stages,
        )
    return out
