"""Ragged pooling, truncation to fewer dimensions and normalisation in one pass over the hidden states.

If rows are short or many, one program pools a whole row and normalises it. For a few long rows, programs
share the width of a row, and a second small kernel normalises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import bind, cdiv, jit, next_power_of_2, num_warps_for, tl, wait_for_inputs

METHODS = {"cls": 0, "last": 1, "mean": 2, "mean_sqrt_len": 3, "weighted_mean": 4, "max": 5}
_EPS = 1e-12  # the same as F.normalize
_MAX_WIDTH = 4096  # maximum components of a row per program
_LONG_ROW = 128  # tokens; rows up to this length are read by one program
_MANY_ROWS = 264  # from this number of rows on, one program per row fills any GPU
_SLICE_WIDTH = 64  # components per program if programs share a row


def pool_reference(
    hidden: Tensor,  # [tokens, width]
    cu_lengths: Tensor,  # int32 [rows + 1]
    method: str,
    *,
    skip: Tensor | None = None,  # int32 [rows], number of leading tokens to leave out
    chosen: Tensor | None = None,  # int32 [n], indices of the rows to pool; None: all
    dims: int | None = None,
    normalize: bool = False,
) -> Tensor:
    """Pool each row, fp32 [rows, dims]."""
    out = []
    rows = range(len(cu_lengths) - 1) if chosen is None else chosen.tolist()
    for row in rows:
        begin, end = int(cu_lengths[row]), int(cu_lengths[row + 1])
        left_out = 0 if skip is None else int(skip[row])
        out.append(_pool_row(hidden[begin:end].float(), method, left_out))
    pooled = torch.stack(out)[:, :dims] if out else hidden.new_empty((0, dims or hidden.shape[1])).float()
    return F.normalize(pooled, dim=-1) if normalize else pooled


def _pool_row(tokens: Tensor, method: str, skip: int) -> Tensor:
    """[length, width] → [width]"""
    length = len(tokens)
    kept = tokens[skip:]
    match method:
        case "cls":
            return tokens[min(skip, length - 1)]
        case "last":
            return tokens[-1]
        case "mean":
            return kept.sum(dim=0) / max(len(kept), 1)
        case "mean_sqrt_len":
            return kept.sum(dim=0) / math.sqrt(max(len(kept), 1))
        case "weighted_mean":
            weights = torch.arange(1, length + 1, device=tokens.device)[skip:, None].float()
            return (kept * weights).sum(dim=0) / weights.sum().clamp_min(1e-9)
        case _:
            return kept.amax(dim=0)


@jit(unspecialized=("cu_lengths", "skip", "chosen"), overlaps=True)
def _pool(
    hidden: tl.tensor,
    cu_lengths: tl.tensor,
    skip: tl.tensor,
    chosen: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    METHOD: tl.constexpr,
    SKIP: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> None:
    wait_for_inputs()
    parts: tl.constexpr = (DIMS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    place = program // parts
    row = place
    if CHOSEN:
        row = tl.load(chosen + place)
    cols = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < DIMS
    begin = tl.load(cu_lengths + row)
    end = tl.load(cu_lengths + row + 1)
    first = begin
    if SKIP:
        first += tl.load(skip + row)
    if METHOD < 2:
        last = tl.maximum(end - 1, 0)  # a graph is captured with empty rows at the front
        token = tl.minimum(first, last) if METHOD == 0 else last
        value = tl.load(hidden + token.to(tl.int64) * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    else:
        partial = tl.full([TILE, BLOCK], float("-inf") if METHOD == 5 else 0.0, tl.float32)
        for start in range(first, end, TILE):
            tokens = start + tl.arange(0, TILE)
            at = tokens.to(tl.int64)[:, None] * WIDTH + cols[None, :]
            taken = (tokens < end)[:, None] & inside[None, :]
            if METHOD == 5:
                tile = tl.load(hidden + at, mask=taken, other=float("-inf")).to(tl.float32)
                partial = tl.maximum(partial, tile)
            else:
                tile = tl.load(hidden + at, mask=taken, other=0.0).to(tl.float32)
                if METHOD == 4:
                    tile *= (tokens - begin + 1).to(tl.float32)[:, None]
                partial += tile
        if METHOD == 5:
            value = tl.max(partial, axis=0)
        else:
            value = tl.sum(partial, axis=0)
        count = tl.maximum(end - first, 1).to(tl.float32)
        if METHOD == 2:
            value /= count
        if METHOD == 3:
            value /= tl.sqrt(count)
        if METHOD == 4:  # weights are 1 … length, without those of skipped tokens
            taken_from = (first - begin).to(tl.float32)
            length = (end - begin).to(tl.float32)
            weights = 0.5 * (length * (length + 1.0) - taken_from * (taken_from + 1.0))
            value /= tl.maximum(weights, 1e-9)
    if NORMALIZE:
        value = tl.where(inside, value, 0.0)
        value /= tl.maximum(tl.sqrt(tl.sum(value * value, axis=0)), eps)
    tl.store(out + place.to(tl.int64) * DIMS + cols, value, mask=inside)


def pool(
    hidden: Tensor,
    cu_lengths: Tensor,
    method: str,
    *,
    max_length: int,
    skip: Tensor | None = None,
    chosen: Tensor | None = None,
    dims: int | None = None,
    normalize: bool = False,
) -> Tensor:
    """Compute `pool_reference`; `hidden` is contiguous. `max_length` decides how programs share the work."""
    rows = len(cu_lengths) - 1 if chosen is None else len(chosen)
    width = hidden.shape[1]
    dims = width if dims is None else min(dims, width)
    out = torch.empty((rows, dims), dtype=torch.float32, device=hidden.device)
    if not rows:
        return out
    short = METHODS[method] < 2 or max_length <= _LONG_ROW or rows >= _MANY_ROWS
    whole = short and dims <= _MAX_WIDTH
    block = next_power_of_2(dims) if whole else _SLICE_WIDTH
    tile = max(1, min(8192 // block, 64))
    _pool[(rows * cdiv(dims, block),)](
        hidden,
        cu_lengths,
        cu_lengths if skip is None else skip,
        cu_lengths if chosen is None else chosen,
        out,
        _EPS,
        WIDTH=width,
        DIMS=dims,
        BLOCK=block,
        TILE=tile,
        METHOD=METHODS[method],
        SKIP=skip is not None,
        CHOSEN=chosen is not None,
        NORMALIZE=normalize and whole,
        num_warps=num_warps_for(max(tile * block // 2, block)) if whole else 4,
    )
    return out if whole or not normalize else normalize_rows(out)


def normalize_rows_reference(
    vectors: Tensor, chosen: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalise the chosen rows, or all, to length 1, [n, width] in `dtype`."""
    vectors = vectors if chosen is None else vectors.index_select(0, chosen)
    return F.normalize(vectors.float(), dim=-1).to(dtype)


