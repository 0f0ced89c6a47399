"""Attention within each row of a ragged batch. It reads the output of the fused QKV projection in place.

`short_attention` keeps all scores of a row in registers: one program per row and head, without a loop.
Library kernels waste most of each tile on padding for such rows. `flash_attention` iterates over tiles of
keys. It supports rows of any length, and keys of earlier steps: passed with the other keys, or read from the
KV cache, which `write_kv_cache` fills.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.blockwise import quantize_group
from penstock.kernels.cached_kv import LayerCache
from penstock.kernels.language import (
    bind,
    cdiv,
    from_fp8,
    jit,
    next_power_of_2,
    num_warps_for,
    replay,
    tl,
    wait_for_inputs,
)
from penstock.kernels.limits import H200, Limits, limits_of

MAX_SHORT_LENGTH = 64  # maximum tokens of a row in `short_attention`
_LOG2E = 1.4426950408889634


class FlashTiling(NamedTuple):
    """Number of queries and keys that a program holds at once, and its compile options."""

    queries: int
    keys: int
    warps: int
    stages: int


class CachedKeyValues(NamedTuple):
    """The KV cache of a layer, and the slots of the earlier tokens of all rows, concatenated."""

    cache: LayerCache
    slots: Tensor  # int32 [cached tokens]


class BiasByDistance(Protocol):
    """A bias on scores that depends only on the distance between key and query.

    With `reach` 0, each head has one value, a slope: scores fall by it for each token of distance. Otherwise
    each head has a value for each distance from -reach to reach; larger distances use the outermost values.
    """

    reach: int
    values: Tensor  # fp32 [heads], or [heads, 2 · reach + 1]
    kernel_values: Tensor  # the same, times log2(e)


def _num_warps_for_row(block: int, dim: int) -> int:
    """Warps of a program that holds a whole row. More than one warp does not speed up a small row."""
    return 1 if block <= 32 and dim <= 64 else max(1, block // 16)


def flash_tiling_for(dim: int, *, is_fp8: bool = False, limits: Limits = H200) -> FlashTiling:
    """`is_fp8`: earlier keys and values are. To convert them takes registers, of which there are too few if
    tensor cores read both operands from registers."""
    is_tight = is_fp8 and not limits.has_async_products
    if dim <= 128:
        return FlashTiling(64, 32 if is_tight else 64, 4, 3)
    if dim <= 256:
        return FlashTiling(64, 32, 8 if is_tight else 4, 2)
    return FlashTiling(32, 32, 8, 1)


_Strides = tuple[int, ...]


def _check_head_strides(dim: int, *strides: _Strides) -> None:
    for each in strides:
        assert each[1:] == (dim, 1), "the heads of a token must be contiguous"


def attention_reference(
    query: Tensor,  # [tokens, heads, dim]
    key: Tensor,  # [keys, kv heads, dim]
    value: Tensor,  # [keys, kv heads, dim]
    cu_lengths: Tensor,  # int32 [rows + 1]
    # int32 [rows + 1]: keys of each row, of which the last are its own tokens; None: no earlier keys
    cu_keys: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,  # maximum distance of visible keys, in both directions
    limits: Tensor | None = None,  # int32 [rows], number of visible leading keys; None: all
    bias: BiasByDistance | None = None,
    sinks: Tensor | None = None,  # fp32 [heads], attention sinks: scores without a value
) -> Tensor:
    """Attention of each row, computed in fp32. [tokens, heads · dim]"""
    cu_keys = cu_lengths if cu_keys is None else cu_keys
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for row in range(len(cu_lengths) - 1):
        mine, seen = (slice(int(cu[row]), int(cu[row + 1])) for cu in (cu_lengths, cu_keys))
        q, k, v = (x.float().transpose(0, 1) for x in (query[mine], key[seen], value[seen]))
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
        count, length = k.shape[1], q.shape[1]
        positions = torch.arange(count, device=query.device)
        ahead = positions[None, :] - positions[count - length :, None]
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if causal:
            visible &= ahead <= 0
        if window is not None:
            visible &= ahead.abs() <= window
        if limits is not None:
            visible &= positions[None, :] < int(limits[row])
        scores = q @ k.transpose(1, 2) * scale
        if bias is not None and not bias.reach:
            scores -= bias.values[:, None, None] * ahead.abs()
        elif bias is not None:
            scores += bias.values[:, ahead.clamp(-bias.reach, bias.reach) + bias.reach]
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :count]
        out[mine] = (weights @ v).transpose(0, 1).to(query.dtype)
    return out.flatten(1)


@jit()
def _distance_bias(bias: tl.tensor, head: tl.tensor, ahead: tl.tensor, REACH: tl.constexpr) -> tl.tensor:
    """The bias of a head for keys `ahead` tokens after their queries."""
    if REACH == 0:
        added = -tl.load(bias + head) * tl.abs(ahead).to(tl.float32)
    else:
        near = tl.minimum(tl.maximum(ahead, -REACH), REACH)
        added = tl.load(bias + head * (2 * REACH + 1) + REACH + near)
    return added


@jit(unspecialized=("cu_lengths", "limits"), overlaps=True)
def _short(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    cu_lengths: tl.tensor,
    limits: tl.tensor,
    bias: tl.tensor,
    scale: tl.tensor,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    LIMITED: tl.constexpr,
    REACH: tl.constexpr,  # `reach` of the bias; -1: no bias
) -> None:
    wait_for_inputs()
    program = tl.program_id(0)
    head = program % HEADS
    row = program // HEADS
    begin = tl.load(cu_lengths + row)
    length = tl.load(cu_lengths + row + 1) - begin
    place = tl.arange(0, BLOCK)
    comp = tl.arange(0, BLOCK_DIM)[None, :]
    token = (begin + place).to(tl.int64)[:, None]
    inside = (place[:, None] < length) & (comp < DIM)
    kv = (head // GROUP) * DIM
    q = tl.load(query + token * QUERY_STRIDE + head * DIM + comp, mask=inside, other=0.0)
    k = tl.load(key + token * KEY_STRIDE + kv + comp, mask=inside, other=0.0)
    v = tl.load(value + token * VALUE_STRIDE + kv + comp, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k)) * scale
    if REACH >= 0:
        scores += _distance_bias(bias, head, place[None, :] - place[:, None], REACH)
    seen = length
    if LIMITED:
        seen = tl.minimum(seen, tl.load(limits + row))
    visible = place[None, :] < seen
    if CAUSAL:
        visible = visible & (place[None, :] <= place[:, None])
    scores = tl.where(visible, scores, -1.0e30)
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    context = tl.dot(weights.to(v.dtype), v) / tl.sum(weights, axis=1)[:, None]
    tl.store(out + token * (HEADS * DIM) + head * DIM + comp, context.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=1024)
def _bound_short(
    query: _Strides,
    key: _Strides,
    value: _Strides,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    causal: bool,
    limited: bool,
    reach: int | None,
    warps: int | None,
) -> Callable[..., Any]:
    _check_head_strides(dim, query, key, value)
    return bind(
        _short,
        # The kernel is specialised on the bias's alignment. Without a bias, the aligned query is passed.
        (0, 1, 2, 3, 4, 5 if limited else 4, 0 if reach is None else 5 + limited),
        QUERY_STRIDE=query[0],
        KEY_STRIDE=key[0],
        VALUE_STRIDE=value[0],
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        BLOCK=block,
        BLOCK_DIM=max(16, next_power_of_2(dim)),
        CAUSAL=causal,
        LIMITED=limited,
        REACH=-1 if reach is None else reach,
        num_warps=_num_warps_for_row(block, dim) if warps is None else warps,
        num_stages=1,
    )


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_lengths: Tensor,
    *,
    max_length: int,
    scale: float,
    causal: bool = False,
    limits: Tensor | None = None,
    bias: BiasByDistance | None = None,
    out: Tensor | None = None,
    warps: int | None = None,
) -> Tensor:
    """Compute `attention_reference` for rows of at most `max_length` ≤ `MAX_SHORT_LENGTH` tokens.

    Tokens may be strided (views of the fused projection), the heads of one token may not. Rows may be empty.
    Only the tokens of the given rows are written to `out` [tokens, heads · dim].
    """
    tokens, heads, dim = query.shape
    rows = cu_lengths.shape[0] - 1
    if out is None:
        out = torch.empty(tokens, heads * dim, dtype=query.dtype, device=query.device)
    if rows and tokens:
        block = max(16, next_power_of_2(max_length))
        strides = query.stride(), key.stride(), value.stride()
        limited = limits is not None
        reach = None if bias is None else bias.reach
        launch = _bound_short(*strides, heads, key.shape[1], dim, block, causal, limited, reach, warps)
        optional = () if limits is None else (limits,)
        optional = optional if bias is None else (*optional, bias.kernel_values)
        launch(rows * heads, query, key, value, out, cu_lengths, *optional, scale * _LOG2E)
    return out


@jit()
def _key_tile(
    q: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    first_key: tl.tensor,
    slots: tl.tensor,
    key_scales: tl.tensor,  # scales of this head, if FP8
    value_scales: tl.tensor,
    start: tl.tensor,
    place: tl.tensor,
    seen: tl.tensor,
    comp: tl.tensor,
    bias: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    context: tl.tensor,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PAGED: tl.constexpr,
    REACH: tl.constexpr,
    FP8: tl.constexpr,  # keys and values are fp8, with scales
    KV_HEADS: tl.constexpr,
) -> tl.tensor:
    """Add one tile of keys to the running softmax."""
    other = start + tl.arange(0, KEYS)
    if PAGED:
        at = tl.load(slots + other, mask=other < seen, other=0).to(tl.int64)
    else:  # one 64-bit offset for the tile, so that offsets of keys stay 32-bit
        base = (first_key + start).to(tl.int64)
        key += base * KEY_STRIDE
        value += base * VALUE_STRIDE
        at = tl.arange(0, KEYS)
    if MASKED:
        here = (other[:, None] < seen) & (comp[None, :] < DIM)
        k = tl.load(key + at[:, None] * KEY_STRIDE + comp[None, :], mask=here, other=0.0)
        v = tl.load(value + at[:, None] * VALUE_STRIDE + comp[None, :], mask=here, other=0.0)
    elif DIM == BLOCK_DIM:
        k = tl.load(key + at[:, None] * KEY_STRIDE + comp[None, :])
        v = tl.load(value + at[:, None] * VALUE_STRIDE + comp[None, :])
    else:
        k = tl.load(key + at[:, None] * KEY_STRIDE + comp[None, :], mask=comp[None, :] < DIM, other=0.0)
        v = tl.load(value + at[:, None] * VALUE_STRIDE + comp[None, :], mask=comp[None, :] < DIM, other=0.0)
    if FP8:
        by_key = tl.load(key_scales + at * KV_HEADS, mask=other < seen, other=0.0)
        by_value = tl.load(value_scales + at * KV_HEADS, mask=other < seen, other=0.0)
        scores = tl.dot(q, tl.trans(from_fp8(k, q))) * by_key[None, :]
    else:
        scores = tl.dot(q, tl.trans(k))
    if REACH >= 0:
        scores = scores * scale + _distance_bias(bias, head, other[None, :] - place[:, None], REACH)
        scale = 1.0
    if MASKED:
        visible = other[None, :] < seen
        if CAUSAL:
            visible = visible & (other[None, :] <= place[:, None])
        if WINDOW >= 0:
            visible = visible & (other[None, :] - place[:, None] <= WINDOW)
            visible = visible & (place[:, None] - other[None, :] <= WINDOW)
        scores = tl.where(visible, scores, -1.0e30)
    larger = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    shrink = tl.exp2(largest - larger)
    weights = tl.exp2(scores * scale - larger[:, None])
    if MASKED and (CAUSAL or WINDOW >= 0):  # a query without a visible key so far must not count this tile
        weights = tl.where(visible, weights, 0.0)
    total = total * shrink + tl.sum(weights, axis=1)
    if FP8:
        weights *= by_value[None, :]
        v = from_fp8(v, q)
    context = tl.dot(weights.to(v.dtype), v, context * shrink[:, None])
    return total, larger, context


@jit(unspecialized=("cu_lengths", "cu_keys", "limits", "slots", "tiles"), overlaps=True)
def _flash(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    cu_lengths: tl.tensor,
    cu_keys: tl.tensor,
    limits: tl.tensor,
    old_key: tl.tensor,
    old_value: tl.tensor,
    slots: tl.tensor,
    old_key_scales: tl.tensor,  # fp32 [slots, kv heads], if FP8
    old_value_scales: tl.tensor,
    bias: tl.tensor,
    sinks: tl.tensor,
    tiles: tl.tensor,
    scale: tl.tensor,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    LIMITED: tl.constexpr,
    PAGED: tl.constexpr,
    OLD_STRIDE: tl.constexpr,
    REACH: tl.constexpr,  # `reach` of the bias; -1: no bias
    SINKS: tl.constexpr,
    FP8: tl.constexpr,  # cached keys and values are fp8
) -> None:
    wait_for_inputs()
    program = tl.program_id(0)
    head = program % HEADS
    tile = (program // HEADS) % tiles
    row = program // HEADS // tiles
    begin = tl.load(cu_lengths + row)
    length = tl.load(cu_lengths + row + 1) - begin
    if tile * QUERIES >= length:
        return
    first_key = tl.load(cu_keys + row)
    count = tl.load(cu_keys + row + 1) - first_key
    before = count - length  # number of keys of earlier steps
    seen = count
    if LIMITED:
        seen = tl.minimum(seen, tl.load(limits + row))
    mine = tile * QUERIES + tl.arange(0, QUERIES)
    comp = tl.arange(0, BLOCK_DIM)
    token = (begin + mine).to(tl.int64)[:, None]
    inside = (mine[:, None] < length) & (comp[None, :] < DIM)
    q = tl.load(query + token * QUERY_STRIDE + head * DIM + comp[None, :], mask=inside, other=0.0)
    place = mine + before  # positions of the queries among the keys
    key += (head // GROUP) * DIM
    value += (head // GROUP) * DIM
    largest = tl.full([QUERIES], -1.0e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:  # the sink counts as a key without a value, before the others
        largest = tl.full([QUERIES], 0.0, tl.float32) + tl.load(sinks + head) * 1.4426950408889634
        total = tl.full([QUERIES], 1.0, tl.float32)
    context = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    if PAGED:  # cached keys first: they all precede the queries
        old_key += (head // GROUP) * DIM
        old_value += (head // GROUP) * DIM
        if FP8:
            old_key_scales += head // GROUP
            old_value_scales += head // GROUP
        slots += first_key - begin  # skip the cached tokens of earlier rows
        near = 0
        if WINDOW >= 0:
            near = tl.maximum(tile * QUERIES + before - WINDOW, 0) // KEYS * KEYS
        full = near
        if WINDOW < 0:
            full = before // KEYS * KEYS
            for start in range(0, full, KEYS):
                total, largest, context = _key_tile(
                    q, old_key, old_value, first_key, slots, old_key_scales, old_value_scales,
                    start, place, before, comp, bias, head, scale,
                    total, largest, context,
                    OLD_STRIDE, OLD_STRIDE, DIM, BLOCK_DIM, KEYS, False, WINDOW, False, True, REACH,
                    FP8, HEADS // GROUP,
                )  # fmt: skip
        for start in range(full, before, KEYS):
            total, largest, context = _key_tile(
                q, old_key, old_value, first_key, slots, old_key_scales, old_value_scales,
                start, place, before, comp, bias, head, scale,
                total, largest, context,
                OLD_STRIDE, OLD_STRIDE, DIM, BLOCK_DIM, KEYS, False, WINDOW, True, True, REACH,
                FP8, HEADS // GROUP,
            )  # fmt: skip
        first_key = begin
        seen = length
        before = length * 0
        place = mine
    low = 0
    high = seen
    if CAUSAL:
        high = tl.minimum(high, (tile + 1) * QUERIES + before)
    if WINDOW >= 0:
        low = tl.maximum(tile * QUERIES + before - WINDOW, 0) // KEYS * KEYS
        high = tl.minimum(high, (tile + 1) * QUERIES + before + WINDOW)
    whole = low  # tiles up to here need no mask
    if WINDOW < 0:
        if CAUSAL:  # keys visible to the first query of the tile are visible to all
            whole = tl.minimum(seen, tile * QUERIES + before + 1) // KEYS * KEYS
        else:
            whole = high // KEYS * KEYS
        for start in range(low, whole, KEYS):
            total, largest, context = _key_tile(
                q, key, value, first_key, slots, slots, slots, start, place, seen, comp, bias, head, scale,
                total, largest, context,
                KEY_STRIDE, VALUE_STRIDE, DIM, BLOCK_DIM, KEYS, CAUSAL, WINDOW, False, False, REACH,
                False, HEADS // GROUP,
            )  # fmt: skip
    for start in range(whole, high, KEYS):
        total, largest, context = _key_tile(
            q, key, value, first_key, slots, slots, slots, start, place, seen, comp, bias, head, scale,
            total, largest, context,
            KEY_STRIDE, VALUE_STRIDE, DIM, BLOCK_DIM, KEYS, CAUSAL, WINDOW, True, False, REACH,
            False, HEADS // GROUP,
        )  # fmt: skip
    context = context / total[:, None]
    tl.store(
        out + token * (HEADS * DIM) + head * DIM + comp[None, :],
        context.to(out.dtype.element_ty),
        mask=inside,
    )


@lru_cache(maxsize=1024)
def _bound_flash(
    query: _Strides,
    key: _Strides,
    value: _Strides,
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    window: int | None,
    limited: bool,
    cached_stride: int | None,
    is_cached_fp8: bool,
    tiles: FlashTiling | None,
    has_earlier_keys: bool,
    reach: int | None,
    has_sinks: bool,
) -> tuple[Callable[..., Any], int]:
    """Return the bound kernel and its number of queries per program."""
    given = 5 + has_earlier_keys + limited
    cached = (1, 2, 4) if cached_stride is None else (given, given + 1, given + 2)
    scales = (given + 3, given + 4) if is_cached_fp8 else (0, 0)
    next_given = given + (0 if cached_stride is None else 3) + (2 if is_cached_fp8 else 0)
    _check_head_strides(dim, query, key, value)
    chosen = flash_tiling_for(dim) if tiles is None else tiles
    launch = bind(
        _flash,
        (
            *range(5),
            5 if has_earlier_keys else 4,
            given - 1 if limited else 4,
            *cached,
            *scales,
            # The kernel is specialised on the alignment of the scales and of these two tensors. If one is
            # absent, the aligned query is passed. cu_lengths may be unaligned: it is a slice of integers.
            0 if reach is None else next_given,
            0 if not has_sinks else next_given + (reach is not None),
        ),
        QUERY_STRIDE=query[0],
        KEY_STRIDE=key[0],
        VALUE_STRIDE=value[0],
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        QUERIES=chosen.queries,
        KEYS=chosen.keys,
        BLOCK_DIM=max(16, next_power_of_2(dim)),
        CAUSAL=causal,
        WINDOW=-1 if window is None else window,
        LIMITED=limited,
        PAGED=cached_stride is not None,
        OLD_STRIDE=0 if cached_stride is None else cached_stride,
        REACH=-1 if reach is None else reach,
        SINKS=has_sinks,
        FP8=is_cached_fp8,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    return launch, chosen.queries


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_lengths: Tensor,
    cu_keys: Tensor | None = None,
    *,
    max_length: int,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    limits: Tensor | None = None,
    bias: BiasByDistance | None = None,
    cached: CachedKeyValues | None = None,
    out: Tensor | None = None,
    tiles: FlashTiling | None = None,
    replays: list[Callable[[], Any]] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attention_reference` for rows of at most `max_length` tokens.

    Strides, empty rows and `out` are as in `short_attention`. With `limits`, each token of a row must see at
    least one key. With `cached`, key and value hold only the tokens of this step; earlier keys are
    read from the KV cache. If `replays` is given, a callable that repeats the launch with the same tensors is
    appended to it; it keeps those tensors alive.
    """
    tokens, heads, dim = query.shape
    if out is None:
        out = torch.empty(tokens, heads * dim, dtype=query.dtype, device=query.device)
    assert cached is None or (cu_keys is not None and limits is None)
    rows = cu_lengths.shape[0] - 1
    if rows and tokens:
        strides = query.stride(), key.stride(), value.stride()
        cached_stride = None if cached is None else cached.cache.keys.stride(0)
        scales = () if cached is None else cached.cache.scales
        limited = limits is not None
        if tiles is None and scales:
            tiles = flash_tiling_for(dim, is_fp8=True, limits=limits_of(query.device))
        launch, queries = _bound_flash(
            *strides,
            heads,
            key.shape[1],
            dim,
            causal,
            window,
            limited,
            cached_stride,
            bool(scales),
            tiles,
            cu_keys is not None,
            None if bias is None else bias.reach,
            sinks is not None,
        )
        count = cdiv(max_length, queries)
        optional: tuple[Tensor, ...] = () if cu_keys is None else (cu_keys,)
        optional = optional if limits is None else (*optional, limits)
        if cached is not None:
            optional = (*optional, cached.cache.keys, cached.cache.values, cached.slots, *scales)
        optional = optional if bias is None else (*optional, bias.kernel_values)
        optional = optional if sinks is None else (*optional, sinks)
        programs = rows * heads * count
        args = (query, key, value, out, cu_lengths, *optional, count, scale * _LOG2E)
        if replays is None:
            launch(programs, *args)
        else:
            replays.append(replay(launch, programs, *args))
            replays[-1]()
    return out


