"""Attention of rows that run one token each over keys and values in blocks of memory.

The kernel reads blocks where they lie. Query heads that share keys are one product; where rows are few and
long, the keys of each are split among programs, and a second pass joins the parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import jit, next_power_of_2, tl


def paged_attention_reference(
    query: Tensor,  # [rows, heads, dim]
    keys: Tensor,  # [slots, kv heads, dim]
    values: Tensor,  # [slots, kv heads, dim]
    tables: Tensor,  # int32 [rows, width], blocks of each row
    counts: Tensor,  # int32 [rows], tokens of each row; the last is the query's own
    *,
    block_size: int,
    scale: float,
    window: int | None = None,  # how far back a token sees
    softcap: float | None = None,
) -> Tensor:
    """[rows, heads · dim]. Rows are filled up to the longest, and what is beyond their end is masked."""
    rows, heads, dim = query.shape
    places = torch.arange(tables.shape[1] * block_size, device=query.device)
    slots = tables.repeat_interleave(block_size, dim=1) * block_size + places % block_size
    seen = places[None, :] < counts[:, None]
    if window is not None:
        seen &= places[None, :] >= counts[:, None] - 1 - window
    k, v = (x[slots].transpose(1, 2) for x in (keys, values))  # [rows, kv heads, places, dim]
    if softcap is None:
        q, mask = query[:, :, None], seen[:, None, None]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != k.shape[1]
        )
        return out.reshape(rows, heads * dim)
    grouped = query.view(rows, k.shape[1], -1, dim)
    scores = torch.tanh(grouped @ k.transpose(2, 3) * (scale / softcap)) * softcap
    scores = scores.float().masked_fill(~seen[:, None, None], float("-inf"))
    return (scores.softmax(dim=-1).to(v.dtype) @ v).reshape(rows, heads * dim)


@jit(unspecialized=("tables", "counts", "width"))
def _paged(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,  # [rows, heads, dim], or with SPLITS fp32 [rows, heads, SPLITS, dim]
    sums: tl.tensor,  # fp32 [rows, heads, SPLITS, 2]: the largest score and the sum of weights of each part
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
) -> None:
    """One program for each row, key/value head and part of its keys, for all heads that share these."""
    program = tl.program_id(0)
    part = program % SPLITS
    kv = (program // SPLITS) % KV_HEADS
    row = program // SPLITS // KV_HEADS
    count = tl.load(counts + row)
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
    q = tl.load(
        query + row.to(tl.int64) * QUERY_STRIDE + heads[:, None] * DIM + comp[None, :], mask=whole, other=0.0
    )
    largest = tl.full((BLOCK_GROUP,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    context = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = (place < count) & (place >= first)
        page = tl.load(tables + row * width + place // PAGE, mask=place < count, other=0).to(tl.int64)
        slot = (page * PAGE + place % PAGE) * SLOT_STRIDE + kv * DIM
        here = inside[:, None] & (comp[None, :] < DIM)
        k = tl.load(keys + slot[:, None] + comp[None, :], mask=here, other=0.0)
        v = tl.load(values + slot[:, None] + comp[None, :], mask=here, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if CAPPED:  # tanh by the exponential, which is finite for any bound that is of use
            bent = scores / cap
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * bent) + 1.0))
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, -1.0e30)
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        faded = tl.exp2(largest - higher)
        weights = tl.where(inside[None, :], tl.exp2(scores - higher[:, None]), 0.0)
        total = total * faded + tl.sum(weights, axis=1)
        context = context * faded[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = higher
    if SPLITS == 1:
        context = context / total[:, None]
        at = row.to(tl.int64) * OUT_STRIDE + heads[:, None] * DIM + comp[None, :]
        tl.store(out + at, context.to(out.dtype.element_ty), mask=whole)
    else:
        place = ((row * KV_HEADS * GROUP + heads) * SPLITS + part).to(tl.int64)
        tl.store(out + place[:, None] * DIM + comp[None, :], context, mask=whole)
        tl.store(sums + place * 2, largest, mask=group < GROUP)
        tl.store(sums + place * 2 + 1, total, mask=group < GROUP)


@jit()
def _join(
    parts: tl.tensor,  # fp32 [rows, heads, SPLITS, dim]
    sums: tl.tensor,  # fp32 [rows, heads, SPLITS, 2]
    out: tl.tensor,  # [rows, heads, dim]
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """The parts of one row and head, each weighed by its share of the whole softmax."""
    program = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    comp = tl.arange(0, BLOCK_DIM)
    largest = tl.load(sums + (program * SPLITS + part) * 2)
    total = tl.load(sums + (program * SPLITS + part) * 2 + 1)
    share = tl.exp2(largest - tl.max(largest, axis=0))
    here = (part[:, None] >= 0) & (comp[None, :] < DIM)
    said = tl.load(parts + (program * SPLITS + part)[:, None] * DIM + comp[None, :], mask=here, other=0.0)
    context = tl.sum(said * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    at = (program // HEADS) * OUT_STRIDE + (program % HEADS) * DIM
    tl.store(out + at + comp, context.to(out.dtype.element_ty), mask=comp < DIM)


_TILE = 64  # keys that a program holds at a time
_PROGRAMS = 512  # below so many, keys are split among more


def num_splits_for(rows: int, kv_heads: int, most: int) -> int:
    """How many parts a row's keys are split into, so that a few long rows fill the machine too. From the
    plan's numbers alone, so that it is known before anything is launched."""
    splits = 1
    while splits < 16 and rows * kv_heads * splits < _PROGRAMS and most > 4 * _TILE * splits:
        splits *= 2
    return splits


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    counts: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor,
    splits: int | None = None,
) -> None:
    """As the reference, into `out` [rows, heads · dim], whose rows may lie apart. Blocks are read where they
    lie; the heads of a token may not lie apart."""
    rows, heads, dim = query.shape
    kv_heads, width = keys.shape[1], tables.shape[1]
    assert query.stride()[1:] == (dim, 1) and keys.is_contiguous() and values.is_contiguous()
    if splits is None:
        most = width * block_size if window is None else min(width * block_size, window + 1)
        splits = num_splits_for(rows, kv_heads, most)
    into, sums = out, out
    if splits > 1:
        into = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=query.device)
        sums = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=query.device)
    group, block_dim = heads // kv_heads, max(16, next_power_of_2(dim))
    _paged[(rows * kv_heads * splits,)](
        query,
        keys,
        values,
        tables,
        counts,
        into,
        sums,
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
        TILE=_TILE if block_dim <= 128 else _TILE // 2,
        SPLITS=splits,
        WINDOW=-1 if window is None else window,
        CAPPED=softcap is not None,
        num_warps=4,
        num_stages=3 if block_dim <= 128 else 2,
    )
    if splits > 1:
        _join[(rows * heads,)](
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
