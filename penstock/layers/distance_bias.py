"""A bias on attention scores that depends on the distance of key and query alone: ALiBi, T5's buckets.

Kernels compute it from a few numbers a head. Library calls need it as a matrix, which is made for some of the
queries at a time: for a long row it would be larger than the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOG2E = 1.4426950408889634  # kernels work with powers of 2
MAX_BIASED_QUERIES = 512  # of a matrix at a time


class DistanceBias:
    """With `reach` 0, each head has a slope by which scores fall with the distance; otherwise a value for
    each distance from -reach to reach, and distances beyond count as these."""

    def __init__(self, values: Tensor, reach: int) -> None:
        self.values = values.float()  # [heads], or [heads, 2 · reach + 1]
        self.reach = reach
        self.kernel_values = (self.values * _LOG2E).contiguous()
        self._square: Tensor | None = None  # [heads, queries, keys]; shorter rows use its corner

    def matrix(self, first: int, stop: int, keys: int, dtype: torch.dtype) -> Tensor:
        """The bias of queries `first` to `stop` of a row on its leading keys, [heads, queries, keys]."""
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
    """A geometric series; of a number of heads that is no power of 2, the rest comes from between the steps
    of the next larger series."""
    power = 1 << (heads.bit_length() - 1)
    start = 2.0 ** -(2.0 ** -(math.log2(power) - 3))
    slopes = [start ** (n + 1) for n in range(power)]
    if power == heads:
        return slopes
    return [*slopes, *alibi_slopes(2 * power)[::2][: heads - power]]


def distance_bucket(distance: Tensor, buckets: int, max_distance: int = 128) -> Tensor:
    """Near distances have a bucket each, far ones share logarithmic buckets. The sign selects the half."""
    half = buckets // 2
    side = (distance > 0).long() * half
    distance = distance.abs()
    exact = half // 2
    far = exact + (
        torch.log(distance.float().clamp_min(1) / exact) / math.log(max_distance / exact) * (half - exact)
    ).long().clamp_max(half - 1 - exact)
    return side + torch.where(distance < exact, distance, far)
