"""Order and tiles of a batch's lines by adapter slot: all integers that adapter kernels need, in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.kernels.lora import tile_lines_for
from penstock.kernels.lora_linear import TILE_LINES
from penstock.types import Ints, cumulative, runs

MANY_SLOTS = 8  # stands for an average of more than 5 slots per tile


class LinePlan(NamedTuple):
    """The lines of a batch, ordered by slot. Within a run, lines keep their order."""

    slots: Ints  # [lines]; -1: no adapter
    order: Ints  # [lines]
    tiles: Ints  # [tiles · 3]: begin and end in `order`, slot
    tile_lines: int
    groups: tuple[tuple[int, int, int], ...]  # slot, begin and end in `order`

    def arrays(self) -> list[Ints]:
        return [self.slots, self.order, self.tiles]


def plan_lines(slots: Ints, lengths: Ints, tile_lines: int | None = None) -> LinePlan:
    """Plan runs of lines, each with one slot. Set `tile_lines` if the batch is padded to another size."""
    if not len(slots):
        nothing = slots[:0]
        return LinePlan(nothing, nothing, nothing, tile_lines or tile_lines_for(0), ())
    cu_lengths = cumulative(lengths)
    size = tile_lines or tile_lines_for(int(cu_lengths[-1]))
    by_slot = np.argsort(slots, kind="stable")
    order = runs(cu_lengths[:-1][by_slot], lengths[by_slot])
    ordered = slots[by_slot]
    ends = np.cumsum(lengths[by_slot], dtype=np.int32)
    is_last = np.ones(len(slots), dtype=bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    group_slots, group_ends = ordered[is_last], ends[is_last]
    group_begins = np.concatenate([np.zeros(1, dtype=np.int32), group_ends[:-1]])
    tiles = _tiles(group_slots, group_begins, group_ends, size)
    groups = zip(group_slots.tolist(), group_begins.tolist(), group_ends.tolist(), strict=True)
    return LinePlan(np.repeat(slots, lengths), order, tiles, size, tuple(groups))


def _tiles(slots: Ints, begins: Ints, ends: Ints, size: int) -> Ints:
    counts = -(-(ends - begins) // size)
    first = np.repeat(begins, counts) + size * runs(np.zeros_like(counts), counts)
    tiles = np.empty((len(first), 3), dtype=np.int32)
    tiles[:, 0] = first
    tiles[:, 1] = np.minimum(first + size, np.repeat(ends, counts))
    tiles[:, 2] = np.repeat(slots, counts)
    return tiles.reshape(-1)


def max_tiles(lines: int, num_slots: int) -> int:
    """The largest number of tiles that this many lines can need."""
    return -(-lines // tile_lines_for(lines)) + min(num_slots + 1, lines)


def slots_per_tile(slots: Ints, lengths: Ints) -> int:
    """The average number of slots in a tile of the fused product, rounded to 1, 2, 4 or `MANY_SLOTS`.

    A graph replays only steps with the same number.
    """
    if not len(slots):
        return MANY_SLOTS
    ends = np.cumsum(lengths)
    is_last = np.ones(len(slots), dtype=bool)
    is_last[:-1] = slots[1:] != slots[:-1]  # neighbours with the same slot are one run
    run_ends = ends[is_last]
    run_begins = np.concatenate([np.zeros(1, dtype=run_ends.dtype), run_ends[:-1]])
    has_adapter = (slots[is_last] >= 0) & (run_ends > run_begins)
    tiles_of_run = (run_ends - 1) // TILE_LINES - run_begins // TILE_LINES + 1
    average = tiles_of_run[has_adapter].sum() / max(-(-int(ends[-1]) // TILE_LINES), 1)
    return next((size for size in (1, 2, 4) if average <= 1.25 * size), MANY_SLOTS)
