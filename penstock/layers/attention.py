"""Attention over a ragged run of tokens: a thin call that takes the cheapest correct path.

Rows arrive ordered by length, so rows of equal length form a dense block without any padding. On a
CPU each block is one library call. On CUDA the short rows, which stand first, go to a kernel of ours and
one variable-length call serves the rest, unless a bias is added to the scores.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.kernels.attention import (
    MAX_SHORT_LENGTH,
    CachedKeyValues,
    flash_attention,
    short_attention,
    write_kv_cache,
)
from penstock.kernels.language import use_kernel
from penstock.kernels.paged import paged_attention, paged_attention_reference
from penstock.kvcache.store import KVStore
from penstock.layers.batch import Batch, Limits, Memory, Paged, read_in_place
from penstock.types import LengthGroup

ScoreBias = Callable[[int], Tensor]  # length → [heads, length, length], added to the scores


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Which tokens see which. `window` counts how far a token sees to each side, itself excluded;
    a causal model sees nothing to the right."""

    causal: bool = False
    window: int | None = None
    scale: float | None = None  # None: 1 / sqrt(head size)
    softcap: float | None = None  # scores are bent to stay within ± this


_SHORT = 64  # tokens; rows up to here are faster by plain products on a CPU
_OWN = (
    1 << 30
)  # tokens; on CUDA rows up to here go to our kernels, which benchmarks/gpu_kernels.py found faster
_FEW = 16  # short rows; among longer ones so few are not worth a launch of their own
_HALVES = (torch.bfloat16, torch.float16)
_WIDEST = 128  # of the heads that our kernels are tuned for

BIDIRECTIONAL = AttentionKind()
CAUSAL = AttentionKind(causal=True)


def attend(
    query: Tensor,  # [tokens, heads, dim]
    key: Tensor,  # [tokens, kv heads, dim]; kv heads divides heads
    value: Tensor,  # [tokens, kv heads, dim]
    batch: Batch,
    kind: AttentionKind = BIDIRECTIONAL,
    bias: ScoreBias | None = None,
    layer: int = 0,
    kept: bool = False,
) -> Tensor:
    """Attention within each row → [tokens, heads · dim]. `layer` finds the row's earlier tokens; `kept` says
    that the step's own are in memory already (`Memory.keeps`)."""
    if batch.limits is not None and kind.causal:
        raise ValueError("rows with a key limit need attention that looks ahead")
    if (memory := batch.memory) is not None:
        if memory.paged is not None:
            if not kept:
                memory.keep(layer, key, value)
            return _generating(query, key, value, batch, memory, memory.paged, kind, layer)
        if bias is None and kind.softcap is None and read_in_place(memory.store):
            return _paged(query, key, value, batch, memory, kind, layer, kept)
        key, value = memory.recall(layer, key, value)
    if query.is_cuda and bias is None and kind.softcap is None and query.dtype in _HALVES:
        return _on_cuda(query, key, value, batch, kind)
    return _by_length(query, key, value, batch, kind, bias)


def _generating(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    memory: Memory,
    paged: Paged,
    kind: AttentionKind,
    layer: int,
) -> Tensor:
    """A step that generates: all is kept before; rows of one token read the blocks, and the others are
    parts of prompts."""
    (tokens, heads, dim), one = query.shape, paged.rows
    out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
    if one < tokens:
        _read_prompts(query, key, value, batch, memory, one, kind, layer, out)
    if one:
        _read_blocks(query[:one], memory.store, paged, kind, layer, out[:one])
    return out


def _read_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    memory: Memory,
    one: int,
    kind: AttentionKind,
    layer: int,
    out: Tensor,
) -> None:
    """The rows from `one` on: what they remember is read where it lies, or gathered before their own keys."""
    if kind.softcap is None and query.dtype in _HALVES and use_kernel(query):
        flash_attention(
            query,
            key,
            value,
            batch.cu_lengths[one:],
            memory.cu_keys[one:],
            max_length=batch.max_length,
            scale=query.shape[-1] ** -0.5 if kind.scale is None else kind.scale,
            causal=kind.causal,
            window=kind.window,
            cached=CachedKeyValues(memory.store.keys[layer], memory.store.values[layer], memory.read_slots),
            out=out,
        )
        return
    keys, values = memory.remembered(layer, key[one:], value[one:])
    _fill(out, batch.groups, query, keys, values, kind, None)


