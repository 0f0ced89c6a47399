"""From the rows that a lane has chosen to the `GeneratePlan` of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.ragged import runs
from penstock.types import (
    GeneratePlan,
    Ints,
    Join,
    KVPlan,
    LengthGroup,
    PagedPlan,
    PromptPlan,
    SamplePlan,
    cumulative,
)

_NONE = np.zeros(0, dtype=np.int32)


class StepRows(NamedTuple):
    """Which tokens of which slots run, [rows] each."""

    slots: Ints
    begins: Ints
    counts: Ints
    epochs: Ints
    visits: Ints


def generation_plan(
    rows: StepRows,
    sampled: NDArray[np.bool_],  # [rows], whether a row's last token is in the step
    *,
    known: Ints,  # [rows], tokens of each row that the CPU has read
    wants: Ints,  # [rows], log probabilities; -1: none
    tokens: Ints,  # [slots, length]
    tables: Ints,  # [slots, blocks]
    block_size: int,
    leaves: tuple[int, ...],
    joins: tuple[Join, ...],
    masks: tuple[tuple[int, Ints], ...] = (),
    prompt_ends: Ints | None = None,  # [rows], tokens of a prompt that is asked about, else 0; None: none is
    most: int = 0,  # likeliest tokens of prompts that are asked for
) -> GeneratePlan:
    """Rows of one token stand first: they read memory block by block, all others as a run of keys."""
    if prompt_ends is None and len(rows.counts) and int(rows.counts.max()) == 1:
        return decode_plan(
            rows,
            sampled,
            known=known,
            wants=wants,
            tokens=tokens,
            tables=tables,
            block_size=block_size,
            leaves=leaves,
            joins=joins,
            masks=masks,
        )
    order = np.lexsort((rows.begins, rows.counts))
    slots, begins, counts, epochs, visits = (column[order] for column in rows)
    known, sampled = known[order], sampled[order]
    cu_lengths = cumulative(counts)
    positions = runs(begins, counts)
    slot_of = np.repeat(slots, counts)
    fed = np.flatnonzero(positions >= np.repeat(known, counts)).astype(np.int32)
    chosen = np.flatnonzero(sampled).astype(np.int32)
    paged = int(np.searchsorted(counts, 1, side="right"))
    sample = SamplePlan(
        slots=slots,
        epochs=epochs,
        visits=visits,
        ends=begins + counts,
        sampled_rows=chosen,
        sampled_tokens=cu_lengths[1:][chosen] - 1,
        sampled_slots=slots[chosen],
        num_logprobs=wants[order][chosen],
        fed_tokens=fed,
        fed_slots=slot_of[fed],
        leaves=leaves,
        joins=joins,
        masks=masks,
        prompts=None
        if prompt_ends is None
        else _prompt_plan(slots, begins, counts, cu_lengths, prompt_ends[order], tokens, most),
    )
    own = tables[slots, : -(-int((begins + counts).max()) // block_size)]
    return GeneratePlan(
        token_ids=tokens[slot_of, np.minimum(positions, tokens.shape[1] - 1)],
        positions=positions,
        cu_lengths=cu_lengths,
        lengths=counts,
        groups=_groups(begins, counts, cu_lengths, paged),
        kv=_kv_plan(own, begins, counts, positions, paged, block_size),
        paged=_paged_plan(own, begins, paged, block_size),
        sample=sample,
    )


def decode_plan(
    rows: StepRows,
    sampled: NDArray[np.bool_],
    *,
    known: Ints,
    wants: Ints,
    tokens: Ints,
    tables: Ints,
    block_size: int,
    leaves: tuple[int, ...],
    joins: tuple[Join, ...],
    masks: tuple[tuple[int, Ints], ...] = (),
) -> GeneratePlan:
    """The same where every row runs one token, as in most steps: no run has to be built."""
    order = np.argsort(rows.begins, kind="stable")
    slots, positions, counts = rows.slots[order], rows.begins[order], rows.counts[order]
    known, sampled, wants = known[order], sampled[order], wants[order]
    places = np.arange(len(order) + 1, dtype=np.int32)
    fed = np.flatnonzero(positions >= known).astype(np.int32)
    chosen, own_slots = places[:-1], slots
    if not sampled.all():
        chosen = np.flatnonzero(sampled).astype(np.int32)
        own_slots, wants = slots[chosen], wants[chosen]
    keys = positions + 1
    width = -(-int(keys[-1]) // block_size)
    block, within = np.divmod(positions, np.int32(block_size))
    token_slots = tables[slots, block] * np.int32(block_size) + within
    return GeneratePlan(
        token_ids=tokens[slots, np.minimum(positions, tokens.shape[1] - 1)],
        positions=positions,
        cu_lengths=places,
        lengths=counts,
        groups=(),
        kv=KVPlan(
            cu_keys=places,
            max_keys=1,
            new_key_at=_NONE,
            cached_key_at=_NONE,
            read_slots=_NONE,
            write_tokens=places[:-1],
            write_slots=token_slots,
            token_slots=token_slots,
        ),
        paged=PagedPlan(
            num_rows=len(slots),
            max_blocks=width,
            block_tables=tables[slots, :width].reshape(-1),
            num_keys=keys,
        ),
        sample=SamplePlan(
            slots=slots,
            epochs=rows.epochs[order],
            visits=rows.visits[order],
            ends=keys,
            sampled_rows=chosen,
            sampled_tokens=chosen,
            sampled_slots=own_slots,
            num_logprobs=wants,
            fed_tokens=fed,
            fed_slots=slots[fed],
            leaves=leaves,
            joins=joins,
            masks=masks,
        ),
    )


def _prompt_plan(
    slots: Ints, begins: Ints, counts: Ints, cu_lengths: Ints, ends: Ints, tokens: Ints, most: int
) -> PromptPlan | None:
    """A prompt's last token predicts what is sampled; those before it predict the prompt."""
    scored = np.clip(ends - 1 - begins, 0, counts)
    rows = np.flatnonzero(scored).astype(np.int32)
    if not len(rows):
        return None
    own = scored[rows]
    following = tokens[np.repeat(slots[rows], own), runs(begins[rows], own) + 1]
    return PromptPlan(rows, begins[rows], own, runs(cu_lengths[:-1][rows], own), following, most)


