"""Keys of CUDA graphs of pooling steps and of prompt chunks: the steps that a graph can replay."""

from __future__ import annotations

from typing import NamedTuple

from penstock.runner.buckets import FREE_TILES, Bucket, num_tiles
from penstock.types import PoolingParams

_MAX_TILE_WASTE = 2  # tiles of a larger graph, as a multiple of those of the step's own bucket


class Key(NamedTuple):
    """The steps that one graph can replay. It pools with `params`; None: the graph ends with the model."""

    bucket: Bucket
    has_types: bool
    has_skip: bool
    params: PoolingParams | None
    max_cached_keys: int | None = None  # None: the step does not use the KV cache
    is_prompt: bool = False  # the graph runs prompt chunks and ends with the model
    adapter_rank: int = 0  # the bucket of its adapters' ranks; 0: the step has none
    tile_slots: int = 0  # see `slots_per_tile`; 0: the step has no adapters

    def serves(self, other: Key) -> bool:
        """Whether this key's graph can replay the steps of another key. The caller decides whether the
        padding tokens are worth it."""
        if (self.max_cached_keys is None) != (other.max_cached_keys is None):
            return False
        fits = all(size >= needed for size, needed in zip(self.bucket, other.bucket, strict=True))
        fits = fits and (self.max_cached_keys or 0) >= (other.max_cached_keys or 0)
        fits = fits and self.has_types >= other.has_types and self.has_skip >= other.has_skip  # absent: zeros
        same = (self.params, self.is_prompt) == (other.params, other.is_prompt)
        same = same and (self.adapter_rank, self.tile_slots) == (other.adapter_rank, other.tile_slots)
        max_tiles = max(FREE_TILES, _MAX_TILE_WASTE * num_tiles(other.bucket))
        return fits and same and num_tiles(self.bucket) <= max_tiles
