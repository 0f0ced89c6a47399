"""Gather, add and normalise the embeddings of words, positions and token types in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import bind, jit, next_power_of_2, num_warps_for, tl, wait_for_inputs


def embed_reference(
    ids: Tensor,  # int32 [tokens]
    words: Tensor,  # [vocabulary, width]
    positions: Tensor,  # int32 [tokens]
    position_table: Tensor | None,  # [limit, width]
    types: Tensor | None,  # int32 [tokens]; None: all zero
    type_table: Tensor | None,  # [types, width]
    norm: tuple[Tensor, Tensor | None, float] | None,  # LayerNorm's weight, bias and epsilon
) -> Tensor:
    """The normalised sum of the embeddings, [tokens, width]."""
    out = F.embedding(ids, words)
    if position_table is not None:
        out.add_(F.embedding(positions, position_table))
    if type_table is not None:
        out.add_(type_table[0] if types is None else F.embedding(types, type_table))
    if norm is None:
        return out
    weight, bias, eps = norm
    return F.layer_norm(out, weight.shape, weight, bias, eps)


@jit(unspecialized=("ids", "positions", "types"), overlaps=True)
def _embed(
    ids: tl.tensor,
    words: tl.tensor,
    positions: tl.tensor,
    position_table: tl.tensor,
    types: tl.tensor,
    type_table: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    TYPES: tl.constexpr,  # 0: no table, 1: all tokens have type 0, 2: types are given
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    wait_for_inputs()
    token = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    word = tl.load(ids + token).to(tl.int64)
    value = tl.load(words + word * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    if POSITIONS:
        place = tl.load(positions + token).to(tl.int64)
        value += tl.load(position_table + place * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    if TYPES == 1:
        value += tl.load(type_table + cols, mask=inside, other=0.0).to(tl.float32)
    if TYPES == 2:
        kind = tl.load(types + token).to(tl.int64)
        value += tl.load(type_table + kind * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(value, axis=0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
        value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            value += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * WIDTH + cols, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def _bound_embed(width: int, positions: bool, types: int, norm: bool, bias: bool) -> Callable[..., Any]:
    block = next_power_of_2(width)
    return bind(
        _embed,
        WIDTH=width,
        BLOCK=block,
        POSITIONS=positions,
        TYPES=types,
        NORM=norm,
        BIAS=bias,
        num_warps=num_warps_for(block),
    )


def embed(
    ids: Tensor,
    words: Tensor,
    positions: Tensor,
    position_table: Tensor | None,
    types: Tensor | None,
    type_table: Tensor | None,
    norm: tuple[Tensor, Tensor | None, float] | None,
) -> Tensor:
    """Compute `embed_reference`; all tables are contiguous."""
    tokens, width = len(ids), words.shape[1]
    out = torch.empty((tokens, width), dtype=words.dtype, device=words.device)
    weight, bias, eps = norm or (words, None, 0.0)
    kinds = 0 if type_table is None else 1 if types is None else 2
    if tokens:
        launch = _bound_embed(width, position_table is not None, kinds, norm is not None, bias is not None)
        launch(
            tokens,
            ids,
            words,
            positions,
            words if position_table is None else position_table,
            ids if types is None else types,
            words if type_table is None else type_table,
            weight,
            words if bias is None else bias,
            out,
            eps,
        )
    return out
