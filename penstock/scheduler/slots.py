"""Slot bookkeeping of generation: everything that changes every step, in NumPy arrays by slot.

A slot is a sequence's index in these arrays and in the sampler. With arrays, a step costs a few NumPy calls
for any number of sequences. The position of a token is planned before its id is known: a token that the
device has sampled but the CPU has not read counts in `num_tokens`, not in `num_known`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.sequence import SequenceState
from penstock.types import Ints, Join, SamplePlan, SamplerParams, SequenceIds

MAX_INLINE_STOPS = 8  # stop tokens per sequence in the array `stop_ids`; few requests have more


class SlotTable:
    """Slots with their sequences and numbers, and the changes that the sampler has not applied yet."""

    def __init__(self, num_slots: int, max_length: int, max_blocks: int) -> None:
        def numbers() -> Ints:
            return np.zeros(num_slots, dtype=np.int32)

        self.num_slots = num_slots
        self.token_ids: Ints = np.zeros((num_slots, max_length), dtype=np.int32)
        self.block_tables: Ints = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.stop_ids: Ints = np.full((MAX_INLINE_STOPS, num_slots), -1, dtype=np.int32)
        self._more_stops: dict[int, frozenset[int]] = {}  # slot → all stop tokens, if `stop_ids` is too small
        self.num_tokens = numbers()  # prompt and sampled tokens
        self.num_known = numbers()  # tokens that the CPU has read
        self.num_computed = numbers()  # tokens that have run or are in a step in flight
        self.prompt_length = numbers()
        self.max_length = numbers()  # number of tokens at which the sequence ends
        self.min_length = numbers()  # number of tokens up to which stop tokens have no effect
        self.num_blocks = numbers()
        self.num_published = numbers()  # blocks that other sequences may reuse
        self.adapter = numbers()  # adapter id; -1: none
        self.rope_delta = numbers()  # position minus index, for tokens after the prompt
        self.has_images = np.zeros(num_slots, dtype=bool)  # the prompt has images or explicit positions
        self.num_logprobs = numbers()  # requested top tokens; -1: no log probabilities
        self.epoch = numbers()  # changes whenever results in flight for the slot become invalid
        self.visit = numbers()  # changes whenever the sequence gets or loses its blocks
        self.stream = np.zeros(num_slots, dtype=np.int64)  # noise stream, for sequences without a seed
        self.device_s = np.zeros(num_slots)
        self.is_constrained = np.zeros(num_slots, dtype=bool)
        self.needs_details = np.zeros(num_slots, dtype=bool)  # outputs contain more than a token id
        self._sequences: list[SequenceState | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._joins: list[Join] = []
        self._leaves: list[int] = []
        self._num_assigned = 0
        self._named = (np.zeros(0, dtype=np.int32),) * 2  # the slots and epochs of `_names`
        self._names: SequenceIds = ()

    def __getitem__(self, slot: int) -> SequenceState:
        sequence = self._sequences[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} is free")
        return sequence

    def find(self, slot: int) -> SequenceState | None:
        return self._sequences[slot]

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self._sequences) if sequence is not None]

    # Sequences take and leave slots.

    def assign(self, sequence: SequenceState) -> None:
        """Give a new sequence a free slot."""
        slot, prompt, params = self._free.pop(), sequence.prompt, sequence.sampling
        sequence.slot = slot
        self._sequences[slot] = sequence
        self.token_ids[slot, : len(prompt)] = prompt
        self.num_tokens[slot] = self.num_known[slot] = self.prompt_length[slot] = len(prompt)
        self.max_length[slot] = len(prompt) + params.max_tokens
        self.min_length[slot] = len(prompt) + params.min_tokens
        self._set_stop_ids(slot, params)
        positions = sequence.rope_positions
        self.has_images[slot] = positions is not None or sequence.request.images is not None
        self.rope_delta[slot] = 0 if positions is None else int(positions.max()) + 1 - len(prompt)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        adapters = sequence.request.adapters
        self.adapter[slot] = -1 if adapters is None else adapters[sequence.row]
        self.device_s[slot] = 0.0
        self._num_assigned += 1
        self.stream[slot] = self._num_assigned
        self.is_constrained[slot] = sequence.constraint is not None
        self.needs_details[slot] = (
            sequence.constraint is not None
            or params.logprobs is not None
            or params.prompt_logprobs is not None
        )
        self._joins.append(Join(slot, params, prompt, stream=self._num_assigned))

    def free(self, sequence: SequenceState) -> None:
        """Free a sequence's slot. Results still in flight for it are ignored."""
        slot = sequence.slot
        self._sequences[slot] = None
        self.epoch[slot] += 1
        self._more_stops.pop(slot, None)
        self.has_images[slot] = self.is_constrained[slot] = False
        self._free.append(slot)
        self._leave(slot)

    def restart(self, sequence: SequenceState) -> None:
        """Discard what is in flight for a sequence, and join it to the sampler again: the sampler may have
        counted tokens that the CPU has not read."""
        slot = sequence.slot
        self.epoch[slot] += 1
        self.num_tokens[slot] = self.num_known[slot]
        output = self.token_ids[slot, int(self.prompt_length[slot]) : int(self.num_known[slot])].copy()
        self._leave(slot)
        self._joins.append(Join(slot, sequence.sampling, sequence.prompt, output, int(self.stream[slot])))

    def _leave(self, slot: int) -> None:
        self._joins = [join for join in self._joins if join.slot != slot]
        if slot not in self._leaves:
            self._leaves.append(slot)

    def take_leaves(self) -> tuple[int, ...]:
        """The slots that were freed since the last call."""
        leaves, self._leaves = tuple(self._leaves), []
        return leaves

    def take_joins(self) -> tuple[Join, ...]:
        """The sequences that have joined since the last call."""
        joins, self._joins = tuple(self._joins), []
        return joins

    # Blocks.

    def add_blocks(self, sequence: SequenceState, blocks: list[int]) -> None:
        slot, at = sequence.slot, len(sequence.blocks)
        sequence.blocks += blocks
        self.block_tables[slot, at : len(sequence.blocks)] = blocks
        self.num_blocks[slot] = len(sequence.blocks)

    def add_block_each(self, slots: Ints, blocks: list[int]) -> None:
        """Add one block to each of these sequences."""
        self.block_tables[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1
        for slot, block in zip(slots.tolist(), blocks, strict=True):
            self[slot].blocks.append(block)

    def start_visit(
        self, sequence: SequenceState, blocks: list[int], num_cached: int, block_size: int
    ) -> None:
        """Give a sequence the blocks of all its tokens. The first `num_cached` hold a cached prefix."""
        slot, sequence.blocks = sequence.slot, []
        self.add_blocks(sequence, blocks)
        self.num_published[slot] = num_cached
        self.num_computed[slot] = num_cached * block_size
        self.visit[slot] += 1

    def end_visit(self, sequence: SequenceState) -> list[int]:
        """Take and return all blocks of a sequence. None of its tokens counts as computed any more."""
        blocks, sequence.blocks = sequence.blocks, []
        self.num_blocks[sequence.slot] = self.num_computed[sequence.slot] = 0
        self.visit[sequence.slot] += 1
        return blocks

    # Tokens.

    def append(self, slots: Ints, token_ids: Ints) -> None:
        """Append one sampled token, which the CPU has read, to each of these sequences."""
        self.token_ids[slots, self.num_known[slots]] = token_ids
        self.num_known[slots] += 1

    def append_runs(self, slots: Ints, token_ids: Ints, offsets: Ints, computed: NDArray[np.bool_]) -> None:
        """Append several tokens to some sequences. The first token of a run is already in `num_tokens`; the
        others come from accepted proposals that ran in the same step. `offsets` count from 0 within each run.
        `computed`: whether the sequence still holds the blocks with the keys and values of that step."""
        self.token_ids[slots, self.num_known[slots] + offsets] = token_ids
        added = np.zeros(self.num_slots, dtype=np.int32)
        added[slots] = offsets + 1  # of equal slots, the last one is kept
        self.num_known += added
        more = np.maximum(added - 1, 0)
        self.num_tokens += more
        lost = np.zeros(self.num_slots, dtype=bool)
        lost[slots[~computed]] = True
        self.num_computed += np.where(lost, 0, more).astype(np.int32)

    def num_to_run(self, slot: int) -> int:
        """Number of tokens of a sequence that have not run and are in no step in flight."""
        return int(self.num_tokens[slot] - self.num_computed[slot])

    def schedule(self, slots: Ints, counts: Ints) -> NDArray[np.bool_]:
        """Count tokens as computed. Returns which sequences sample, because their last token is computed."""
        ends = self.num_computed[slots] + counts
        samples: NDArray[np.bool_] = ends == self.num_tokens[slots]
        self.num_computed[slots] = ends
        self.num_tokens[slots[samples]] += 1
        return samples

    def is_current(self, sample: SamplePlan) -> NDArray[np.bool_]:
        """Which rows of a step still belong to the sequence that they were planned for."""
        current: NDArray[np.bool_] = self.epoch[sample.slots] == sample.epochs
        return current

    def stopped(self, slots: Ints, token_ids: Ints, offsets: Ints | None = None) -> NDArray[np.bool_]:
        """Which sequences end because of a stop token. `token_ids` are the latest known tokens, or, with
        `offsets`, tokens at these offsets after the known ones."""
        stopped: NDArray[np.bool_] = (self.stop_ids.take(slots, axis=1) == token_ids).any(axis=0)
        if self._more_stops:
            for row in np.flatnonzero(np.isin(slots, list(self._more_stops))).tolist():
                stopped[row] = int(token_ids[row]) in self._more_stops[int(slots[row])]
        lengths = self.num_known[slots] if offsets is None else self.num_known[slots] + offsets + 1
        stopped &= lengths > self.min_length[slots]
        return stopped

    def is_full(self, slots: Ints) -> NDArray[np.bool_]:
        """Which sequences have reached their maximum length."""
        full: NDArray[np.bool_] = self.num_known[slots] >= self.max_length[slots]
        return full

    def sequence_ids(self, slots: Ints) -> SequenceIds:
        """Request id and row of each slot. Returns the same object as before if nothing has changed."""
        epochs = self.epoch[slots]
        named_slots, named_epochs = self._named
        if not (np.array_equal(slots, named_slots) and np.array_equal(epochs, named_epochs)):
            sequences = [self[slot] for slot in slots.tolist()]
            self._names = tuple((sequence.request.id, sequence.row) for sequence in sequences)
            self._named = slots, epochs
        return self._names

    def check_integrity(self, running: list[int], preempted: list[int], block_size: int) -> None:
        """Assert that every slot is free or has one sequence, either running or preempted."""
        used = self.used_slots
        assert sorted(used + self._free) == list(range(self.num_slots)), "slots are lost or used twice"
        assert sorted(running + preempted) == used, "a sequence is neither running nor preempted"
        assert all(not self[slot].blocks for slot in preempted)
        for slot in running:
            sequence = self[slot]
            assert sequence.slot == slot
            assert len(sequence.blocks) == self.num_blocks[slot]
            assert sequence.blocks == self.block_tables[slot, : len(sequence.blocks)].tolist()
            assert self.num_computed[slot] <= self.num_tokens[slot]
            assert self.num_known[slot] <= self.num_tokens[slot]
            assert self.num_computed[slot] <= len(sequence.blocks) * block_size

    def _set_stop_ids(self, slot: int, params: SamplerParams) -> None:
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids))
        self.stop_ids[:, slot] = -1
        if len(stop_ids) > MAX_INLINE_STOPS:
            self._more_stops[slot] = frozenset(stop_ids)
        else:
            self.stop_ids[: len(stop_ids), slot] = stop_ids
