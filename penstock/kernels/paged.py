"""Paged attention: decode steps, with one query token per row, over keys and values in KV cache blocks.

The kernel reads the blocks in place. Query heads that share keys are multiplied together. For few long rows,
the keys of a row are split between programs, and a second pass merges the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cached_kv import (
    LayerCache,
    queries_in_fp16,
    read_slots,
    split_scales,
    unpack_pairs,
)
from penstock.kernels.language import jit, next_power_of_2, tl, wait_for_inputs


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of scores [rows, heads, queries, keys], with one sink per head.

    An attention sink is an additional score without a value.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]


def paged_attention_reference(
    query: Tensor,  # [rows, heads, dim]
    cache: LayerCache,
    tables: Tensor,  # int32 [rows, width], the block table
    counts: Tensor,  # int32 [rows], tokens of each row, including the query
    *,
    block_size: int,
    scale: float,
    window: int | None = None,  # number of earlier tokens that a token attends to
    softcap: float | None = None,
    sinks: Tensor | None = None,  # fp32 [heads], attention sinks: scores without a value
) -> Tensor:
    """Attention of each row, [rows, heads · dim]. Rows are padded to the longest one and masked past their
    end."""
    rows, heads, dim = query.shape
    positions = torch.arange(tables.shape[1] * block_size, device=query.device)
    slots = tables.repeat_interleave(block_size, dim=1) * block_size + positions % block_size
    seen = positions[None, :] < counts[:, None]
    if window is not None:
        seen &= positions[None, :] >= counts[:, None] - 1 - window
    k, v = (x.transpose(1, 2) for x in _read(cache, slots, query.dtype))  # [rows, kv heads, positions, dim]
    if softcap is None and sinks is None:
        q, mask = query[:, :, None], seen[:, None, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != k.shape[1]
        )
        return out.reshape(rows, heads * dim)
    grouped = query.view(rows, k.shape[1], -1, dim)
    products = grouped @ k.transpose(2, 3)
    scores = products * scale if softcap is None else torch.tanh(products * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~seen[:, None, None], float("-inf"))
    weights = softmax_with_sinks(scores.view(rows, heads, 1, -1), sinks).view_as(scores)
    return (weights.to(v.dtype) @ v).reshape(rows, heads * dim)


def _read(cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of these slots."""
    keys = read_slots(cache.keys, cache.key_scales, slots, dtype)
    return keys, read_slots(cache.values, cache.value_scales, slots, dtype)


