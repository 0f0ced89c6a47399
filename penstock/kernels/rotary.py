"""Head norms and rotary embedding of queries and keys, in place on the output of the fused QKV projection.

If later steps need the keys and values, the same pass writes them to the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cached_kv import LayerCache
from penstock.kernels.language import bind, cdiv, jit, next_power_of_2, num_warps_for, tl, wait_for_inputs

_PAIRS_PER_PROGRAM = 1024  # pairs of components that one program rotates


class HeadNorms(NamedTuple):
    """RMS norms of each head, applied before the rotation."""

    query: Tensor  # [dim]
    key: Tensor  # [dim]
    eps: float


class KVCacheWrite(NamedTuple):
    """The contiguous KV cache of a layer, and the slot of each token."""

    cache: LayerCache
    slots: Tensor  # int32 [tokens]; -1: not written


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, size: int, interleaved: bool) -> Tensor:
    """Rotate the first `size` components of x [tokens, heads, dim]; cos and sin are [tokens, 1, size / 2].

    The pairs are (i, i + size / 2), or with `interleaved` (2i, 2i + 1).
    """
    rotated = x[..., :size]
    if interleaved:
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    else:
        low, high = rotated.chunk(2, dim=-1)
        out = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return out if size == x.shape[-1] else torch.cat((out, x[..., size:]), dim=-1)


def rotate_qkv_reference(
    qkv: Tensor,  # [tokens, query heads + 2 · key heads, dim]
    heads: tuple[int, int],  # number of query heads and of key heads
    cos: Tensor,  # [tokens, 1, size / 2]
    sin: Tensor,
    *,
    size: int,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and rotated queries and keys, and unchanged values, each [tokens, heads, dim]."""
    queries, keys = heads
    if norms is None:  # both at once
        rotated = rotate_reference(qkv[:, : queries + keys], cos, sin, size, interleaved)
        query, key = rotated.split([queries, keys], dim=1)
        return query, key, qkv[:, queries + keys :]
    query, key, value = qkv.split([queries, keys, keys], dim=1)
    query = F.rms_norm(query, norms.query.shape, norms.query, norms.eps)
    key = F.rms_norm(key, norms.key.shape, norms.key, norms.eps)
    return (
        rotate_reference(query, cos, sin, size, interleaved),
        rotate_reference(key, cos, sin, size, interleaved),
        value,
    )


@jit()
def _keep(
    into: tl.tensor,
    scales_at: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    one: tl.tensor,
    two: tl.tensor,
    is_kept: tl.tensor,
    is_first: tl.tensor,
    FP8: tl.constexpr,
) -> None:
    """Write both halves of some heads to the KV cache; in fp8, with one scale per head."""
    if FP8:
        wide, other = tl.where(is_kept, one, 0.0).to(tl.float32), tl.where(is_kept, two, 0.0).to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(wide), tl.abs(other)), axis=1)
        largest = tl.maximum(largest, 1e-12)[:, None]
        one, two = wide * (448.0 / largest), other * (448.0 / largest)
        tl.store(scales_at + is_first * 0, largest / 448.0 + is_first * 0.0, mask=is_kept & is_first)
    tl.store(into + low, one.to(into.dtype.element_ty), mask=is_kept)
    tl.store(into + high, two.to(into.dtype.element_ty), mask=is_kept)