@jit(unspecialized=("slots",), overlaps=True)
def _write_kv_cache(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_scales: tl.tensor,  # fp32 [slots, HEADS], if FP8
    value_scales: tl.tensor,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_HEADS)
    at = head[:, None] * DIM + tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head[:, None] < HEADS) & (tl.arange(0, BLOCK_DIM)[None, :] < DIM)
    own_key = tl.load(key + token * KEY_STRIDE + at, mask=inside, other=0.0)
    own_value = tl.load(value + token * VALUE_STRIDE + at, mask=inside, other=0.0)
    if FP8:
        by_head = slot * HEADS + head
        own_key, scale = quantize_group(own_key.to(tl.float32), keys)
        tl.store(key_scales + by_head, scale, mask=head < HEADS)
        own_value, scale = quantize_group(own_value.to(tl.float32), values)
        tl.store(value_scales + by_head, scale, mask=head < HEADS)
    tl.store(keys + slot * (HEADS * DIM) + at, own_key, mask=inside)
    tl.store(values + slot * (HEADS * DIM) + at, own_value, mask=inside)


@lru_cache(maxsize=256)
def _bound_write_kv_cache(
    key: _Strides, value: _Strides, heads: int, dim: int, is_fp8: bool
) -> Callable[..., Any]:
    _check_head_strides(dim, key, value)
    block_heads, block_dim = next_power_of_2(heads), next_power_of_2(dim)
    return bind(
        _write_kv_cache,
        (*range(5), *((5, 6) if is_fp8 else (0, 0))),
        KEY_STRIDE=key[0],
        VALUE_STRIDE=value[0],
        HEADS=heads,
        DIM=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        FP8=is_fp8,
        num_warps=num_warps_for(block_heads * block_dim),
    )


def write_kv_cache(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Write key and value [tokens, kv heads, dim] to their slots of the KV cache.

    `slots` is int32 [tokens]; a token with slot -1 is not written. The cache is contiguous. `key` and `value`
    may be strided as in `short_attention`.
    """
    tokens, heads, dim = key.shape
    assert cache.keys.is_contiguous() and cache.values.is_contiguous()
    if tokens:
        launch = _bound_write_kv_cache(key.stride(), value.stride(), heads, dim, bool(cache.scales))
        launch(tokens, key, value, cache.keys, cache.values, slots, *cache.scales)
