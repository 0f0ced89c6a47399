"""Disentangled attention: scores of content with content, content with distance, distance with content.

Both distance terms are looked up by i − j, so they are computed against the few table rows that a
length can reach and gathered into a bias, over rows of equal length at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.layers.batch import Batch

_MOST_SCORES = 1 << 26  # held at a time; a larger group is taken in pieces


class Distances:
    """Which row of a table of 2 · span rows stands for the distance i − j of two tokens.

    Near distances have a row each. With `buckets`, far ones share rows by their logarithm.
    """

    KEPT = 32  # lengths

    def __init__(self, span: int, limit: int, device: torch.device, *, buckets: int, furthest: int) -> None:
        away = torch.arange(limit)
        if buckets > 0:
            away = log_bucket(away, buckets, furthest)
        self.ahead = away.clamp_max(span).tolist()  # of every distance to a later token, on the CPU
        self.behind = away.clamp_max(span - 1).tolist()
        self.span = span
        self.device = device
        self._signed = torch.tensor([-x for x in self.ahead[:0:-1]] + self.behind, device=device)
        self._by_length: dict[int, Tensor] = {}

    def rows(self, length: int) -> slice:
        """The part of the table that rows of this length reach."""
        return slice(self.span - self.ahead[length - 1], self.span + self.behind[length - 1] + 1)

    def index(self, length: int) -> Tensor:
        """[length, length], into that part."""
        if length not in self._by_length:
            if len(self._by_length) >= self.KEPT:
                self._by_length.pop(next(iter(self._by_length)))
            place = torch.arange(length, device=self.device)
            apart = place[:, None] - place[None, :] + len(self.ahead) - 1
            self._by_length[length] = self._signed[apart] + self.ahead[length - 1]
        return self._by_length[length]


def log_bucket(away: Tensor, buckets: int, furthest: int) -> Tensor:
    """Distances up to half the buckets stay; those up to `furthest` are spread over the other half."""
    half = buckets // 2
    stretch = torch.log(away.clamp_min(1) / half) / torch.log(torch.tensor((furthest - 1) / half))
    return torch.where(away <= half, away, (torch.ceil(stretch * (half - 1)) + half).long())


@dataclass(frozen=True, slots=True, eq=False)
class DistanceTerms:
    """A layer's projections of the distance table; None for a term that the model has not."""

    distances: Distances
    key: Tensor | None  # [heads, 2 · span, dim], met by queries
    query: Tensor | None  # [heads, 2 · span, dim], met by keys


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
        most = max(1, _MOST_SCORES // (heads * length * length))
        for row in range(0, group.num_rows, most):
            rows = min(most, group.num_rows - row)
            first = group.first_token + row * length
            stop = first + rows * length
            q, k, v = (
                x[first:stop].view(rows, length, heads, dim).transpose(1, 2) for x in (query, key, value)
            )
            bias = distance_bias(q, k, terms) * scale
            if group.key_limit:
                k, v, bias = (
                    k[:, :, : group.key_limit],
                    v[:, :, : group.key_limit],
                    bias[..., : group.key_limit],
                )
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            out[first:stop].view(rows, length, heads, dim).copy_(context.transpose(1, 2))
    return out


def distance_bias(query: Tensor, key: Tensor, terms: DistanceTerms) -> Tensor:
    """[rows, heads, length, length] from query and key [rows, heads, length, dim]."""
    rows, heads, length, _ = query.shape
    part, index = terms.distances.rows(length), terms.distances.index(length)
    shape = (rows, heads, length, length)
    bias = torch.zeros((), dtype=query.dtype, device=query.device)
    if terms.key is not None:
        met = query @ terms.key[:, part].transpose(-1, -2)  # [rows, heads, length, reached]
        bias = bias + met.gather(-1, index.expand(shape))
    if terms.query is not None:
        met = key @ terms.query[:, part].transpose(-1, -2)
        bias = bias + met.gather(-1, index.T.expand(shape)).transpose(-1, -2)
    return bias


def disentangled_scale(dim: int, terms: int) -> float:
    """One over the root of the head size times the number of terms that are added up."""
    return 1.0 / math.sqrt(dim * terms)
