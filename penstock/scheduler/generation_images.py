"""Images in generation: which image features the tokens of prompts read, and their rotary positions in time,
down and across.

Tokens after a prompt have the same position on all three axes: their index plus a shift (`rope_delta`) that
depends on the prompt's images. So decode steps are planned as for text, with shifted positions.
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
    """A row of a step that runs prompt tokens of a sequence with images or explicit positions."""

    sequence: SequenceState
    first: int  # index of the row's first token in the step
    begin: int  # index of the same token in the sequence
    end: int  # end of the row or of the prompt, whichever comes first


def with_images(plan: GeneratePlan, table: SlotTable, cache: ImageCache | None) -> GeneratePlan:
    """Add image features and rotary positions to the plan of a step with sequences that have images."""
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
    """Total tokens of all images that overlap these tokens of a prompt."""
    if (images := sequence.request.images) is None:
        return 0
    own, _ = images.of_rows(np.array([sequence.row], dtype=np.int32))
    starts, counts = images.starts[own], images.num_tokens[own]
    return int(counts[(starts < end) & (starts + counts > begin)].sum())
