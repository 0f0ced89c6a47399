"""The few shapes that steps are padded to for CUDA graphs, and the layout of their integers.

A graph is captured for one shape and replayed for every step that fits it. Padding rows are empty, and
padding tokens belong to no row, so nothing reads what is computed for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.kernels.lora import tile_lines_for
from penstock.layers.adapter_lines import LinePlan, max_tiles
from penstock.types import Ints, KVPlan, LengthGroup, PoolPlan, StepPlan

# A small product takes as long as one with twice the tokens. A large one does not: large sizes are closer.
TOKENS = (
    *(16, 32, 64, 128, 256),
    *range(384, 1025, 128),
    *range(1280, 4097, 256),
    *range(4608, 8193, 512),
    *range(9216, 16385, 1024),
)
ROWS = (1, 4, 16, 64, 128, 256, 512, 1024)
# Up to the first size, attention holds all scores of a row in registers, so smaller sizes would gain nothing.
MAX_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CACHED_KEYS = (4096, 16384, 65536)  # keys that all rows of a step read from the KV cache
_TILE = 64  # tokens; attention splits rows between programs in tiles of this size
FREE_TILES = 512  # up to this many tiles, empty ones cost no time
# Measured: this many tiles take less than a fifth of the time of a step of 2,048 tokens. Launching the
# kernels of such a step eagerly takes longer than the step itself.
_MAX_TILES = 2048


class Bucket(NamedTuple):
    tokens: int
    rows: int
    max_length: int  # tokens of the longest row


def bucket_of(tokens: int, rows: int, max_length: int) -> Bucket | None:
    """The smallest bucket that holds a step of this shape. None: it is too large, or its lengths differ so
    much that most of attention's programs would have no work."""
    if tokens > TOKENS[-1] or rows > ROWS[-1] or not rows:
        return None
    size = TOKENS[bisect_left(TOKENS, tokens)]
    count = min(ROWS[bisect_left(ROWS, rows)], size)
    length = size if rows == 1 else min(_padded_length(count, max_length), size)
    bucket = Bucket(size, count, length)
    return bucket if num_tiles(bucket) <= max(_MAX_TILES, 4 * (size // _TILE + count)) else None


def _padded_length(rows: int, max_length: int) -> int:
    """The bucket's length for the longest row. For longer rows it is the largest length without extra cost,
    so that steps with different longest rows share a graph."""
    length = MAX_LENGTHS[bisect_left(MAX_LENGTHS, max_length)]
    free = FREE_TILES // rows * _TILE
    return length if length == MAX_LENGTHS[0] else max(length, min(free, MAX_LENGTHS[-1]))


def num_tiles(bucket: Bucket) -> int:
    """Number of attention programs for each head."""
    return bucket.rows * -(-bucket.max_length // _TILE)


def cached_keys_of(num_cached: int) -> int | None:
    """The smallest bucket for the keys that a step reads from the KV cache. None: there are too many."""
    at = bisect_left(CACHED_KEYS, num_cached)
    return CACHED_KEYS[at] if at < len(CACHED_KEYS) else None


class NotCapturable(RuntimeError):
    """The model needs more of a step than its bucket, so it cannot be captured."""


class NoGroups(tuple[LengthGroup, ...]):
    """Placeholder for length groups, which are unknown when a graph is captured. Code that iterates over
    them cannot be captured."""

    def __iter__(self) -> Iterator[LengthGroup]:
        raise NotCapturable("the model processes rows of equal length group by group")


class BufferSpace:
    """Hands out consecutive parts of one buffer of integers, each at a multiple of 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, count: int) -> slice:
        begin = self.size
        self.size += -(-count // 4) * 4
        return slice(begin, begin + count)


@dataclass(frozen=True, slots=True, eq=False)
class KVLayout:
    """The part of a layout for a step that uses the KV cache."""

    cu_keys: slice
    token_slots: slice
    read_slots: slice
    max_cached_keys: int

    def write(self, out: Ints, kv: KVPlan) -> None:
        fill(out[self.cu_keys], kv.cu_keys, padding=int(kv.cu_keys[-1]))
        fill(out[self.token_slots], kv.token_slots, padding=-1)
        fill(out[self.read_slots], kv.read_slots)


@dataclass(frozen=True, slots=True, eq=False)
class LineLayout:
    """Offsets of the adapters of a step's lines (tokens or rows), with room for a bucket of lines."""

    slots: slice
    order: slice
    tiles: slice
    tile_lines: int

    @classmethod
    def of(cls, space: BufferSpace, lines: int, num_slots: int) -> LineLayout:
        slots, order = space.take(lines), space.take(lines)
        return cls(slots, order, space.take(3 * max_tiles(lines, num_slots)), tile_lines_for(lines))

    def write(self, out: Ints, lines: LinePlan) -> None:
        """Write the adapters of lines. Padding lines are in no tile, so no adapter changes them."""
        fill(out[self.slots], lines.slots, padding=-1)
        fill(out[self.order], lines.order)
        fill(out[self.tiles], lines.tiles)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayout:
    """The part of a layout for a step with adapters."""

    tokens: LineLayout
    rows: LineLayout

    @classmethod
    def of(cls, space: BufferSpace, bucket: Bucket, num_slots: int) -> AdapterLayout:
        tokens = LineLayout.of(space, bucket.tokens, num_slots)
        return cls(tokens, LineLayout.of(space, bucket.rows, num_slots))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Offsets of a step's arrays in one buffer of integers, each with room for the bucket."""

    bucket: Bucket
    cu_lengths: slice
    lengths: slice
    token_ids: slice
    positions: slice
    type_ids: slice | None
    skip: slice | None
    kv: KVLayout | None  # None: the step does not use the KV cache
    adapters: AdapterLayout | None  # None: the step has no adapters
    size: int

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        *,
        has_types: bool,
        has_skip: bool,
        max_cached_keys: int | None = None,
        num_slots: int = 0,
    ) -> Layout:
        """`num_slots`: adapter slots; 0: the step has no adapters."""
        tokens, rows, _ = bucket
        space = BufferSpace()
        cu_lengths, lengths = space.take(rows + 1), space.take(rows)
        token_ids, positions = space.take(tokens), space.take(tokens)
        type_ids = space.take(tokens) if has_types else None
        skip = space.take(rows) if has_skip else None
        kv = None
        if max_cached_keys is not None:
            cu_keys, token_slots = space.take(rows + 1), space.take(tokens)
            kv = KVLayout(cu_keys, token_slots, space.take(max_cached_keys), max_cached_keys)
        adapters = AdapterLayout.of(space, bucket, num_slots) if num_slots else None
        return cls(
            bucket, cu_lengths, lengths, token_ids, positions, type_ids, skip, kv, adapters, space.size
        )

    def write(self, out: Ints, plan: StepPlan) -> None:
        """Write the step's integers, with padding after each array: rows without tokens, and tokens with id 0
        at position 0 that are not written to the KV cache."""
        fill(out[self.cu_lengths], plan.cu_lengths, padding=int(plan.cu_lengths[-1]))
        fill(out[self.lengths], plan.lengths)
        fill(out[self.token_ids], plan.token_ids)
        fill(out[self.positions], plan.positions)
        if isinstance(plan, PoolPlan):
            if self.type_ids is not None:
                fill(out[self.type_ids], plan.type_ids)
            if self.skip is not None:
                fill(out[self.skip], plan.skip)
        if self.kv is not None and plan.kv is not None:
            self.kv.write(out, plan.kv)


def fill(part: Ints, array: Ints | None, padding: int = 0) -> None:
    if array is None:  # the graph has this input, but the step does not
        part[:] = 0
        return
    part[: len(array)] = array
    part[len(array) :] = padding


def bucket_size(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest size that is enough; the largest if none is."""
    return sizes[min(bisect_left(sizes, needed), len(sizes) - 1)]


def max_layout_size(num_slots: int = 0) -> int:
    """The size of the largest layout."""
    bucket = Bucket(TOKENS[-1], ROWS[-1], MAX_LENGTHS[-1])
    return Layout.of(
        bucket, has_types=True, has_skip=True, max_cached_keys=CACHED_KEYS[-1], num_slots=num_slots
    ).size
