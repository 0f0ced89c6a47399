"""Attention over a ragged batch of tokens, by the cheapest correct path.

Rows arrive ordered by length, so rows of equal length form a dense block without any padding. On a
CPU each block is one library call. On CUDA the short rows, which come first, go to one kernel and the
longer rows to another, unless a bias is added to the scores.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
from penstock.kernels.paged import (
    paged_attention,
    paged_attention_reference,
    paged_attention_runs,
    softmax_with_sinks,
)
from penstock.kvcache.store import KVStore
from penstock.layers.batch import (
    MAX_HEAD_DIM,
    Batch,
    KeyLimitTensors,
    KVAccess,
    PagedTensors,
    reads_in_place,
)
from penstock.layers.branch import Branch
from penstock.layers.cpu_shapes import zero_padding
from penstock.layers.distance_bias import MAX_BIASED_QUERIES, DistanceBias
from penstock.layers.scratch import AttentionRoute, QKVViews, RepeatedLaunch
from penstock.types import LengthGroup

ScoreBias = Callable[[int], Tensor]  # length → [heads, length, length], added to the scores


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Which tokens attend to which.

    `window` is the number of tokens that a token attends to on each side of itself. In causal attention it
    never attends to later tokens.
    """

    causal: bool = False
    window: int | None = None
    scale: float | None = None  # None: 1 / sqrt(head size)
    softcap: float | None = None  # scores are squashed by tanh to stay within ± this
    bias: DistanceBias | None = None  # added to the scores of bidirectional attention without a window


_MAX_CPU_SHORT = 64  # tokens; on a CPU plain products are faster for rows up to this length
# Tokens; on CUDA, Penstock's kernels take rows up to this length, as they were faster in
# benchmarks/gpu_kernels.py.
_MAX_OWN_LENGTH = 1 << 30
_MIN_SHORT_ROWS = 17  # with fewer short rows among longer ones, a separate launch does not pay
_MAX_LIBRARY_HEAD_DIM = 256  # largest head size that the library's kernel supports
_HALF_DTYPES = (torch.bfloat16, torch.float16)

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
    kv_written: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention within each row → [tokens, heads · dim].

    `layer` selects the layer's part of the KV cache. `kv_written` says that it already has the step's own
    keys and values (`KVAccess.write_target`). `sinks` fp32 [heads] are attention sinks: scores without a
    value.
    """
    if (kv := batch.kv) is not None:
        if kv.paged is not None:
            if not kv_written:
                kv.write(layer, key, value)
            return _attend_generation(query, key, value, batch, kv, kv.paged, kind, layer, sinks)
        if bias is None and kind.softcap is None and reads_in_place(kv.store):
            if not kv_written:  # before reading: rows may share a prefix that this step writes
                write_kv_cache(key, value, kv.store.layer(layer), kv.token_slots)
            return _attend_cached(query, key, value, batch, kv, kind, layer, sinks)
        key, value = kv.write_and_gather(layer, key, value)
    if (
        query.is_cuda
        and bias is None
        and kind.softcap is None
        and query.dtype in _HALF_DTYPES
        and (kind.bias is None or use_kernel(query))
    ):
        return _on_cuda(query, key, value, batch, kind, sinks)
    return _attend_groups(query, key, value, batch.groups, kind, bias, sinks)


def _attend_generation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    kv: KVAccess,
    paged: PagedTensors,
    kind: AttentionKind,
    layer: int,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a generation step whose keys and values are already in the cache.

    The leading rows have one token each and read the cache through block tables. The others are chunks of
    prompts.
    """
    (tokens, heads, dim), decodes = query.shape, paged.num_rows
    out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
    if decodes == tokens:
        _attend_paged(query, kv.store, paged, kind, layer, out, sinks)
        return out
    if not decodes:
        _attend_prompts(query, key, value, batch, kv, kind, layer, sinks, out)
        return out
    branch = Branch(query.device)
    with branch.aside():
        _attend_prompts(query, key, value, batch, kv, kind, layer, sinks, out)
    _attend_paged(query[:decodes], kv.store, paged, kind, layer, out[:decodes], sinks)
    branch.join()
    return out


