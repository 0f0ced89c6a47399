"""Norms of queries and keys and their rotation, in place on the fused output of the projection; where later
steps need keys and values, these go to memory in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import bind, cdiv, jit, next_power_of_2, num_warps_for, tl

_ELEMENTS = 1024  # pairs that one program turns


class HeadNorms(NamedTuple):
    """RMS norms of each head by itself, before it is turned."""

    query: Tensor  # [dim]
    key: Tensor  # [dim]
    eps: float


class KVCacheWrite(NamedTuple):
    """Memory of keys and values, and where in it each token's go."""

    keys: Tensor  # [slots, kv heads, dim], contiguous
    values: Tensor  # [slots, kv heads, dim], contiguous
    slots: Tensor  # int32 [tokens]; -1: nowhere


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, size: int, interleaved: bool) -> Tensor:
    """x [tokens, heads, dim] with its first `size` components turned; cos and sin [tokens, 1, size / 2].

    The pairs are (i, i + size / 2), or with `interleaved` (2i, 2i + 1).
    """
    turned = x[..., :size]
    if interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    else:
        low, high = turned.chunk(2, dim=-1)
        out = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return out if size == x.shape[-1] else torch.cat((out, x[..., size:]), dim=-1)


def rotate_qkv_reference(
    qkv: Tensor,  # [tokens, query heads + 2 · key heads, dim]
    heads: tuple[int, int],  # of queries, of keys
    cos: Tensor,  # [tokens, 1, size / 2]
    sin: Tensor,
    *,
    size: int,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normalised and turned, values as they are, each [tokens, heads, dim]."""
    queries, keys = heads
    if norms is None:  # both at once
        turned = rotate_reference(qkv[:, : queries + keys], cos, sin, size, interleaved)
        query, key = turned.split([queries, keys], dim=1)
        return query, key, qkv[:, queries + keys :]
    query, key, value = qkv.split([queries, keys, keys], dim=1)
    query = F.rms_norm(query, norms.query.shape, norms.query, norms.eps)
    key = F.rms_norm(key, norms.key.shape, norms.key, norms.eps)
    return (
        rotate_reference(query, cos, sin, size, interleaved),
        rotate_reference(key, cos, sin, size, interleaved),
        value,
    )


@jit(unspecialized=("positions", "slots"))
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
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    TURNED: tl.constexpr,
    TOTAL: tl.constexpr,  # with KEEP the heads of values come behind those that turn
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    parts: tl.constexpr = (TOTAL + HEADS - 1) // HEADS
    program = tl.program_id(0)
    token = program // parts
    head = (program % parts) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (head < TOTAL) & (pair < HALF)
    turned = inside & (head < TURNED)
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
        scale = tl.where(head < TURNED, scale, 1.0)
        is_query = inside & (head < QUERIES)
        is_key = turned & (head >= QUERIES)
        is_value = (head >= TURNED).to(tl.float32)
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
    tl.store(at + low, one, mask=turned)
    tl.store(at + high, two, mask=turned)
    if KEEP:
        slot = tl.load(slots + token).to(tl.int64)
        is_kept = turned & (head >= QUERIES) & (slot >= 0)
        into = keys + slot * ((TOTAL - TURNED) * DIM) + (head - QUERIES) * DIM
        tl.store(into + low, one, mask=is_kept)
        tl.store(into + high, two, mask=is_kept)
        is_kept = inside & (head >= TURNED) & (slot >= 0)
        into = values + slot * ((TOTAL - TURNED) * DIM) + (head - TURNED) * DIM
        tl.store(into + low, first.to(qkv.dtype.element_ty), mask=is_kept)
        tl.store(into + high, second.to(qkv.dtype.element_ty), mask=is_kept)


@lru_cache(maxsize=256)
def _rotate_of(
    total: int, queries: int, keys: int, dim: int, size: int, interleaved: bool, norm: bool, keep: bool
) -> tuple[Callable[..., Any], int]:
    """And how many programs share a token."""
    if (norm or keep) and size != dim:
        raise ValueError(f"head norms and memory need the whole head turned, not {size} of {dim} components")
    pairs = next_power_of_2(size // 2)
    heads = total if keep else queries + keys
    block = max(1, min(_ELEMENTS // pairs, next_power_of_2(heads)))
    given = 6 if norm else 4
    normed = (4, 5) if norm else (0, 0)
    kept = (given, given + 1, given + 2) if keep else (0, 0, 1)
    launch = bind(
        _rotate,
        (0, 1, 2, 3, *normed, *kept),
        WIDTH=total * dim,
        QUERIES=queries,
        TURNED=queries + keys,
        TOTAL=heads,
        DIM=dim,
        HALF=size // 2,
        HEADS=block,
        PAIRS=pairs,
        INTERLEAVED=interleaved,
        NORM=norm,
        KEEP=keep,
        num_warps=num_warps_for(2 * block * pairs),
    )
    return launch, cdiv(heads, block)


def rotate_qkv_(
    qkv: Tensor,  # [tokens, query heads + 2 · key heads, dim], contiguous
    heads: tuple[int, int],
    positions: Tensor,  # int32 [tokens]
    cos: Tensor,  # [limit, size / 2], of every position
    sin: Tensor,
    *,
    size: int,
    interleaved: bool = False,
    norms: HeadNorms | None = None,
    keep: KVCacheWrite | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, over `qkv` itself, with the tables of all positions. With norms, or where
    something is to be kept, whole heads turn."""
    tokens, total, dim = qkv.shape
    queries, keys = heads
    norm, kept = norms is not None, keep is not None
    launch, parts = _rotate_of(total, queries, keys, dim, size, interleaved, norm, kept)
    assert qkv.is_contiguous()
    if tokens:
        launch(
            tokens * parts,
            qkv,
            positions,
            cos,
            sin,
            *(() if norms is None else norms[:2]),
            *(() if keep is None else keep),
            0.0 if norms is None else norms.eps,
        )
    query, key, value = qkv.split_with_sizes((queries, keys, keys), 1)
    return query, key, value