def _read_blocks(
    query: Tensor, store: KVStore, paged: Paged, kind: AttentionKind, layer: int, out: Tensor
) -> None:
    where = (store.keys[layer], store.values[layer], paged.tables, paged.keys)
    scale = query.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    size, window, cap = paged.block_size, kind.window, kind.softcap
    if use_kernel(query) and query.dtype in _HALVES:
        paged_attention(query, *where, block_size=size, scale=scale, window=window, softcap=cap, out=out)
    else:
        out.copy_(
            paged_attention_reference(query, *where, block_size=size, scale=scale, window=window, softcap=cap)
        )


def attend_fused(
    qkv: Tensor, heads: int, batch: Batch, kind: AttentionKind = BIDIRECTIONAL, bias: ScoreBias | None = None
) -> Tensor:
    """The same for queries, keys and values side by side: qkv [tokens, 3 · heads · dim]."""
    parts: _Parts | None = batch.routes.get("parts")
    if parts is None or parts.of is not qkv or parts.heads != heads:
        parts = _Parts(qkv, heads, *qkv.view(qkv.shape[0], 3, heads, -1).unbind(1))
        if batch.lasts(qkv):
            batch.routes["parts"] = parts
    return attend(parts.query, parts.key, parts.value, batch, kind, bias)


class _Parts(NamedTuple):
    """Of a place that each layer writes its queries, keys and values to."""

    of: Tensor
    heads: int
    query: Tensor
    key: Tensor
    value: Tensor


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind, bias: ScoreBias | None
) -> Tensor:
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
    _fill(out, batch.groups, query, key, value, kind, bias)
    return out


def _fill(
    out: Tensor,
    groups: Iterable[LengthGroup],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kind: AttentionKind,
    bias: ScoreBias | None,
) -> None:
    """Write the tokens of these groups, each of which is one call."""
    _, heads, dim = query.shape
    grouped = key.shape[1] != heads
    on_cpu = query.device.type == "cpu"
    for group in groups:
        rows, length, first = group.num_rows, group.length, group.first_token
        stop, seen = first + rows * length, length + group.context
        keys = slice(group.first_key, group.first_key + rows * seen)
        q = query[first:stop].view(rows, length, -1, dim).transpose(1, 2)
        k, v = (x[keys].view(rows, seen, -1, dim).transpose(1, 2) for x in (key, value))
        mask, causal = _mask(length, group.context, kind, bias, query)
        if group.keys:
            k, v = k[:, :, : group.keys], v[:, :, : group.keys]
            mask = None if mask is None else mask[..., : group.keys]
        if kind.softcap is not None:
            context = _capped(q, k, v, mask, causal, kind, kind.softcap)
        elif on_cpu and length <= _SHORT and mask is None and not causal and not grouped:
            context = _short_rows(q, k, v, kind.scale)
        else:
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=kind.scale, enable_gqa=grouped
            )
        out[first:stop].view(rows, length, heads, dim).copy_(context.transpose(1, 2))


def _capped(
    query: Tensor,  # [rows, heads, length, dim]
    key: Tensor,  # [rows, kv heads, keys, dim]
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    kind: AttentionKind,
    cap: float,
) -> Tensor:
    """Plain products, for no library call bends scores. A row is short, or it is cut into chunks."""
    (_, heads, length, dim), kv_heads = query.shape, key.shape[1]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scale = dim**-0.5 if kind.scale is None else kind.scale
    scores = torch.tanh(query @ k.transpose(2, 3) * (scale / cap)) * cap
    if causal:
        mask = _visible(length, 0, True, None, query.device)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v