@jit(unspecialized=("positions", "slots"), overlaps=True)
def _rotate(
    qkv: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_scales: tl.tensor,  # fp32 [slots, kv heads], if FP8
    value_scales: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    ROTATED: tl.constexpr,
    TOTAL: tl.constexpr,  # heads per token that are read: with KEEP, value heads follow the rotated heads
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    FP8: tl.constexpr,  # the KV cache is fp8
) -> None:
    wait_for_inputs()
    parts: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    program = tl.program_id(0)
    token = program // parts
    head = (program % parts) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < TOTAL) & (pair < HALF)
    rotated = inside & (head < ROTATED)
    if INTERLEAVED:
        low, high = 2 * pair, 2 * pair + 1
    else:
        low, high = pair, pair + HALF
    at = qkv + token.to(tl.int64) * WIDTH + head * DIM
    first = tl.load(at + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + high, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        scale = tl.where(head < ROTATED, scale, 1.0)
        is_query = inside & (head < QUERIES)
        is_key = rotated & (head >= QUERIES)
        is_value = (head >= ROTATED).to(tl.float32)
        first *= scale * (
            tl.load(query_norm + low + head * 0, mask=is_query, other=0.0).to(tl.float32)
            + tl.load(key_norm + low + head * 0, mask=is_key, other=0.0).to(tl.float32)
            + is_value
        )
        second *= scale * (
            tl.load(query_norm + high + head * 0, mask=is_query, other=0.0).to(tl.float32)
            + tl.load(key_norm + high + head * 0, mask=is_key, other=0.0).to(tl.float32)
            + is_value
        )
    angle = tl.load(positions + token).to(tl.int64) * HALF + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32)
    one = (first * c - second * s).to(qkv.dtype.element_ty)
    two = (second * c + first * s).to(qkv.dtype.element_ty)
    tl.store(at + low, one, mask=rotated)
    tl.store(at + high, two, mask=rotated)
    if KEEP:
        slot = tl.load(slots + token).to(tl.int64)
        kv_heads: tl.constexpr = TOTAL - ROTATED
        is_kept = rotated & (head >= QUERIES) & (slot >= 0)
        into = slot * (kv_heads * DIM) + (head - QUERIES) * DIM
        scales_at = key_scales + slot * kv_heads + (head - QUERIES)
        _keep(keys + into, scales_at, low, high, one, two, is_kept, pair == 0, FP8)
        is_kept = inside & (head >= ROTATED) & (slot >= 0)
        into = slot * (kv_heads * DIM) + (head - ROTATED) * DIM
        scales_at = value_scales + slot * kv_heads + (head - ROTATED)
        one, two = first.to(qkv.dtype.element_ty), second.to(qkv.dtype.element_ty)
        _keep(values + into, scales_at, low, high, one, two, is_kept, pair == 0, FP8)


@lru_cache(maxsize=256)
def _bound_rotate(
    total: int,
    queries: int,
    keys: int,
    dim: int,
    size: int,
    interleaved: bool,
    norm: bool,
    keep: bool,
    is_fp8: bool,
) -> tuple[Callable[..., Any], int]:
    """Return the bound kernel and its number of programs per token."""
    if (norm or keep) and size != dim:
        raise ValueError(f"head norms and KV cache writes rotate whole heads, not {size} of {dim} components")
    pairs = next_power_of_2(size // 2)
    heads = total if keep else queries + keys
    block = max(1, min(_PAIRS_PER_PROGRAM // pairs, next_power_of_2(heads)))
    given = 6 if norm else 4
    normed = (4, 5) if norm else (0, 0)
    kept = (given, given + 1, given + 2) if keep else (0, 0, 1)
    scales = (given + 3, given + 4) if is_fp8 else (0, 0)
    launch = bind(
        _rotate,
        (0, 1, 2, 3, *normed, *kept, *scales),
        WIDTH=total * dim,
        QUERIES=queries,
        ROTATED=queries + keys,
        TOTAL=heads,
        DIM=dim,
        HALF=size // 2,
        HEADS=block,
        PAIRS=pairs,
        INTERLEAVED=interleaved,
        NORM=norm,
        KEEP=keep,
        FP8=is_fp8,
        num_warps=num_warps_for(2 * block * pairs),
    )
    return launch, cdiv(heads, block)


def rotate_qkv_(
    qkv: Tensor,  # [tokens, query heads + 2 · key heads, dim], contiguous
    heads: tuple[int, int],
    positions: Tensor,  # int32 [tokens]
    cos: Tensor,  # [positions, size / 2]
    sin: Tensor,
    *,
    size: int,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
    keep: KVCacheWrite | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rotate_qkv_reference` in place, with `cos` and `sin` for all positions.

    With `norms` or `keep`, `size` must be the whole head.
    """
    tokens, total, dim = qkv.shape
    queries, keys = heads
    norm, kept = norms is not None, keep is not None
    written: tuple[Tensor, ...] = ()
    if keep is not None:
        written = keep.cache.keys, keep.cache.values, keep.slots, *keep.cache.scales
    is_fp8 = len(written) > 3
    launch, parts = _bound_rotate(total, queries, keys, dim, size, interleaved, norm, kept, is_fp8)
    assert qkv.is_contiguous()
    if tokens:
        launch(
            tokens * parts,
            qkv,
            positions,
            cos,
            sin,
            *(() if norms is None else norms[:2]),
            *written,
            0.0 if norms is None else norms.eps,
        )
    query, key, value = qkv.split_with_sizes((queries, keys, keys), 1)
    return query, key, value
