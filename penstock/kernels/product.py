"""A matrix product whose bias and activation are applied while a tile is still in registers.

The matrix library knows only the tanh form of GELU as an epilogue. Where the exact one is wanted, this
saves a pass over the widest activation of a model, if the product itself keeps up with the library's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import KINDS, _activated, bias_act_reference
from penstock.kernels.language import cdiv, jit, tl


class Tiles(NamedTuple):
    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 8  # row tiles that share column tiles of the weight in the cache
    warps: int = 8
    stages: int = 3


TILES = Tiles()


def linear_act_reference(x: Tensor, weight: Tensor, bias: Tensor, act: str) -> Tensor:
    """act(x Wᵀ + b), [tokens, out]."""
    return bias_act_reference(F.linear(x, weight), bias, act)


@jit(loose=("tokens",))
def _linear_act(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    across: tl.constexpr = OUT // COLUMNS
    program = tl.program_id(0)
    down = tl.cdiv(tokens, ROWS)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    tile = group * GROUP + (program % (GROUP * across)) % height
    column = (program % (GROUP * across)) // height
    token = tile * ROWS + tl.arange(0, ROWS)
    cols = column * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    # Rows beyond the end read the last one; only their results are left out.
    row = tl.minimum(token, tokens - 1).to(tl.int64)
    x_at = x + row[:, None] * IN + deep[None, :]
    weight_at = weight + cols[None, :] * IN + deep[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, IN, DEPTH):
        total = tl.dot(tl.load(x_at), tl.load(weight_at), total)
        x_at += DEPTH
        weight_at += DEPTH
    total += tl.load(bias + cols).to(tl.float32)[None, :]
    value = _activated(total, KIND).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * OUT + cols[None, :], value, mask=token[:, None] < tokens)


def fits(weight: Tensor, tiles: Tiles = TILES) -> bool:
    """Whether whole tiles cover this weight."""
    out, size = weight.shape
    return out % tiles.columns == 0 and size % tiles.depth == 0


def linear_act(x: Tensor, weight: Tensor, bias: Tensor, act: str, tiles: Tiles = TILES) -> Tensor:
    """As the reference; all contiguous, and the weight such that it `fits`."""
    tokens, width = x.shape
    outputs = weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and fits(weight, tiles)
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    if tokens:
        _linear_act[(cdiv(tokens, tiles.rows) * (outputs // tiles.columns),)](
            x,
            weight,
            bias,
            out,
            tokens,
            OUT=outputs,
            IN=width,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            DEPTH=tiles.depth,
            GROUP=tiles.group,
            KIND=KINDS[act],
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out