def _short_rows(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Plain batched products for query [rows, heads, length, dim], key and value of as many tokens or
    fewer: below some length their scores fit the cache,
    and the library's tiled kernel spends more on its tiles than they save."""
    rows, heads, length, dim = query.shape
    q, k, v = (x.reshape(rows * heads, -1, dim) for x in (query, key, value))
    scores = torch.baddbmm(
        q.new_empty(()).expand(rows * heads, length, k.shape[1]),
        q,
        k.transpose(1, 2),
        beta=0,
        alpha=dim**-0.5 if scale is None else scale,
    )
    return torch.bmm(torch.softmax(scores, dim=-1), v).view(rows, heads, length, dim)


def _mask(
    length: int, context: int, kind: AttentionKind, bias: ScoreBias | None, like: Tensor
) -> tuple[Tensor | None, bool]:
    """What to hand to the library: a mask to add, or the causal flag alone where that says it all."""
    narrow = kind.window is not None and kind.window < length + context - 1
    if bias is None and not narrow and not context:
        return None, kind.causal and length > 1
    seen = None
    if narrow or kind.causal:
        seen = _visible(length, context, kind.causal, kind.window if narrow else None, like.device)
    if bias is None:
        return seen, False
    added = bias(length)
    return (added if seen is None else added.masked_fill(~seen, float("-inf"))), False


@lru_cache(maxsize=64)
def _visible(length: int, context: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """True where a token of the step (first axis) sees a key, [length, context + length]."""
    keys = torch.arange(context + length, device=device)
    ahead = keys[None, :] - keys[context:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    if window is not None:
        seen &= ahead.abs() <= window
    return seen


@lru_cache(maxsize=2)
def _gqa_flag(grouped: bool) -> dict[str, Any]:
    """Newer releases want to be told that keys have fewer heads; older ones see it by themselves."""
    from torch.nn.attention.varlen import varlen_attn

    known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if grouped and known else {}


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
    if batch.memory is not None or query.shape[2] > _WIDEST or not use_kernel(query):
        out = _varlen(query, key, value, batch, kind)
    else:
        out = _by_kernels(query, key, value, batch, kind)
    if batch.limits is not None:
        _redo_limited(out.view(query.shape), query, key, value, batch, batch.limits, kind)
    return out


class _Route(NamedTuple):
    """Which rows of a step go where; the rest is the library's."""

    short: Tensor | None  # the cumulative lengths of rows for `short_attention`
    longest: int  # of these
    own: Tensor | None  # of rows for `flash_attention`, behind them
    longest_own: int
    rows: int  # of both


class _Again(NamedTuple):
    """The same launch for the next layer, whose queries, keys and values come to lie in the same places."""

    query: Tensor
    kind: AttentionKind
    out: Tensor
    launch: Callable[[], Any]


def _route(batch: Batch, reaches_all: bool) -> _Route:
    """Found once a step: all its layers ask. `reaches_all` says that no window cuts a short row."""
    key = ("attention", reaches_all, _OWN)
    if (found := batch.routes.get(key)) is None:
        short, longest = _rows_up_to(MAX_SHORT_LENGTH, batch) if reaches_all else (0, 0)
        if short < batch.num_rows and short <= _FEW:
            short = 0
        own, longest_own = _rows_up_to(_OWN, batch)
        own = max(own, short)
        found = batch.routes[key] = _Route(
            batch.cu_lengths[: short + 1] if short else None,
            longest,
            batch.cu_lengths[short : own + 1] if own > short else None,
            longest_own,
            own,
        )
    assert isinstance(found, _Route)
    return found


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind) -> Tensor:
    """Rows are ordered by length, so each kernel takes neighbours and writes their part of one output."""
    before: _Again | None = batch.routes.get("again")
    if before is not None and before.query is query and before.kind is kind:
        before.launch()
        return before.out
    tokens, heads, dim = query.shape
    route = _route(batch, kind.window is None or kind.window >= MAX_SHORT_LENGTH - 1)
    if route.rows < batch.num_rows:
        out = _varlen(query, key, value, batch, kind, first_row=route.rows)
    else:
        (place,) = batch.places((heads * dim,), query)
        out = query.new_empty((tokens, heads * dim)) if place is None else place
    scale = dim**-0.5 if kind.scale is None else kind.scale
    if route.short is not None:
        short_attention(
            query,
            key,
            value,
            route.short,
            max_length=route.longest,
            scale=scale,
            causal=kind.causal,
            out=out,
        )
    if route.own is not None:
        parts: _Parts | None = batch.routes.get("parts")
        alone = route.short is None and route.rows == batch.num_rows
        again: list[Callable[[], Any]] | None = (
            [] if alone and parts is not None and parts.query is query else None
        )
        flash_attention(
            query,
            key,
            value,
            route.own,
            max_length=route.longest_own,
            scale=scale,
            causal=kind.causal,
            window=kind.window,
            out=out,
            replays=again,
        )
        if again:
            batch.routes["again"] = _Again(query, kind, out, again[0])
    return out


def _paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    memory: Memory,
    kind: AttentionKind,
    layer: int,
    kept: bool,
) -> Tensor:
    """Two launches whatever was cut: keep what later steps need, then read what earlier ones left where it
    lies. Keeping comes first: a row may share a prefix that another writes in this very step."""
    keys, values = memory.store.keys[layer], memory.store.values[layer]
    if not kept:
        write_kv_cache(key, value, keys, values, memory.token_slots)
    return flash_attention(
        query,
        key,
        value,
        batch.cu_lengths,
        memory.cu_keys,
        max_length=batch.max_length,
        scale=query.shape[-1] ** -0.5 if kind.scale is None else kind.scale,
        causal=kind.causal,
        window=kind.window,
        cached=CachedKeyValues(keys, values, memory.read_slots),
    )


def _rows_up_to(length: int, batch: Batch) -> tuple[int, int]:
    """How many leading rows have at most so many tokens, and how many the longest of them has."""
    groups = batch.groups
    if batch.max_length <= length:
        return batch.num_rows, batch.max_length
    count = bisect_right(groups, length, key=lambda group: group.length)
    return (groups[count].first_row, groups[count - 1].length) if count else (0, 0)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind, first_row: int = 0
) -> Tensor:
    """By the library. The tokens of rows before `first_row` are left as they come."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if kind.window is None else kind.window
    cu_lengths = batch.cu_lengths[first_row:]
    cu_keys, max_keys = cu_lengths, batch.max_length
    if batch.memory is not None:
        cu_keys, max_keys = batch.memory.cu_keys[first_row:], batch.memory.max_keys
    out = varlen_attn(
        query,
        key,
        value,
        cu_lengths,
        cu_keys,
        batch.max_length,
        max_keys,
        scale=kind.scale,
        window_size=(left, 0 if kind.causal else left),
        **_gqa_flag(grouped=key.shape[1] != query.shape[1]),
    )
    assert isinstance(out, Tensor)
    return out.flatten(1)


def _redo_limited(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, batch: Batch, limits: Limits, kind: AttentionKind
) -> None:
    """Rows with a key limit, which are few and short, once more with their own keys.

    A window is measured from a row's end by the library, so with fewer keys it would be misplaced: rows
    that it does not reach across go without it, longer ones by length.
    """
    from torch.nn.attention.varlen import varlen_attn

    if kind.window is not None and kind.window < limits.max_length - 1:
        limited = [group for group in batch.groups if group.keys]
        with sdpa_kernel(SDPBackend.MATH):  # only there a token that sees no key at all gives nothing
            _fill(out.view(len(out), -1), limited, query, key, value, kind, None)
        return
    own = varlen_attn(
        query.index_select(0, limits.tokens),
        key.index_select(0, limits.keys),
        value.index_select(0, limits.keys),
        limits.cu_lengths,
        limits.cu_keys,
        limits.max_length,
        limits.max_keys,
        scale=kind.scale,
        window_size=(-1, -1),
        **_gqa_flag(grouped=key.shape[1] != query.shape[1]),
    )
    assert isinstance(own, Tensor)
    out.index_copy_(0, limits.tokens, own)
