"""Biases on attention scores that depend only on the distance of key and query: ALiBi, T5's buckets.

Kernels compute a bias from a few numbers per head. Library calls need it as a matrix, which is made for a
part of the queries at a time, because for a long row it would be larger than the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOG2E = 1.4426950408889634  # kernels compute exp2 instead of exp
MAX_BIASED_QUERIES = 512  # maximum queries of a matrix


class DistanceBias:
    """With `reach` 0, each head has a slope, by which scores fall with the distance.

    Otherwise each head has a value for each distance from -reach to reach, and larger distances use the
    outermost values.
    """

    def __init__(self, values: Tensor, reach: int) -> None:
        self.values = values.float()  # [heads], or [heads, 2 · reach + 1]
        self.reach = reach
        self.kernel_values = (self.values * _LOG2E).contiguous()
        self._square: Tensor | None = None  # [heads, queries, keys]; shorter rows use its top-left part

    def matrix(self, first: int, stop: int, keys: int, dtype: torch.dtype) -> Tensor:
        """The bias for queries `first` to `stop` of a row and its leading keys, [heads, queries, keys]."""
        size = max(stop, keys)
        if size > MAX_BIASED_QUERIES:
            return self._make(first, stop, keys).to(dtype)
        square = self._square
        if square is None or square.shape[1] < size or square.dtype != dtype:
            square = self._square = self._make(0, size, size).to(dtype)
        return square[:, first:stop, :keys]

    def _make(self, first: int, stop: int, keys: int) -> Tensor:
        device = self.values.device
        ahead = torch.arange(keys, device=device)[None] - torch.arange(first, stop, device=device)[:, None]
        if not self.reach:
            return -self.values[:, None, None] * ahead.abs()
        return self.values[:, ahead.clamp(-self.reach, self.reach) + self.reach]


def alibi_slopes(heads: int) -> Sequence[float]:
    """ALiBi's slopes: a geometric series for a power of 2 of heads.

    For other numbers of heads, the remaining slopes are every second value of the next larger series.
    """
    power = 1 << (heads.bit_length() - 1)
    start = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [start ** (n + 1) for n in range(power)]
    if power == heads:
        return slopes
    return [*slopes, *alibi_slopes(2 * power)[::2][: heads - power]]


def distance_bucket(distance: Tensor, buckets: int, max_distance: int = 128) -> Tensor:
    """T5's bucket of each distance: near ones have their own, far ones share logarithmic buckets.

    The sign selects the half of the buckets.
    """
    half = buckets // 2
    side = (distance > 0).long() * half
    distance = distance.abs()
    exact = half // 2
    far = exact + (
        torch.log(distance.float().clamp_min(1) / exact) / math.log(max_distance / exact) * (half - exact)
    ).long().clamp_max(half - 1 - exact)
    return side + torch.where(distance < exact, distance, far)
