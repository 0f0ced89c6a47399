"""Disentangled attention: content–content, content–distance and distance–content scores.

Both distance terms depend only on i − j. They are computed for the few table rows that a length can reach,
and gathered into a bias for all rows of equal length at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.layers.batch import Batch
from penstock.layers.cpu_shapes import zero_padding

_MAX_SCORES = 1 << 26  # maximum number in memory at a time; a larger group is split


class Distances:
    """Maps the distance i − j of two tokens to a row of a table with 2 · span rows.

    Each near distance has its own row. With `buckets`, far distances share rows on a logarithmic scale.
    """

    MAX_CACHED_LENGTHS = 32

    def __init__(
        self, span: int, max_length: int, device: torch.device, *, buckets: int, max_distance: int
    ) -> None:
        distances = torch.arange(max_length)
        if buckets > 0:
            distances = log_bucket(distances, buckets, max_distance)
        # Row offsets by distance to a later or earlier token, on the CPU.
        self.to_later = distances.clamp_max(span).tolist()
        self.to_earlier = distances.clamp_max(span - 1).tolist()
        self.span = span
        self.device = device
        self._signed = torch.tensor([-x for x in self.to_later[:0:-1]] + self.to_earlier, device=device)
        self._by_length: dict[int, Tensor] = {}

    def rows(self, length: int) -> slice:
        """The part of the table that rows of this length reach."""
        return slice(self.span - self.to_later[length - 1], self.span + self.to_earlier[length - 1] + 1)

    def index(self, length: int) -> Tensor:
        """Indices into that part, [length, length]."""
        if length not in self._by_length:
            if len(self._by_length) >= self.MAX_CACHED_LENGTHS:
                self._by_length.pop(next(iter(self._by_length)))
            position = torch.arange(length, device=self.device)
            distance = position[:, None] - position[None, :] + len(self.to_later) - 1
            self._by_length[length] = self._signed[distance] + self.to_later[length - 1]
        return self._by_length[length]


def log_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Keep distances up to half the buckets; spread those up to `max_distance` over the other half."""
    half = buckets // 2
    stretch = torch.log(distance.clamp_min(1) / half) / torch.log(torch.tensor((max_distance - 1) / half))
    return torch.where(distance <= half, distance, (torch.ceil(stretch * (half - 1)) + half).long())


@dataclass(frozen=True, slots=True, eq=False)
class DistanceTerms:
    """A layer's projections of the distance table; None for a term that the model lacks."""

    distances: Distances
    key: Tensor | None  # [heads, 2 · span, dim], multiplied by queries
    query: Tensor | None  # [heads, 2 · span, dim], multiplied by keys
    of_row: Tensor | None = None  # int64 [rows], index of each row's projections, if adapters change them

    def of_rows(self, first: int, count: int) -> DistanceTerms:
        """Select the projections of some rows."""
        if self.of_row is None:
            return self
        own = self.of_row[first : first + count]
        key, query = (None if x is None else x.index_select(0, own) for x in (self.key, self.query))
        return DistanceTerms(self.distances, key, query)


def attend_disentangled(
    query: Tensor,  # [tokens, heads, dim]
    key: Tensor,
    value: Tensor,
    batch: Batch,
    terms: DistanceTerms,
    scale: float,
) -> Tensor:
    """Attention within each row → [tokens, heads · dim]."""
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, heads * dim), dtype=query.dtype, device=query.device)
    for group in batch.groups:
        length = group.length
        max_rows = max(1, _MAX_SCORES // (heads * length * length))
        for row in range(0, group.num_rows, max_rows):
            rows = min(max_rows, group.num_rows - row)
            first = group.first_token + row * length
            stop = first + rows * length
            q, k, v = (
                x[first:stop].view(rows, length, heads, dim).transpose(1, 2) for x in (query, key, value)
            )
            bias = distance_bias(q, k, terms.of_rows(group.first_row + row, rows)) * scale
            if group.key_limit:
                k, v, bias = (
                    k[:, :, : group.key_limit],
                    v[:, :, : group.key_limit],
                    bias[..., : group.key_limit],
                )
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            out[first:stop].view(rows, length, heads, dim).copy_(context.transpose(1, 2))
    return zero_padding(out, batch.groups)


def distance_bias(query: Tensor, key: Tensor, terms: DistanceTerms) -> Tensor:
    """The bias [rows, heads, length, length] for query and key [rows, heads, length, dim]."""
    rows, heads, length, _ = query.shape
    part, index = terms.distances.rows(length), terms.distances.index(length)
    shape = (rows, heads, length, length)
    bias = torch.zeros((), dtype=query.dtype, device=query.device)
    if terms.key is not None:
        scores = query @ terms.key[..., part, :].transpose(-1, -2)  # [rows, heads, length, reached]
        bias = bias + scores.gather(-1, index.expand(shape))
    if terms.query is not None:
        scores = key @ terms.query[..., part, :].transpose(-1, -2)
        bias = bias + scores.gather(-1, index.T.expand(shape)).transpose(-1, -2)
    return bias


def disentangled_scale(dim: int, terms: int) -> float:
    """1 / sqrt(head size · number of terms in the sum)."""
    return 1.0 / math.sqrt(dim * terms)
