"""Images in generation: the features that prompts take, and positions in time, down and across.

Tokens behind a prompt have the same position on all axes: their index plus what the prompt's images save. So
a decode step is one of text alone, whose positions are shifted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.images import PlacedRows, image_plan
from penstock.scheduler.sequence import SequenceState
from penstock.scheduler.slots import SlotTable
from penstock.types import GeneratePlan, Ints


class _PromptRow(NamedTuple):
    """A row of a step with tokens of a prompt that has images or positions of its own."""

    sequence: SequenceState
    first: int  # its first token in the step
    begin: int  # the same in the sequence
    end: int  # the end of the row, or of the prompt


def with_images(plan: GeneratePlan, table: SlotTable, cache: ImageCache | None) -> GeneratePlan:
    """The plan of a step some of whose sequences have images, with their features and positions."""
    positions = plan.positions + np.repeat(table.rope_delta[plan.sample.slots], plan.lengths)
    prompts = list(_prompt_rows(plan, table))
    if not prompts:
        return replace(plan, positions=positions)
    rope = np.repeat(positions[:, None], 3, axis=1)
    for row in prompts:
        if (own := row.sequence.rope_positions) is not None:
            rope[row.first : row.first + row.end - row.begin] = own[row.begin : row.end]
    placed = [_placed(row) for row in prompts if row.sequence.request.images is not None]
    images = image_plan(placed, cache) if placed and cache is not None else None
    axes = np.ascontiguousarray(rope.T).reshape(-1)
    return replace(plan, positions=positions, rope_positions=axes, images=images)


def _prompt_rows(plan: GeneratePlan, table: SlotTable) -> Iterator[_PromptRow]:
    slots, ends = plan.sample.slots, plan.sample.ends
    begins, lengths = ends - plan.lengths, table.prompt_length[slots]
    for row in np.flatnonzero(table.has_images[slots] & (begins < lengths)).tolist():
        begin, end = int(begins[row]), int(min(ends[row], lengths[row]))
        yield _PromptRow(table[int(slots[row])], int(plan.cu_lengths[row]), begin, end)


def _placed(row: _PromptRow) -> PlacedRows:
    def one(value: int) -> Ints:
        return np.array([value], dtype=np.int32)

    sequence = row.sequence
    return PlacedRows(sequence.request, one(sequence.row), one(row.begin), one(row.end), one(row.first))


def num_features(sequence: SequenceState, begin: int, end: int) -> int:
    """Tokens of all images of which these tokens of a prompt have a part."""
    if (images := sequence.request.images) is None:
        return 0
    own, _ = images.of_rows(np.array([sequence.row], dtype=np.int32))
    starts, counts = images.starts[own], images.num_tokens[own]
    return int(counts[(starts < end) & (starts + counts > begin)].sum())