def _groups(begins: Ints, counts: Ints, cu_lengths: Ints, first: int) -> tuple[LengthGroup, ...]:
    """Those of the rows from `first` on; their keys lie from 0 on in the run of keys."""
    length, context = counts[first:], begins[first:]
    if not len(length):
        return ()
    changes = (np.diff(length, prepend=-1) != 0) | (np.diff(context, prepend=-1) != 0)
    firsts = np.flatnonzero(changes)
    keys = cumulative(length + context)
    sizes = np.diff(firsts, append=len(length)).tolist()
    return tuple(
        LengthGroup(
            first + at, size, int(length[at]), int(cu_lengths[first + at]), int(context[at]), int(keys[at])
        )
        for at, size in zip(firsts.tolist(), sizes, strict=True)
    )


def _kv_plan(
    tables: Ints,  # [rows, blocks]
    begins: Ints,
    counts: Ints,
    positions: Ints,
    paged: int,
    size: int,
) -> KVPlan:
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def slots(rows: Ints, places: Ints) -> Ints:
        return tables[rows, places // size] * size + places % size

    token_slots = slots(rows, positions)

    length, context = counts[paged:], begins[paged:]
    # A row that reads blocks counts its own key alone, so that what others remember begins where they expect.
    keys = np.concatenate([np.ones(paged, dtype=np.int32), length + context])
    cu_keys = cumulative(keys)
    first = cu_keys[paged:-1] - paged
    old = runs(np.zeros_like(context), context)
    old_rows = np.repeat(np.arange(paged, len(counts), dtype=np.int32), context)
    return KVPlan(
        cu_keys=cu_keys,
        max_keys=int(keys.max(initial=0)),
        new_key_at=runs(first + context, length),
        cached_key_at=runs(first, context),
        read_slots=slots(old_rows, old),
        write_tokens=np.arange(len(rows), dtype=np.int32),
        write_slots=token_slots,
        token_slots=token_slots,
    )


def _paged_plan(tables: Ints, begins: Ints, rows: int, size: int) -> PagedPlan:
    longest = int(begins[:rows].max(initial=0)) + 1
    width = -(-longest // size)
    return PagedPlan(
        num_rows=rows,
        max_blocks=width,
        block_tables=np.ascontiguousarray(tables[:rows, :width]).reshape(-1),
        num_keys=begins[:rows] + 1,
    )
