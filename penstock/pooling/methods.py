"""Pooling methods: from the hidden states of a ragged batch to one vector per row, summed in fp32.

A method is one function (hidden [tokens, width], batch) → [rows, width] and one entry of the table here. On
CUDA a kernel does the same in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels import pooling as kernel
from penstock.kernels.language import use_kernel
from penstock.layers.batch import Batch
from penstock.types import Ints, PoolPlan

Method = Callable[[Tensor, Batch], Tensor]


def cls(hidden: Tensor, batch: Batch) -> Tensor:
    first = batch.cu_lengths[:-1]
    if batch.skip is not None:
        first = first + torch.minimum(batch.skip, batch.lengths - 1)
    return hidden.index_select(0, first).float()


def last(hidden: Tensor, batch: Batch) -> Tensor:
    tokens = (batch.cu_lengths[1:] - 1).clamp_min(0)  # a graph is captured with empty rows in front
    return hidden.index_select(0, tokens).float()


def mean(hidden: Tensor, batch: Batch) -> Tensor:
    return _sum(hidden, batch) / _counted(batch)


def mean_sqrt_len(hidden: Tensor, batch: Batch) -> Tensor:
    return _sum(hidden, batch) / _counted(batch).sqrt()


def weighted_mean(hidden: Tensor, batch: Batch) -> Tensor:
    """The mean weighted by position: the token at position i (from 1) has weight i."""
    weights = (batch.positions + 1).float()
    if (keep := _kept(batch)) is not None:
        weights = weights * keep
    total = _segments(weights[:, None], batch, "sum").clamp_min(1e-9)
    return _segments(hidden.float() * weights[:, None], batch, "sum") / total


def maximum(hidden: Tensor, batch: Batch) -> Tensor:
    values = hidden.float()
    if (keep := _kept(batch)) is not None:
        values = values.masked_fill(~keep[:, None], float("-inf"))
    return _segments(values, batch, "max")


CARRIED = ("mean", "mean_sqrt_len")  # methods that keep running sums over the chunks of a row


class ReadTokens(NamedTuple):
    """The tokens that a pooling method reads."""

    tokens: Ints  # row by row
    counts: Ints  # [rows], number of these tokens in each row


def read_tokens(method: str, plan: PoolPlan) -> ReadTokens | None:
    """The tokens of whole rows that a method reads; None: all tokens.

    A method that weighs tokens by position always reads all.
    """
    begins, ends, skip = plan.cu_lengths[:-1], plan.cu_lengths[1:], plan.skip
    if method == "last":
        return ReadTokens(ends - 1, np.ones_like(begins))
    if method == "cls":
        first = begins if skip is None else np.minimum(begins + skip, ends - 1)
        return ReadTokens(first, np.ones_like(begins))
    if method == "weighted_mean" or skip is None:
        return None
    kept = np.maximum(plan.lengths - skip, 0)
    if method == "max" and not kept.all():
        return None
    tokens = np.flatnonzero(plan.positions >= np.repeat(skip, plan.lengths)).astype(np.int32)
    return ReadTokens(tokens, kept)


def pool(
    method: str,
    hidden: Tensor,
    batch: Batch,
    *,
    rows: Tensor | None = None,
    dims: int | None = None,
    normalize: bool = False,
) -> Tensor:
    """Pool with the kernel, which also selects rows (int32), truncates to `dims` and normalises."""
    return kernel.pool(
        hidden.contiguous(),
        batch.cu_lengths,
        method,
        max_length=batch.max_length,
        skip=batch.skip,
        chosen=rows,
        dims=dims,
        normalize=normalize,
    )


def has_kernel(hidden: Tensor, batch: Batch) -> bool:
    """Whether a kernel can pool this batch. Running sums need the torch form."""
    return batch.kv is None and use_kernel(hidden)


def _routed(name: str, plain: Method) -> Method:
    def method(hidden: Tensor, batch: Batch) -> Tensor:
        return pool(name, hidden, batch) if has_kernel(hidden, batch) else plain(hidden, batch)

    return method


_PLAIN: dict[str, Method] = {
    "cls": cls,
    "last": last,
    "mean": mean,
    "mean_sqrt_len": mean_sqrt_len,
    "weighted_mean": weighted_mean,
    "max": maximum,
}
METHODS = {name: _routed(name, plain) for name, plain in _PLAIN.items()}


def _sum(hidden: Tensor, batch: Batch) -> Tensor:
    values = hidden.float()
    if (keep := _kept(batch)) is not None:
        values = values * keep[:, None]
    sums = _segments(values, batch, "sum")
    return sums if batch.kv is None or batch.kv.carry is None else batch.kv.carry.add(sums)


def _counted(batch: Batch) -> Tensor:
    lengths = batch.total_lengths if batch.skip is None else batch.total_lengths - batch.skip
    return lengths.clamp_min(1).float()[:, None]


def _kept(batch: Batch) -> Tensor | None:
    """Whether each token is pooled, [tokens]; None: all are."""
    if batch.skip is None:
        return None
    return batch.positions >= batch.skip.repeat_interleave(batch.lengths, output_size=batch.num_tokens)


def _segments(values: Tensor, batch: Batch, reduce: str) -> Tensor:
    return torch.segment_reduce(values, reduce, offsets=batch.cu_lengths, axis=0, unsafe=True)
