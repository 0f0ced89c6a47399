"""Low-rank adapters, one or none for each line of a batch: y += B (A x), in two launches per layer.

The lines of a step are ordered by adapter slot, and cut into tiles of lines with the same slot. The CPU
computes order and tiles. `shrink` multiplies each tile by its slot's A, for all parts of a fused layer at
once. `expand_` multiplies the result by B, adds it to the layer's output and applies the activation. Programs
of tiles that have no adapter, or whose adapter does not change the layer, return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, activate
from penstock.kernels.language import bind, cdiv, jit, next_power_of_2, tl

MAX_PARTS = 3  # layers fused into one product
SMALL_TILE, LARGE_TILE = 16, 64  # lines per tile
LARGE_TILES_FROM = 1024  # lines of a step from which large tiles are used
_NO_ACT = -1


class LineTiles(NamedTuple):
    """The lines of a batch by adapter slot, on the device."""

    order: Tensor  # int32 [lines], ordered by slot
    tiles: Tensor  # int32 [tiles, 3]: begin and end in `order`, slot (-1: no adapter)
    tile_lines: int  # maximum lines of a tile: SMALL_TILE or LARGE_TILE


class LowRank(NamedTuple):
    """The adapters on one layer, for all slots."""

    down: Tensor  # A, [slots, parts · max rank, inputs]
    up: Tensor  # scale · B, [slots, outputs, max rank]
    ranks: Tensor  # int32 [slots, parts]; 0: the slot's adapter does not change this part
    ends: tuple[int, ...]  # where the outputs of each part end
    gain: Tensor | None = None  # fp32 [slots, outputs]: factor of the layer's own output
    shift: Tensor | None = None  # fp32 [slots, outputs]: added after that multiplication


def tile_lines_for(lines: int) -> int:
    """The tile size of a batch. It depends only on the number of lines, so that graphs can be replayed."""
    return LARGE_TILE if lines >= LARGE_TILES_FROM else SMALL_TILE


def rank_bucket(rank: int) -> int:
    """The rank for which kernels are compiled to run adapters up to `rank`."""
    return max(16, next_power_of_2(rank))


def apply_reference(
    y: Tensor,
    x: Tensor,
    adapters: LowRank,
    groups: Sequence[tuple[int, Tensor]],
    ranks: Sequence[Sequence[int]],
) -> Tensor:
    """Apply adapters in place to y [lines, outputs], the layer's output for x [lines, inputs].

    `groups` has the lines of each slot, and `ranks` the values of `adapters.ranks`.
    """
    max_rank = adapters.up.shape[-1]
    for slot, lines in groups:
        if slot < 0 or not any(ranks[slot]):
            continue
        own = y.index_select(0, lines).float()
        if adapters.gain is not None and adapters.shift is not None:
            own = own.mul_(adapters.gain[slot]).add_(adapters.shift[slot])
        inputs, first = x.index_select(0, lines), 0
        for part, end in enumerate(adapters.ends):
            rank = ranks[slot][part]
            down = adapters.down[slot, part * max_rank : part * max_rank + rank]
            own[:, first:end] += (inputs @ down.t()) @ adapters.up[slot, first:end, :rank].t()
            first = end
        y.index_copy_(0, lines, own.to(y.dtype))
    return y


@jit(unspecialized=("order", "tiles"))
def _shrink(
    x: tl.tensor,  # [lines, K]
    down: tl.tensor,  # [slots, PARTS · MAX_RANK, K]
    ranks: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,  # [lines, PARTS · RANK], in the order of `order`
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # row stride of x
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    across: tl.constexpr = (PARTS * RANK + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = tiles + (program // across) * 3
    begin, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    col = (program % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    # The rank of each column's part.
    rank = tl.load(ranks + tl.maximum(slot, 0) * PARTS + col // RANK, mask=col < PARTS * RANK, other=0)
    if (slot < 0) | (begin >= end) | (tl.max(rank) == 0):
        return
    place = begin + tl.arange(0, TILE)
    here = place < end
    line = tl.load(order + place, mask=here, other=0).to(tl.int64)
    inside = col % RANK < rank
    weight = down + slot.to(tl.int64) * (PARTS * MAX_RANK * K)
    weight += ((col // RANK) * MAX_RANK + col % RANK)[:, None] * K
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        within = k < K
        some = tl.load(
            x + line[:, None] * STRIDE + k[None, :], mask=here[:, None] & within[None, :], other=0.0
        )
        w = tl.load(weight + k[None, :], mask=inside[:, None] & within[None, :], other=0.0)
        total = tl.dot(some, tl.trans(w), total, input_precision=PRECISION)
    at = out + place[:, None].to(tl.int64) * (PARTS * RANK) + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & (col < PARTS * RANK)[None, :])


@jit()
def _change(
    low: tl.tensor,  # pointers to the lines' rows of A x, [TILE, 1]
    here: tl.tensor,
    weight: tl.tensor,  # B of the slot
    col: tl.tensor,
    own: tl.tensor,  # mask of the columns to compute
    rank: tl.tensor,
    RANK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """B (A x) of some lines and columns, fp32. With fp32 inputs, the product is computed in short steps,
    because long ones take too many registers."""
    STEP: tl.constexpr = min(RANK, 16 if PRECISION == "ieee" else 128)
    total = tl.zeros((here.shape[0], col.shape[0]), tl.float32)
    for first in range(0, RANK, STEP):
        r = first + tl.arange(0, STEP)
        some = tl.load(low + r[None, :], mask=here[:, None] & (r < rank)[None, :], other=0.0)
        w = tl.load(
            weight + col[:, None] * MAX_RANK + r[None, :], mask=own[:, None] & (r < rank)[None, :], other=0.0
        )
        total = tl.dot(some, tl.trans(w), total, input_precision=PRECISION)
    return total


@jit(unspecialized=("order", "tiles"))
def _expand(
    shrunk: tl.tensor,  # [lines, PARTS · RANK], in the order of `order`
    up: tl.tensor,  # [slots, N, MAX_RANK]
    ranks: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,  # [lines, N], changed in place
    gain: tl.tensor,  # [slots, N]
    shift: tl.tensor,  # [slots, N]
    N: tl.constexpr,
    STRIDE: tl.constexpr,  # row stride of out
    PARTS: tl.constexpr,
    END0: tl.constexpr,  # where the outputs of the first part end
    END1: tl.constexpr,
    RANK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GAIN: tl.constexpr,
    KIND: tl.constexpr,  # activation code; -1: none
    PRECISION: tl.constexpr,
) -> None:
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = tiles + (program // across) * 3
    begin, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if begin >= end:
        return
    first = (program % across) * BLOCK_N
    own_ranks = ranks + tl.maximum(slot, 0) * PARTS
    rank = 0  # largest rank of the parts with columns in this block, usually one part
    for part in tl.static_range(PARTS):
        start = 0 if part == 0 else (END0 if part == 1 else END1)
        stop = END0 if part == 0 else (END1 if part == 1 else N)
        if (slot >= 0) & (first < stop) & (first + BLOCK_N > start):
            rank = tl.maximum(rank, tl.load(own_ranks + part))
    if KIND < 0:  # noqa: SIM102 - a compile-time constant, then a value on the device
        if rank == 0:
            return
    place = begin + tl.arange(0, TILE)
    here = place < end
    line = tl.load(order + place, mask=here, other=0).to(tl.int64)
    col = first + tl.arange(0, BLOCK_N)
    at = out + line[:, None] * STRIDE + col[None, :]
    stored = here[:, None] & (col < N)[None, :]
    value = tl.load(at, mask=stored, other=0.0).to(tl.float32)
    if rank > 0:
        if GAIN:
            scaled = slot.to(tl.int64) * N + col
            value *= tl.load(gain + scaled, mask=col < N, other=1.0)[None, :]
            value += tl.load(shift + scaled, mask=col < N, other=0.0)[None, :]
        for part in tl.static_range(PARTS):
            start = 0 if part == 0 else (END0 if part == 1 else END1)
            stop = END0 if part == 0 else (END1 if part == 1 else N)
            if (first < stop) & (first + BLOCK_N > start):
                low = shrunk + place[:, None].to(tl.int64) * (PARTS * RANK) + part * RANK
                own = (col >= start) & (col < stop)
                weight = up + slot.to(tl.int64) * (N * MAX_RANK)
                part_rank = tl.load(own_ranks + part)
                value += _change(low, here, weight, col, own, part_rank, RANK, MAX_RANK, PRECISION)
    if KIND >= 0:
        value = activate(value, KIND)
    tl.store(at, value.to(out.dtype.element_ty), mask=stored)


@jit(unspecialized=("order", "tiles"))
def _expand_gated(
    both: tl.tensor,  # [lines, 2 · N]
    shrunk: tl.tensor,  # [lines, PARTS · RANK], in the order of `order`
    up: tl.tensor,  # [slots, 2 · N, MAX_RANK]
    ranks: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,  # [lines, N]
    gain: tl.tensor,  # [slots, 2 · N]
    shift: tl.tensor,
    N: tl.constexpr,
    STRIDE: tl.constexpr,  # row stride of both
    PARTS: tl.constexpr,  # 1: one pair of A and B for both halves
    GATE: tl.constexpr,  # where the gate begins: 0 or N
    RANK: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GAIN: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute act(gate) · up of one tile, after adding the adapters to both halves."""
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = tiles + (program // across) * 3
    begin, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    own_ranks = ranks + tl.maximum(slot, 0) * PARTS
    if begin >= end:
        return
    place = begin + tl.arange(0, TILE)
    here = place < end
    line = tl.load(order + place, mask=here, other=0).to(tl.int64)
    col = (program % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = col < N
    stored = here[:, None] & inside[None, :]
    first = tl.load(both + line[:, None] * STRIDE + col[None, :], mask=stored, other=0.0).to(tl.float32)
    second = tl.load(both + line[:, None] * STRIDE + N + col[None, :], mask=stored, other=0.0).to(tl.float32)
    first_rank, second_rank = tl.load(own_ranks), tl.load(own_ranks + PARTS - 1)
    if (slot >= 0) & (first_rank + second_rank > 0):
        if GAIN:
            scaled = slot.to(tl.int64) * (2 * N) + col
            first *= tl.load(gain + scaled, mask=inside, other=1.0)[None, :]
            first += tl.load(shift + scaled, mask=inside, other=0.0)[None, :]
            second *= tl.load(gain + scaled + N, mask=inside, other=1.0)[None, :]
            second += tl.load(shift + scaled + N, mask=inside, other=0.0)[None, :]
        low = shrunk + place[:, None].to(tl.int64) * (PARTS * RANK)
        weight = up + slot.to(tl.int64) * (2 * N * MAX_RANK)
        first += _change(low, here, weight, col, inside, first_rank, RANK, MAX_RANK, PRECISION)
        low += (PARTS - 1) * RANK
        second += _change(low, here, weight, col + N, inside, second_rank, RANK, MAX_RANK, PRECISION)
    value = activate(first, KIND) * second if GATE == 0 else activate(second, KIND) * first
    tl.store(out + line[:, None] * N + col[None, :], value.to(out.dtype.element_ty), mask=stored)


@jit(unspecialized=("order", "tiles"))
def _replace(
    x: tl.tensor,  # [lines, K]
    weight: tl.tensor,  # [slots, N, K]
    bias: tl.tensor,  # [slots, N]
    flags: tl.tensor,  # int32 [slots]
    order: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,  # [lines, N]
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,  # row stride of out
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    across: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    tile = tiles + (program // across) * 3
    begin, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    flag = tl.load(flags + tl.maximum(slot, 0))
    if (slot < 0) | (begin >= end) | (flag == 0):
        return
    place = begin + tl.arange(0, TILE)
    here = place < end
    line = tl.load(order + place, mask=here, other=0).to(tl.int64)
    col = (program % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = slot.to(tl.int64) * N + col
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        within = k < K
        some = tl.load(
            x + line[:, None] * X_STRIDE + k[None, :], mask=here[:, None] & within[None, :], other=0.0
        )
        w = tl.load(
            weight + wide[:, None] * K + k[None, :], mask=(col < N)[:, None] & within[None, :], other=0.0
        )
        total = tl.dot(some, tl.trans(w), total, input_precision=PRECISION)
    total += tl.load(bias + wide, mask=col < N, other=0.0).to(tl.float32)[None, :]
    at = out + line[:, None] * STRIDE + col[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & (col < N)[None, :])


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


@lru_cache(maxsize=1024)
def _bound_shrink(
    inputs: int, stride: int, parts: int, rank: int, max_rank: int, tile: int, dtype: torch.dtype
) -> tuple[Callable[..., Any], int]:
    """Return the bound kernel and its number of programs per tile."""
    block = min(next_power_of_2(parts * rank), 128 if tile == LARGE_TILE else 64)
    launch = bind(
        _shrink,
        K=inputs,
        STRIDE=stride,
        PARTS=parts,
        RANK=rank,
        MAX_RANK=max_rank,
        TILE=tile,
        BLOCK_N=block,
        BLOCK_K=(128 if tile == LARGE_TILE else 256) // dtype.itemsize,
        PRECISION=_precision(dtype),
        num_warps=4,
    )
    return launch, cdiv(parts * rank, block)


@lru_cache(maxsize=1024)
def _bound_expand(
    ends: tuple[int, ...],
    stride: int,
    rank: int,
    max_rank: int,
    tile: int,
    gain: bool,
    act: str | None,
    dtype: torch.dtype,
) -> tuple[Callable[..., Any], int]:
    outputs, parts = ends[-1], len(ends)
    block = min(max(16, next_power_of_2(outputs)), 128)
    launch = bind(
        _expand,
        (0, 1, 2, 3, 4, 5, 6 if gain else 5, 7 if gain else 5),
        N=outputs,
        STRIDE=stride,
        PARTS=parts,
        END0=ends[0],
        END1=ends[min(1, parts - 1)],
        RANK=rank,
        MAX_RANK=max_rank,
        TILE=tile,
        BLOCK_N=block,
        GAIN=gain,
        KIND=_NO_ACT if act is None else ACTIVATION_CODES[act],
        PRECISION=_precision(dtype),
        num_warps=8 if tile == LARGE_TILE else 4,
    )
    return launch, cdiv(outputs, block)


@lru_cache(maxsize=256)
def _bound_expand_gated(
    ends: tuple[int, ...],
    stride: int,
    rank: int,
    max_rank: int,
    tile: int,
    gain: bool,
    act: str,
    gate_first: bool,
    dtype: torch.dtype,
) -> tuple[Callable[..., Any], int]:
    width = ends[-1] // 2
    block = min(max(16, next_power_of_2(width)), 64)
    launch = bind(
        _expand_gated,
        (0, 1, 2, 3, 4, 5, 6, 7 if gain else 6, 8 if gain else 6),
        N=width,
        STRIDE=stride,
        PARTS=len(ends),
        GATE=0 if gate_first else width,
        RANK=rank,
        MAX_RANK=max_rank,
        TILE=tile,
        BLOCK_N=block,
        GAIN=gain,
        KIND=ACTIVATION_CODES[act],
        PRECISION=_precision(dtype),
        num_warps=4,
    )
    return launch, cdiv(width, block)


@lru_cache(maxsize=256)
def _bound_replace(
    inputs: int, outputs: int, x_stride: int, stride: int, tile: int, dtype: torch.dtype
) -> tuple[Callable[..., Any], int]:
    block = min(max(16, next_power_of_2(outputs)), 64)
    launch = bind(
        _replace,
        N=outputs,
        K=inputs,
        X_STRIDE=x_stride,
        STRIDE=stride,
        TILE=tile,
        BLOCK_N=block,
        BLOCK_K=64,
        PRECISION=_precision(dtype),
        num_warps=4,
    )
    return launch, cdiv(outputs, block)


def shrink(x: Tensor, adapters: LowRank, lines: LineTiles, rank: int) -> Tensor:
    """Compute A x in the order of `lines`, [lines, parts · rank]. No slot's rank exceeds `rank`, a bucket."""
    parts, max_rank = len(adapters.ends), adapters.up.shape[-1]
    rank = min(rank, max_rank)
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = x.new_empty((len(lines.order), parts * rank))
    launch, across = _bound_shrink(x.shape[1], x.stride(0), parts, rank, max_rank, lines.tile_lines, x.dtype)
    launch(len(lines.tiles) * across, x, adapters.down, adapters.ranks, lines.order, lines.tiles, out)
    return out


def expand_(y: Tensor, shrunk: Tensor, adapters: LowRank, lines: LineTiles, act: str | None = None) -> Tensor:
    """Add B times each line of `shrunk` to y [lines, outputs] and apply the activation, in place."""
    parts, gain, shift = len(adapters.ends), adapters.gain, adapters.shift
    launch, across = _bound_expand(
        adapters.ends,
        y.stride(0),
        shrunk.shape[1] // parts,
        adapters.up.shape[-1],
        lines.tile_lines,
        gain is not None,
        act,
        y.dtype,
    )
    scaled = () if gain is None or shift is None else (gain, shift)
    launch(
        len(lines.tiles) * across,
        shrunk,
        adapters.up,
        adapters.ranks,
        lines.order,
        lines.tiles,
        y,
        *scaled,
    )
    return y


def expand_gated(
    both: Tensor, shrunk: Tensor, adapters: LowRank, lines: LineTiles, act: str, *, gate_first: bool
) -> Tensor:
    """Add adapters to both halves, [lines, 2 · width], and return act(gate) · up, [lines, width].

    Lines in no tile stay uninitialised.
    """
    parts, gain, shift = len(adapters.ends), adapters.gain, adapters.shift
    out = both.new_empty((len(both), both.shape[1] // 2))
    launch, across = _bound_expand_gated(
        adapters.ends,
        both.stride(0),
        shrunk.shape[1] // parts,
        adapters.up.shape[-1],
        lines.tile_lines,
        gain is not None,
        act,
        gate_first,
        both.dtype,
    )
    scaled = () if gain is None or shift is None else (gain, shift)
    tensors = (both, shrunk, adapters.up, adapters.ranks, lines.order, lines.tiles, out, *scaled)
    launch(len(lines.tiles) * across, *tensors)
    return out


def replace_(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, flags: Tensor, lines: LineTiles) -> Tensor:
    """Overwrite the lines of y whose slot replaces the layer's weight, marked by `flags` int32 [slots].

    `weight` is [slots, outputs, inputs], `bias` [slots, outputs].
    """
    _, outputs, inputs = weight.shape
    launch, across = _bound_replace(inputs, outputs, x.stride(0), y.stride(0), lines.tile_lines, y.dtype)
    launch(len(lines.tiles) * across, x, weight, bias, flags, lines.order, lines.tiles, y)
    return y
