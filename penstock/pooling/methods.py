"""Pooling methods: from the hidden states of a ragged run to one vector a row, summed in fp32.

A method is one function (hidden [tokens, width], batch) → [rows, width] and one line in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.layers.batch import Batch

Method = Callable[[Tensor, Batch], Tensor]


def cls(hidden: Tensor, batch: Batch) -> Tensor:
    first = batch.cu_lengths[:-1]
    if batch.skip is not None:
        first = first + torch.minimum(batch.skip, batch.lengths - 1)
    return hidden.index_select(0, first).float()


def last(hidden: Tensor, batch: Batch) -> Tensor:
    return hidden.index_select(0, batch.cu_lengths[1:] - 1).float()


def mean(hidden: Tensor, batch: Batch) -> Tensor:
    return _sum(hidden, batch) / _counted(batch)


def mean_sqrt_len(hidden: Tensor, batch: Batch) -> Tensor:
    return _sum(hidden, batch) / _counted(batch).sqrt()


def weighted_mean(hidden: Tensor, batch: Batch) -> Tensor:
    """Later tokens weigh more: the token at place i (from 1) weighs i."""
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


CARRIED = ("mean", "mean_sqrt_len")  # methods that sum up over the chunks of a row

METHODS: dict[str, Method] = {
    "cls": cls,
    "last": last,
    "mean": mean,
    "mean_sqrt_len": mean_sqrt_len,
    "weighted_mean": weighted_mean,
    "max": maximum,
}


def _sum(hidden: Tensor, batch: Batch) -> Tensor:
    values = hidden.float()
    if (keep := _kept(batch)) is not None:
        values = values * keep[:, None]
    sums = _segments(values, batch, "sum")
    return sums if batch.memory is None else batch.memory.carry(sums)


def _counted(batch: Batch) -> Tensor:
    lengths = batch.totals if batch.skip is None else batch.totals - batch.skip
    return lengths.clamp_min(1).float()[:, None]


def _kept(batch: Batch) -> Tensor | None:
    """Which tokens take part, [tokens]; None means all."""
    if batch.skip is None:
        return None
    return batch.positions >= batch.skip.repeat_interleave(batch.lengths, output_size=batch.num_tokens)


def _segments(values: Tensor, batch: Batch, reduce: str) -> Tensor:
    return torch.segment_reduce(values, reduce, offsets=batch.cu_lengths, axis=0, unsafe=True)
