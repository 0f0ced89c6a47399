"""Turns the sequences that the generation scheduler has chosen into the `GeneratePlan` of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.types import (
    GeneratePlan,
    Ints,
    Join,
    KVPlan,
    LengthGroup,
    PagedPlan,
    PromptPlan,
    SamplePlan,
    VerifyPlan,
    cumulative,
    runs,
)

_NONE = np.zeros(0, dtype=np.int32)


class StepRows(NamedTuple):
    """The rows of a step: which tokens of which sequences run. All arrays are [rows]."""

    slots: Ints
    begins: Ints  # index of each row's first token in its sequence
    counts: Ints  # tokens of each row
    samples: NDArray[np.bool_]  # whether the row samples: it includes the last token of its sequence
    num_known: Ints  # tokens of the sequence that the CPU has read
    num_logprobs: Ints  # requested top tokens; -1: no log probabilities
    epochs: Ints
    visits: Ints
    adapters: Ints | None = None  # adapter ids, -1: none; None: no row has one
    proposed: Ints | None = None  # token proposed after each row, -1: none; None: no proposals in the step
    offsets: Ints | None = None  # number of earlier rows of the same sequence; None: all 0

    def with_proposals(self, counts: Ints, token_ids: Ints) -> StepRows:
        """Add `counts` [rows] proposed tokens after each row, each token as a row of its own. In `token_ids`
        [slots, length], proposed tokens follow the known tokens."""
        source = np.repeat(np.arange(len(counts)), counts + 1)
        rows = self.ordered(source)
        firsts = np.repeat(np.cumsum(counts + 1) - counts - 1, counts + 1)
        offsets = (np.arange(len(source)) - firsts).astype(np.int32)
        begins = rows.begins + offsets
        is_last = offsets == counts[source]
        following = token_ids[rows.slots, np.minimum(begins + rows.counts, token_ids.shape[1] - 1)]
        return rows._replace(
            begins=begins,
            num_known=rows.num_known + counts[source],
            proposed=np.where(is_last, np.int32(-1), following),
            offsets=offsets,
        )

    @property
    def first_begins(self) -> Ints:
        """The begin of the first row of each row's sequence. Rows are sorted by it, so that the rows of a
        sequence stay together."""
        return self.begins if self.offsets is None else self.begins - self.offsets

    def ordered(self, order: NDArray[np.intp]) -> StepRows:
        return StepRows(
            self.slots[order],
            self.begins[order],
            self.counts[order],
            self.samples[order],
            self.num_known[order],
            self.num_logprobs[order],
            self.epochs[order],
            self.visits[order],
            None if self.adapters is None else self.adapters[order],
            None if self.proposed is None else self.proposed[order],
            None if self.offsets is None else self.offsets[order],
        )


class SequenceMemory(NamedTuple):
    """The tokens and KV cache blocks of all sequences."""

    token_ids: Ints  # [slots, length]
    block_tables: Ints  # [slots, blocks]
    block_size: int


class SamplerChanges(NamedTuple):
    """Changes that the sampler applies before a step."""

    leaves: tuple[int, ...] = ()
    joins: tuple[Join, ...] = ()
    masks: tuple[tuple[int, Ints], ...] = ()


class PromptRequest(NamedTuple):
    """The rows with requested log probabilities of their prompt."""

    lengths: Ints  # [rows], prompt length of rows that request them; 0 for other rows
    max_logprobs: int  # largest number of top tokens that a row requests


def generation_plan(
    rows: StepRows, memory: SequenceMemory, changes: SamplerChanges, prompts: PromptRequest | None = None
) -> GeneratePlan:
    """Plan a step. Rows of one token come first and read their keys through block tables (paged); longer rows
    read theirs from one contiguous run of keys."""
    if prompts is None and len(rows.counts) and int(rows.counts.max()) == 1:
        return _decode_plan(rows, memory, changes)
    order = np.lexsort((rows.first_begins, rows.counts))
    rows = rows.ordered(order)
    slots, begins, counts = rows.slots, rows.begins, rows.counts
    cu_lengths = cumulative(counts)
    positions = runs(begins, counts)
    slot_of_token = np.repeat(slots, counts)
    fed = np.flatnonzero(positions >= np.repeat(rows.num_known, counts)).astype(np.int32)
    sampled = np.flatnonzero(rows.samples).astype(np.int32)
    num_paged = int(np.searchsorted(counts, 1, side="right"))
    tables = memory.block_tables[slots, : -(-int((begins + counts).max()) // memory.block_size)]
    prompt_plan = None
    if prompts is not None:
        ordered = PromptRequest(prompts.lengths[order], prompts.max_logprobs)
        prompt_plan = _prompt_plan(rows, cu_lengths, memory.token_ids, ordered)
    return GeneratePlan(
        token_ids=_known_ids(memory.token_ids, slot_of_token, positions),
        positions=positions,
        cu_lengths=cu_lengths,
        lengths=counts,
        groups=_groups(begins, counts, cu_lengths, num_paged),
        adapters=rows.adapters,
        kv=_kv_plan(tables, rows, positions, num_paged, memory.block_size),
        paged=_paged_plan(tables, rows, num_paged, memory.block_size),
        sample=SamplePlan(
            slots=slots,
            epochs=rows.epochs,
            visits=rows.visits,
            ends=begins + counts,
            sampled_rows=sampled,
            sampled_tokens=cu_lengths[1:][sampled] - 1,
            sampled_slots=slots[sampled],
            num_logprobs=rows.num_logprobs[sampled],
            fed_tokens=fed,
            fed_slots=slot_of_token[fed],
            leaves=changes.leaves,
            joins=changes.joins,
            masks=changes.masks,
            prompts=prompt_plan,
            verify=_verify_plan(rows, sampled),
        ),
    )


def _decode_plan(rows: StepRows, memory: SequenceMemory, changes: SamplerChanges) -> GeneratePlan:
    """Fast path of `generation_plan` for the most common steps, in which every row runs one token. It builds
    no ragged run."""
    order = np.argsort(rows.first_begins, kind="stable")
    rows = rows.ordered(order)
    slots, positions, size = rows.slots, rows.begins, memory.block_size
    indices = np.arange(len(order) + 1, dtype=np.int32)
    fed = np.flatnonzero(positions >= rows.num_known).astype(np.int32)
    sampled, sampled_slots, num_logprobs = indices[:-1], slots, rows.num_logprobs
    if not rows.samples.all():
        sampled = np.flatnonzero(rows.samples).astype(np.int32)
        sampled_slots, num_logprobs = slots[sampled], num_logprobs[sampled]
    num_keys = positions + 1
    max_blocks = -(-int(num_keys.max()) // size)
    block, offset = np.divmod(positions, np.int32(size))
    token_slots = memory.block_tables[slots, block] * np.int32(size) + offset
    return GeneratePlan(
        token_ids=_known_ids(memory.token_ids, slots, positions),
        positions=positions,
        cu_lengths=indices,
        lengths=rows.counts,
        groups=(),
        adapters=rows.adapters,
        kv=KVPlan(
            cu_keys=indices,
            max_keys=1,
            new_key_at=_NONE,
            cached_key_at=_NONE,
            read_slots=_NONE,
            write_tokens=indices[:-1],
            write_slots=token_slots,
            token_slots=token_slots,
        ),
        paged=PagedPlan(
            num_rows=len(slots),
            max_blocks=max_blocks,
            block_tables=memory.block_tables[slots, :max_blocks].reshape(-1),
            num_keys=num_keys,
            offsets=rows.offsets,
        ),
        sample=SamplePlan(
            slots=slots,
            epochs=rows.epochs,
            visits=rows.visits,
            ends=num_keys,
            sampled_rows=sampled,
            sampled_tokens=sampled,
            sampled_slots=sampled_slots,
            num_logprobs=num_logprobs,
            fed_tokens=fed,
            fed_slots=slots[fed],
            leaves=changes.leaves,
            joins=changes.joins,
            masks=changes.masks,
            verify=_verify_plan(rows, sampled),
        ),
    )


def _verify_plan(rows: StepRows, sampled: Ints) -> VerifyPlan | None:
    if rows.proposed is None or rows.offsets is None:
        return None
    offsets = rows.offsets[sampled]
    return VerifyPlan(rows.proposed[sampled], offsets, np.flatnonzero(offsets == 0).astype(np.int32))


def _known_ids(token_ids: Ints, slots: Ints, positions: Ints) -> Ints:
    """The token ids that the CPU has read. Ids of tokens that the device feeds itself may have any value."""
    known: Ints = token_ids[slots, np.minimum(positions, token_ids.shape[1] - 1)]
    return known


def _prompt_plan(
    rows: StepRows, cu_lengths: Ints, token_ids: Ints, prompts: PromptRequest
) -> PromptPlan | None:
    """Plan the log probabilities of prompt tokens. Every prompt token but the last predicts the next prompt
    token; the last predicts the sampled token."""
    num_scored = np.clip(prompts.lengths - 1 - rows.begins, 0, rows.counts)
    asking = np.flatnonzero(num_scored).astype(np.int32)
    if not len(asking):
        return None
    begins, counts = rows.begins[asking], num_scored[asking]
    return PromptPlan(
        rows=asking,
        begins=begins,
        counts=counts,
        tokens=runs(cu_lengths[:-1][asking], counts),
        next_tokens=token_ids[np.repeat(rows.slots[asking], counts), runs(begins, counts) + 1],
        max_logprobs=prompts.max_logprobs,
    )


def _groups(begins: Ints, counts: Ints, cu_lengths: Ints, num_paged: int) -> tuple[LengthGroup, ...]:
    """Groups of the rows after the paged rows. The run of keys holds only the keys of these rows."""
    length, num_cached = counts[num_paged:], begins[num_paged:]
    if not len(length):
        return ()
    changes = (np.diff(length, prepend=-1) != 0) | (np.diff(num_cached, prepend=-1) != 0)
    firsts = np.flatnonzero(changes)
    cu_keys = cumulative(length + num_cached)
    sizes = np.diff(firsts, append=len(length)).tolist()
    return tuple(
        LengthGroup(
            first_row=num_paged + at,
            num_rows=size,
            length=int(length[at]),
            first_token=int(cu_lengths[num_paged + at]),
            num_cached=int(num_cached[at]),
            first_key=int(cu_keys[at]),
        )
        for at, size in zip(firsts.tolist(), sizes, strict=True)
    )


def _kv_plan(
    tables: Ints,  # [rows, blocks]
    step: StepRows,
    positions: Ints,
    num_paged: int,
    block_size: int,
) -> KVPlan:
    def cache_slots(rows: Ints, positions: Ints) -> Ints:
        return tables[rows, positions // block_size] * block_size + positions % block_size

    num_rows = len(step.counts)
    row_of_token = np.repeat(np.arange(num_rows, dtype=np.int32), step.counts)
    token_slots = cache_slots(row_of_token, positions)
    length, num_cached = step.counts[num_paged:], step.begins[num_paged:]
    # A paged row counts as one key, so `cu_keys` minus `num_paged` indexes the run of keys of the other rows.
    num_keys = np.concatenate([np.ones(num_paged, dtype=np.int32), length + num_cached])
    cu_keys = cumulative(num_keys)
    first_key = cu_keys[num_paged:-1] - num_paged
    cached_positions = runs(np.zeros_like(num_cached), num_cached)
    row_of_cached = np.repeat(np.arange(num_paged, num_rows, dtype=np.int32), num_cached)
    return KVPlan(
        cu_keys=cu_keys,
        max_keys=int(num_keys.max(initial=0)),
        new_key_at=runs(first_key + num_cached, length),
        cached_key_at=runs(first_key, num_cached),
        read_slots=cache_slots(row_of_cached, cached_positions),
        write_tokens=np.arange(len(row_of_token), dtype=np.int32),
        write_slots=token_slots,
        token_slots=token_slots,
    )


def _paged_plan(tables: Ints, rows: StepRows, num_rows: int, block_size: int) -> PagedPlan:
    begins = rows.begins
    longest = int(begins[:num_rows].max(initial=0)) + 1
    max_blocks = -(-longest // block_size)
    return PagedPlan(
        num_rows=num_rows,
        max_blocks=max_blocks,
        block_tables=np.ascontiguousarray(tables[:num_rows, :max_blocks]).reshape(-1),
        num_keys=begins[:num_rows] + 1,
        offsets=None if rows.offsets is None else rows.offsets[:num_rows],
    )
