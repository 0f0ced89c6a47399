"""SPLADE pooling: token logits to one weight per row and vocabulary entry, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import cdiv, jit, tl

_BLOCK, _TILE = 256, 16


def log1p_relu(logits: Tensor, logs: int) -> Tensor:
    """log(1 + relu(logit)) in fp32, with the logarithm applied `logs` times. Increases with the logit."""
    weights = logits.float().relu()
    for _ in range(logs):
        weights = weights.log1p()
    return weights


def splade_pool_reference(logits: Tensor, cu_lengths: Tensor, *, logs: int, reduce: str) -> Tensor:
    """The maximum or the sum of the weights of each row's tokens, fp32 [rows, vocabulary]."""
    rows = []
    for begin, end in zip(cu_lengths[:-1].tolist(), cu_lengths[1:].tolist(), strict=True):
        weights = log1p_relu(logits[begin:end], logs)
        rows.append(weights.amax(dim=0) if reduce == "max" else weights.sum(dim=0))
    return torch.stack(rows)


@jit()
def _log1p_relu(x: tl.tensor, LOGS: tl.constexpr) -> tl.tensor:
    x = tl.maximum(x, 0.0)
    for _ in tl.static_range(LOGS):  # log(1 + x), exact even where 1 + x rounds to 1
        grown = 1.0 + x
        x = tl.where(grown == 1.0, x, tl.log(grown) * (x / (grown - 1.0)))
    return x


@jit(unspecialized=("cu_lengths", "first"))
def _splade_pool(
    logits: tl.tensor,
    cu_lengths: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    LOGS: tl.constexpr,
    SUM: tl.constexpr,
) -> None:
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = program // parts
    cols = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    begin = tl.load(cu_lengths + row) - first
    end = tl.load(cu_lengths + row + 1) - first
    partial = tl.zeros([TILE, BLOCK], tl.float32)  # the smallest weight is 0
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        at = tokens.to(tl.int64)[:, None] * WIDTH + cols[None, :]
        taken = (tokens < end)[:, None] & inside[None, :]
        tile = tl.load(logits + at, mask=taken, other=0.0).to(tl.float32)
        if SUM:
            partial += _log1p_relu(tile, LOGS)
        else:
            partial = tl.maximum(partial, tile)
    if SUM:
        value = tl.sum(partial, axis=0)
    else:
        value = _log1p_relu(tl.max(partial, axis=0), LOGS)
    tl.store(out + row.to(tl.int64) * WIDTH + cols, value, mask=inside)


def splade_pool(
    logits: Tensor, cu_lengths: Tensor, *, logs: int, reduce: str, first_token: int = 0
) -> Tensor:
    """Compute `splade_pool_reference`; `logits` is contiguous.

    Row 0 of `logits` is token `first_token` of the batch that `cu_lengths` describes.
    """
    rows, width = len(cu_lengths) - 1, logits.shape[1]
    out = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    if rows:
        _splade_pool[(rows * cdiv(width, _BLOCK),)](
            logits,
            cu_lengths,
            out,
            first_token,
            WIDTH=width,
            BLOCK=_BLOCK,
            TILE=_TILE,
            LOGS=logs,
            SUM=reduce == "sum",
            num_warps=4,
        )
    return out