@jit(unspecialized=("chosen", "stride"), overlaps=True)
def _normalize_rows(
    vectors: tl.tensor,
    out: tl.tensor,
    chosen: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    source = row
    if CHOSEN:
        source = tl.load(chosen + row).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(vectors + source * stride + cols, mask=inside, other=0.0).to(tl.float32)
    value /= tl.maximum(tl.sqrt(tl.sum(value * value, axis=0)), eps)
    tl.store(out + row * WIDTH + cols, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def _bound_normalize_rows(width: int, chosen: bool) -> Callable[..., Any]:
    block = next_power_of_2(width)
    argument_indices = (0, 1, 2 if chosen else 1)
    return bind(
        _normalize_rows,
        argument_indices,
        WIDTH=width,
        BLOCK=block,
        CHOSEN=chosen,
        num_warps=num_warps_for(block),
    )


def normalize_rows(
    vectors: Tensor, chosen: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute `normalize_rows_reference`; `chosen` is int32. Rows may be strided, components may not."""
    rows, width = len(vectors) if chosen is None else len(chosen), vectors.shape[1]
    out = torch.empty((rows, width), dtype=dtype, device=vectors.device)
    if rows:
        indices = () if chosen is None else (chosen,)
        _bound_normalize_rows(width, chosen is not None)(
            rows, vectors, out, *indices, vectors.stride(0), _EPS
        )
    return out


def copy_rows_reference(vectors: Tensor, source: Tensor, store: Tensor, target: Tensor) -> None:
    """store[target[i]] = vectors[source[i]], both [n, width]; all targets differ."""
    store.index_copy_(0, target.long(), vectors.index_select(0, source))


@jit(unspecialized=("source", "target"), overlaps=True)
def _copy_rows(
    vectors: tl.tensor,
    store: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    wait_for_inputs()
    number = tl.program_id(0)
    begin = tl.load(source + number).to(tl.int64) * WIDTH
    end = tl.load(target + number).to(tl.int64) * WIDTH
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    tl.store(store + end + cols, tl.load(vectors + begin + cols, mask=inside), mask=inside)


@lru_cache(maxsize=64)
def _bound_copy_rows(width: int) -> Callable[..., Any]:
    block = next_power_of_2(width)
    return bind(_copy_rows, WIDTH=width, BLOCK=block, num_warps=num_warps_for(block))


def copy_rows(vectors: Tensor, source: Tensor, store: Tensor, target: Tensor) -> None:
    """Compute `copy_rows_reference` for contiguous tensors of one dtype and int32 indices."""
    assert vectors.is_contiguous() and store.is_contiguous() and vectors.dtype == store.dtype
    if len(source):
        _bound_copy_rows(store.shape[1])(len(source), vectors, store, source, target)