def paged_attention_runs(
    query: Tensor,
    cache: LayerCache,
    tables: Tensor,
    counts: Tensor,
    rows: Tensor,  # int64 [runs, width], rows that read the same blocks; shorter runs repeat a row
    flat_indices: Tensor,  # int64 [rows], flat index of each row in `rows`
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute `paged_attention_reference`, but gather the keys of each run once: gathering takes most of the
    time on a CPU."""
    (_, heads, dim), width = query.shape, rows.shape[1]
    index = torch.arange(tables.shape[1] * block_size, device=query.device)
    slots = tables[rows[:, 0]].repeat_interleave(block_size, dim=1) * block_size + index % block_size
    ends = counts[rows][:, :, None]  # [runs, width, 1]
    seen = index < ends
    if window is not None:
        seen &= index >= ends - 1 - window
    k, v = (x.transpose(1, 2) for x in _read(cache, slots, query.dtype))
    q = query[rows].transpose(1, 2)  # [runs, heads, width, dim]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=heads != k.shape[1]
    )
    return out.transpose(1, 2).reshape(len(rows) * width, heads * dim)[flat_indices]


@jit(unspecialized=("tables", "counts", "width"), overlaps=True)
def _paged(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,  # fp32 [slots, KV_HEADS], if FP8
    value_scales: tl.tensor,
    tables: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,  # [rows, heads, dim]; if SPLITS > 1, fp32 [rows, heads, SPLITS, dim]
    sums: tl.tensor,  # fp32 [rows, heads, SPLITS, 2]: largest score and sum of weights of each part
    sinks: tl.tensor,  # fp32 [heads], if SINKS
    width: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    QUERY_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Each program computes a row, key/value head and part of the keys, for all query heads that share it.

    Tensor cores need values of neighbouring keys together. Of fp8 values each would be a load of one byte, so
    they are read as pairs of components, which the hardware can transpose, and the components of even and of
    odd number are multiplied separately.
    """
    program = tl.program_id(0)
    part = program % SPLITS
    kv = (program // SPLITS) % KV_HEADS
    row = program // SPLITS // KV_HEADS
    count = tl.load(counts + row)
    if count == 0:  # a padding row
        wait_for_inputs()
        return
    first = 0
    if WINDOW >= 0:
        first = tl.maximum(count - 1 - WINDOW, 0)
    tiles = tl.cdiv(count, TILE) - first // TILE
    own = tl.cdiv(tiles, SPLITS)
    begin = (first // TILE + part * own) * TILE
    end = tl.minimum(begin + own * TILE, count)
    group = tl.arange(0, BLOCK_GROUP)
    comp = tl.arange(0, BLOCK_DIM)
    heads = kv * GROUP + group
    whole = (group[:, None] < GROUP) & (comp[None, :] < DIM)
    wait_for_inputs()  # not needed for counts and block tables, which the host copied earlier
    q = tl.load(
        query + row.to(tl.int64) * QUERY_STRIDE + heads[:, None] * DIM + comp[None, :], mask=whole, other=0.0
    )
    largest = tl.full((BLOCK_GROUP,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    if SINKS:  # only the first part counts the sink
        sink = tl.load(sinks + heads, mask=group < GROUP, other=0.0) * 1.4426950408889634
        largest = tl.where(part == 0, sink, largest)
        total = tl.where(part == 0, 1.0, total)
    if FP8:
        q, q_factor = queries_in_fp16(q)
        value_pairs = values.to(tl.pointer_type(tl.uint16))
        half = tl.arange(0, BLOCK_DIM // 2)
        context = tl.zeros((BLOCK_GROUP, BLOCK_DIM // 2), tl.float32)
        odd_context = tl.zeros((BLOCK_GROUP, BLOCK_DIM // 2), tl.float32)
    else:
        context = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = (place < count) & (place >= first)
        page = tl.load(tables + row * width + place // PAGE, mask=place < count, other=0).to(tl.int64)
        number = page * PAGE + place % PAGE
        slot = number * SLOT_STRIDE + kv * DIM
        here = inside[:, None] & (comp[None, :] < DIM)
        k = tl.load(keys + slot[:, None] + comp[None, :], mask=here, other=0.0)
        if FP8:
            pair_at = number * (SLOT_STRIDE // 2) + kv * (DIM // 2)
            there = inside[:, None] & (half[None, :] < DIM // 2)
            pairs = tl.load(value_pairs + pair_at[:, None] + half[None, :], mask=there, other=0)
            by_key = tl.load(key_scales + number * KV_HEADS + kv, mask=inside, other=0.0)
            by_value = tl.load(value_scales + number * KV_HEADS + kv, mask=inside, other=1.0)
            scores = tl.dot(q, tl.trans(k.to(tl.float16))) * q_factor[:, None] * (scale * by_key)[None, :]
        else:
            v = tl.load(values + slot[:, None] + comp[None, :], mask=here, other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
        if CAPPED:  # tanh computed by exp, which stays finite for any cap in use
            scaled = scores / cap
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scaled) + 1.0))
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, -1.0e30)
        if FP8:  # from here on, weights are multiplied by the scales of values, so that fp16 can hold them
            value_log, rest, power = split_scales(by_value)
            scores += value_log[None, :]
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        decay = tl.exp2(largest - new_largest)
        weights = tl.where(inside[None, :], tl.exp2(scores - new_largest[:, None]), 0.0)
        if FP8:
            total = total * decay + tl.sum(weights * power[None, :], axis=1)
            small = (weights * rest[None, :]).to(tl.float16)
            even, odd = unpack_pairs(pairs)
            context = tl.dot(small, even, context * decay[:, None])
            odd_context = tl.dot(small, odd, odd_context * decay[:, None])
        else:
            total = total * decay + tl.sum(weights, axis=1)
            context = context * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new_largest
    if FP8:
        context = tl.interleave(context, odd_context)
    if SPLITS == 1:
        context = context / total[:, None]
        at = row.to(tl.int64) * OUT_STRIDE + heads[:, None] * DIM + comp[None, :]
        tl.store(out + at, context.to(out.dtype.element_ty), mask=whole)
    else:
        place = ((row * KV_HEADS * GROUP + heads) * SPLITS + part).to(tl.int64)
        tl.store(out + place[:, None] * DIM + comp[None, :], context, mask=whole)
        tl.store(sums + place * 2, largest, mask=group < GROUP)
        tl.store(sums + place * 2 + 1, total, mask=group < GROUP)


@jit(unspecialized=("counts",), overlaps=True)
def _merge_splits(
    counts: tl.tensor,
    parts: tl.tensor,  # fp32 [rows, heads, SPLITS, dim]
    sums: tl.tensor,  # fp32 [rows, heads, SPLITS, 2]
    out: tl.tensor,  # [rows, heads, dim]
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Merge the parts of one row and head, each weighted by its share of the softmax."""
    wait_for_inputs()
    program = tl.program_id(0).to(tl.int64)
    if tl.load(counts + program // HEADS) == 0:
        return
    part = tl.arange(0, SPLITS)
    comp = tl.arange(0, BLOCK_DIM)
    largest = tl.load(sums + (program * SPLITS + part) * 2)
    total = tl.load(sums + (program * SPLITS + part) * 2 + 1)
    share = tl.exp2(largest - tl.max(largest, axis=0))
    here = (part[:, None] >= 0) & (comp[None, :] < DIM)
    contexts = tl.load(parts + (program * SPLITS + part)[:, None] * DIM + comp[None, :], mask=here, other=0.0)
    context = tl.sum(contexts * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    at = (program // HEADS) * OUT_STRIDE + (program % HEADS) * DIM
    tl.store(out + at + comp, context.to(out.dtype.element_ty), mask=comp < DIM)


_MIN_PROGRAMS = 512  # with fewer programs, keys are split
_MIN_SPLIT_KEYS = 256  # minimum keys of a part when a row's keys are split


class PagedTiling(NamedTuple):
    keys: int  # keys per iteration of a program
    warps: int
    stages: int


def tiling_for(dim: int) -> PagedTiling:
    """The tiling for heads of this size."""
    return PagedTiling(64, 4, 3) if dim <= 128 else PagedTiling(32, 4, 2)


def num_splits_for(rows: int, kv_heads: int, most: int) -> int:
    """The number of parts that a row's keys are split into, so that a few long rows fill the GPU.

    It depends only on the plan of the step, so the host knows it before the launch.
    """
    splits = 1
    while splits < 16 and rows * kv_heads * splits < _MIN_PROGRAMS and most > _MIN_SPLIT_KEYS * splits:
        splits *= 2
    return splits


def paged_attention(
    query: Tensor,
    cache: LayerCache,
    tables: Tensor,
    counts: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor,
    splits: int | None = None,
    tiling: PagedTiling | None = None,
) -> None:
    """Compute `paged_attention_reference` into `out` [rows, heads · dim], whose rows may be strided.

    The heads of a token must be contiguous. Rows without keys are padding rows: nothing is written for them.
    """
    rows, heads, dim = query.shape
    keys, values, key_scales, value_scales = cache
    kv_heads, width = keys.shape[1], tables.shape[1]
    assert query.stride()[1:] == (dim, 1) and keys.is_contiguous() and values.is_contiguous()
    assert key_scales is None or dim % 2 == 0
    if splits is None:
        most = width * block_size if window is None else min(width * block_size, window + 1)
        splits = num_splits_for(rows, kv_heads, most)
    into, sums = out, out
    if splits > 1:
        into = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=query.device)
        sums = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=query.device)
    group, block_dim = heads // kv_heads, max(16, next_power_of_2(dim))
    tiling = tiling or tiling_for(dim)
    _paged[(rows * kv_heads * splits,)](
        query,
        keys,
        values,
        keys if key_scales is None else key_scales,
        values if value_scales is None else value_scales,
        tables,
        counts,
        into,
        sums,
        query if sinks is None else sinks,
        width,
        float(scale),
        1.0 if softcap is None else float(softcap),
        QUERY_STRIDE=query.stride(0),
        OUT_STRIDE=out.stride(0),
        SLOT_STRIDE=kv_heads * dim,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_GROUP=max(16, next_power_of_2(group)),
        DIM=dim,
        BLOCK_DIM=block_dim,
        PAGE=block_size,
        TILE=tiling.keys,
        SPLITS=splits,
        WINDOW=-1 if window is None else window,
        CAPPED=softcap is not None,
        SINKS=sinks is not None,
        FP8=key_scales is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if splits > 1:
        _merge_splits[(rows * heads,)](
            counts,
            into,
            sums,
            out,
            OUT_STRIDE=out.stride(0),
            HEADS=heads,
            DIM=dim,
            BLOCK_DIM=block_dim,
            SPLITS=splits,
            num_warps=1,
        )