def _attend_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    kv: KVAccess,
    kind: AttentionKind,
    layer: int,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Write attention of the prompt rows to `out` [tokens, heads · dim].

    They follow the paged rows, which have one token each. The part of `out` before them may be overwritten.
    """
    dim, first_row = query.shape[2], 0 if kv.paged is None else kv.paged.num_rows
    if kind.softcap is None and query.dtype in _HALF_DTYPES and use_kernel(query):
        flash_attention(
            query,
            key,
            value,
            batch.cu_lengths[first_row:],
            kv.cu_keys[first_row:],
            max_length=batch.max_length,
            scale=dim**-0.5 if kind.scale is None else kind.scale,
            causal=kind.causal,
            window=kind.window,
            cached=CachedKeyValues(kv.store.layer(layer), kv.read_slots),
            out=out,
            sinks=sinks,
        )
        return
    groups = tuple(batch.groups)  # read before keys are gathered: a captured batch has no groups
    keys, values = kv.gather(layer, key[first_row:], value[first_row:])
    _fill_groups(out, groups, query, keys, values, kind, None, sinks)
    zero_padding(out, groups)


def _attend_paged(
    query: Tensor,
    store: KVStore,
    paged: PagedTensors,
    kind: AttentionKind,
    layer: int,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    cache = (store.layer(layer), paged.block_tables, paged.num_keys)
    scale = query.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    size, window, cap = paged.block_size, kind.window, kind.softcap
    if paged.runs is not None and cap is None and sinks is None and not use_kernel(query):
        rows, flat_indices = paged.runs
        out.copy_(
            paged_attention_runs(
                query, *cache, rows, flat_indices, block_size=size, scale=scale, window=window
            )
        )
    elif use_kernel(query) and query.dtype in _HALF_DTYPES:
        paged_attention(
            query, *cache, block_size=size, scale=scale, window=window, softcap=cap, sinks=sinks, out=out
        )
    else:
        out.copy_(
            paged_attention_reference(
                query, *cache, block_size=size, scale=scale, window=window, softcap=cap, sinks=sinks
            )
        )


def attend_fused(
    qkv: Tensor, heads: int, batch: Batch, kind: AttentionKind = BIDIRECTIONAL, bias: ScoreBias | None = None
) -> Tensor:
    """`attend` for queries, keys and values in one tensor, qkv [tokens, 3 · heads · dim]."""
    views = batch.scratch.qkv_views
    if views is None or views.qkv is not qkv or views.num_heads != heads:
        views = QKVViews(qkv, heads, *qkv.view(qkv.shape[0], 3, heads, -1).unbind(1))
        if batch.is_scratch(qkv):
            batch.scratch.qkv_views = views
    return attend(views.query, views.key, views.value, batch, kind, bias)


def _attend_groups(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: tuple[LengthGroup, ...],
    kind: AttentionKind,
    bias: ScoreBias | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of groups, [tokens, heads · dim]. Tokens before the first group stay uninitialised."""
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
    _fill_groups(out, groups, query, key, value, kind, bias, sinks)
    return zero_padding(out, groups)


def _fill_groups(
    out: Tensor,
    groups: Iterable[LengthGroup],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kind: AttentionKind,
    bias: ScoreBias | None,
    sinks: Tensor | None = None,
) -> None:
    """Write attention of these groups to `out`, with one library call per group."""
    _, heads, dim = query.shape
    is_gqa = key.shape[1] != heads
    on_cpu = query.device.type == "cpu"
    for group in groups:
        rows, length, first = group.num_rows, group.length, group.first_token
        stop, num_keys = first + rows * length, length + group.num_cached
        keys = slice(group.first_key, group.first_key + rows * num_keys)
        q = query[first:stop].view(rows, length, -1, dim).transpose(1, 2)
        k, v = (x[keys].view(rows, num_keys, -1, dim).transpose(1, 2) for x in (key, value))
        mask, causal = _mask(length, group.num_cached, kind, bias, query)
        if group.key_limit:
            k, v = k[:, :, : group.key_limit], v[:, :, : group.key_limit]
            mask = None if mask is None else mask[..., : group.key_limit]
        if kind.bias is not None:
            context = _biased(q, k, v, kind.scale, kind.bias)
        elif kind.softcap is not None or sinks is not None:
            context = _by_products(q, k, v, mask, causal, kind, sinks)
        elif on_cpu and length <= _MAX_CPU_SHORT and mask is None and not causal and not is_gqa:
            context = _short_rows_on_cpu(q, k, v, kind.scale)
        else:
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=kind.scale, enable_gqa=is_gqa
            )
        out[first:stop].view(rows, length, heads, dim).copy_(context.transpose(1, 2))


def _biased(query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: DistanceBias) -> Tensor:
    """Attention with a bias by distance: query [rows, heads, length, dim], keys from the row's first on."""
    length, keys = query.shape[2], key.shape[2]
    parts = []
    for first in range(0, length, MAX_BIASED_QUERIES):
        stop = min(first + MAX_BIASED_QUERIES, length)
        mask = bias.matrix(first, stop, keys, query.dtype)
        q = query[:, :, first:stop]
        parts.append(F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _by_products(
    query: Tensor,  # [rows, heads, length, dim]
    key: Tensor,  # [rows, kv heads, keys, dim]
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    kind: AttentionKind,
    sinks: Tensor | None,  # [heads]
) -> Tensor:
    """Attention by plain products: no library call has softcap or sinks. Rows are short or in chunks."""
    (_, heads, length, dim), kv_heads = query.shape, key.shape[1]
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scale, cap = dim**-0.5 if kind.scale is None else kind.scale, kind.softcap
    products = query @ k.transpose(2, 3)
    scores = products * scale if cap is None else torch.tanh(products * (scale / cap)) * cap
    if causal:
        mask = _visible(length, 0, True, None, query.device)[:, : k.shape[2]]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return softmax_with_sinks(scores.float(), sinks).to(v.dtype) @ v


def _short_rows_on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention by plain batched products: query [rows, heads, length, dim], at most as many keys.

    The scores of short rows fit in the CPU's cache, so the library's tiling costs more than it saves.
    """
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
    length: int, num_cached: int, kind: AttentionKind, bias: ScoreBias | None, like: Tensor
) -> tuple[Tensor | None, bool]:
    """Return a mask for the library, or None and whether to set its causal flag."""
    is_windowed = kind.window is not None and kind.window < length + num_cached - 1
    if bias is None and not is_windowed and not num_cached:
        return None, kind.causal and length > 1
    visible = None
    if is_windowed or kind.causal:
        window = kind.window if is_windowed else None
        visible = _visible(length, num_cached, kind.causal, window, like.device)
    if bias is None:
        return visible, False
    added = bias(length)
    return (added if visible is None else added.masked_fill(~visible, float("-inf"))), False


def forget_masks() -> None:
    """Free the masks cached for later steps."""
    _visible.cache_clear()


@lru_cache(maxsize=64)
def _visible(length: int, num_cached: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """True where a token of the step (first axis) attends to a key, [length, num_cached + length]."""
    keys = torch.arange(num_cached + length, device=device)
    distance = keys[None, :] - keys[num_cached:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance <= 0
    if window is not None:
        visible &= distance.abs() <= window
    return visible


@lru_cache(maxsize=2)
def _gqa_flag(is_gqa: bool) -> dict[str, Any]:
    """Newer releases of torch need a flag if keys have fewer heads; older ones detect it."""
    from torch.nn.attention.varlen import varlen_attn

    is_known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if is_gqa and is_known else {}


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind, sinks: Tensor | None = None
) -> Tensor:
    dim = query.shape[2]
    is_own_size = dim <= MAX_HEAD_DIM or dim > _MAX_LIBRARY_HEAD_DIM
    is_own = (batch.kv is None and is_own_size and use_kernel(query)) or kind.bias is not None
    if sinks is not None and (not is_own or batch.limits is not None):
        return _attend_groups(query, key, value, batch.groups, kind, sinks=sinks)
    if is_own:
        out = _attend_by_kernels(query, key, value, batch, kind, sinks)
    else:
        out = _varlen(query, key, value, batch, kind)
    if batch.limits is not None:
        _redo_limited_rows(out.view(query.shape), query, key, value, batch, batch.limits, kind)
    return out


def _route(batch: Batch, window_covers_short: bool) -> AttentionRoute:
    """Route rows to kernels, once per step. `window_covers_short`: no window is shorter than a short row."""
    key = (window_covers_short, _MAX_OWN_LENGTH)
    if (route := batch.scratch.routes.get(key)) is None:
        short, max_short_length = _rows_up_to(MAX_SHORT_LENGTH, batch) if window_covers_short else (0, 0)
        if short < batch.num_rows and short < _MIN_SHORT_ROWS:
            short = 0
        own, max_flash_length = _rows_up_to(_MAX_OWN_LENGTH, batch)
        own = max(own, short)
        route = batch.scratch.routes[key] = AttentionRoute(
            batch.cu_lengths[: short + 1] if short else None,
            max_short_length,
            batch.cu_lengths[short : own + 1] if own > short else None,
            max_flash_length,
            own,
        )
    return route


def _attend_by_kernels(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind, sinks: Tensor | None = None
) -> Tensor:
    """Rows are ordered by length. Each kernel takes consecutive rows and writes its part of one output."""
    repeated = batch.scratch.repeated
    if repeated is not None and repeated.query is query and repeated.kind is kind:
        repeated.launch()
        return repeated.out
    tokens, heads, dim = query.shape
    covers_short = kind.window is None or kind.window >= MAX_SHORT_LENGTH - 1
    route = _route(batch, covers_short and dim <= MAX_HEAD_DIM and sinks is None)
    if route.num_rows < batch.num_rows:
        out = _varlen(query, key, value, batch, kind, first_row=route.num_rows)
    else:
        (buffer,) = batch.scratch_buffers((heads * dim,), query)
        out = query.new_empty((tokens, heads * dim)) if buffer is None else buffer
    scale = dim**-0.5 if kind.scale is None else kind.scale
    if route.short is not None:
        short_attention(
            query,
            key,
            value,
            route.short,
            max_length=route.max_short_length,
            scale=scale,
            causal=kind.causal,
            bias=kind.bias,
            out=out,
        )
    if route.flash is not None:
        views = batch.scratch.qkv_views
        is_only_launch = route.short is None and route.num_rows == batch.num_rows
        can_repeat = is_only_launch and views is not None and views.query is query
        replays: list[Callable[[], Any]] | None = [] if can_repeat else None
        flash_attention(
            query,
            key,
            value,
            route.flash,
            max_length=route.max_flash_length,
            scale=scale,
            causal=kind.causal,
            window=kind.window,
            bias=kind.bias,
            out=out,
            replays=replays,
            sinks=sinks,
        )
        if replays:
            batch.scratch.repeated = RepeatedLaunch(query, kind, out, replays[0])
    return out


def _attend_cached(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    kv: KVAccess,
    kind: AttentionKind,
    layer: int,
    sinks: Tensor | None,
) -> Tensor:
    """Attention in one launch: the kernel reads cached keys and values from their slots."""
    return flash_attention(
        query,
        key,
        value,
        batch.cu_lengths,
        kv.cu_keys,
        max_length=batch.max_length,
        scale=query.shape[-1] ** -0.5 if kind.scale is None else kind.scale,
        causal=kind.causal,
        window=kind.window,
        cached=CachedKeyValues(kv.store.layer(layer), kv.read_slots),
        sinks=sinks,
    )


def _rows_up_to(length: int, batch: Batch) -> tuple[int, int]:
    """The number of leading rows with at most `length` tokens, and the length of the longest of them."""
    groups = batch.groups
    if batch.max_length <= length:
        return batch.num_rows, batch.max_length
    count = bisect_right(groups, length, key=lambda group: group.length)
    return (groups[count].first_row, groups[count - 1].length) if count else (0, 0)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, kind: AttentionKind, first_row: int = 0
) -> Tensor:
    """Attention by the library. The tokens of rows before `first_row` stay uninitialised."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if kind.window is None else kind.window
    cu_lengths = batch.cu_lengths[first_row:]
    cu_keys, max_keys = cu_lengths, batch.max_length
    if batch.kv is not None:
        cu_keys, max_keys = batch.kv.cu_keys[first_row:], batch.kv.max_keys
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
        **_gqa_flag(is_gqa=key.shape[1] != query.shape[1]),
    )
    assert isinstance(out, Tensor)
    return out.flatten(1)


def _redo_limited_rows(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: Batch,
    limits: KeyLimitTensors,
    kind: AttentionKind,
) -> None:
    """Compute rows with a key limit again, with only their visible keys. Such rows are few and short.

    The library measures a window from a row's end, so fewer keys would shift it. Rows that fit in the window
    run without one. Rows that do not fit run group by group. The same applies to causal attention, to a bias,
    and to head sizes that the library does not support.
    """
    from torch.nn.attention.varlen import varlen_attn

    is_cut = kind.window is not None and kind.window < limits.max_length - 1
    if is_cut or kind.causal or kind.bias is not None or query.shape[2] > _MAX_LIBRARY_HEAD_DIM:
        limited = [group for group in batch.groups if group.key_limit]
        with sdpa_kernel(SDPBackend.MATH):  # the only one that returns zeros for a token without visible keys
            _fill_groups(out.view(len(out), -1), limited, query, key, value, kind, None)
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
        **_gqa_flag(is_gqa=key.shape[1] != query.shape[1]),
    )
    assert isinstance(own, Tensor)
    out.index_copy_(0, limits.tokens, own)
