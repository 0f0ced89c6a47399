"""Sequences that have a slot, running or preempted. Allocates and frees their slots and KV cache blocks.

A running sequence holds the blocks of all its tokens. A preempted sequence has lost its blocks: it is
prefilled again later, with all its tokens as prompt. If no block is free, the newest running sequence is
preempted.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.limits import GenerationLimits
from penstock.scheduler.logprobs import PromptLogprobs
from penstock.scheduler.sequence import SequenceState
from penstock.scheduler.slots import SlotTable
from penstock.types import Ints


class _Allocation(NamedTuple):
    """The blocks of all tokens of a sequence. The first `num_cached` hold a prefix that is already
    computed."""

    blocks: list[int]
    num_cached: int


class ActiveSequences:
    """start → grow, preempt and resume → drop."""

    def __init__(self, pool: BlockPool, limits: GenerationLimits) -> None:
        self.pool = pool
        self.slots = SlotTable(limits.max_rows, limits.max_length, pool.blocks_for(limits.max_length))
        self.prompt_logprobs = PromptLogprobs(self.slots)
        self.max_adapters = 0  # different adapters per step; 0: no limit
        self.running: list[int] = []  # slots, by rank: the newest sequence is last
        self.preempted: list[SequenceState] = []  # by rank
        self.num_preemptions = 0
        self._prefix_caching = limits.prefix_caching

    def __bool__(self) -> bool:
        return bool(self.running or self.preempted)

    @property
    def num_background(self) -> int:
        """Number of background sequences that hold a slot."""
        held = sum(self.slots[slot].request.is_background for slot in self.running)
        return held + sum(sequence.request.is_background for sequence in self.preempted)

    # Start and resume.

    def has_adapter_room(self, sequence: SequenceState) -> bool:
        """Whether the adapters of this and all running sequences fit into one step. If not, later sequences
        in the queue wait too, so that this one gets its turn."""
        adapters, table = sequence.request.adapters, self.slots
        if not self.max_adapters or adapters is None or (own := int(adapters[sequence.row])) < 0:
            return True
        is_background = sequence.request.is_background
        running = {
            int(table.adapter[slot])
            for slot in self.running
            if table[slot].request.is_background == is_background
        } - {-1}
        return own in running or len(running) < self.max_adapters

    def start(self, sequence: SequenceState) -> bool:
        """Give a new sequence a slot and blocks for its prompt; False if too few blocks are free."""
        if (allocation := self._allocate(sequence, sequence.prompt)) is None:
            return False
        self.slots.assign(sequence)
        self.prompt_logprobs.join(sequence)
        self._run(sequence, allocation)
        return True

    def resume(self, sequence: SequenceState) -> bool:
        """Give a preempted sequence blocks for all its tokens; False if too few blocks are free."""
        slot = sequence.slot
        token_ids = self.slots.token_ids[slot, : int(self.slots.num_tokens[slot])]
        if (allocation := self._allocate(sequence, token_ids)) is None:
            return False
        self.preempted.remove(sequence)
        self._run(sequence, allocation)
        return True

    def _allocate(self, sequence: SequenceState, token_ids: Ints) -> _Allocation | None:
        """Get blocks for these tokens, including cached blocks of their prefix. The last token is always
        computed."""
        pool, cached = self.pool, []
        if self._prefix_caching and not sequence.wants_prompt_logprobs:
            keys = sequence.prefix_keys.extend(token_ids[:-1])
            cached = pool.match(keys[: (len(token_ids) - 1) // pool.block_size])
        needed = pool.blocks_for(len(token_ids)) - len(cached)
        # Spare blocks keep the new sequence from being preempted immediately.
        spare = min(len(self.running), pool.num_blocks // 64)
        while needed + spare > pool.available and self._preempt_background(sequence):
            pass
        rest = pool.allocate(needed) if needed + spare <= pool.available else None
        if rest is None:
            pool.release(cached)
            return None
        return _Allocation(cached + rest, len(cached))

    def _run(self, sequence: SequenceState, allocation: _Allocation) -> None:
        self.slots.start_visit(sequence, allocation.blocks, allocation.num_cached, self.pool.block_size)
        bisect.insort(self.running, sequence.slot, key=lambda slot: self.slots[slot].rank)

    # Grow and preempt.

    def grow(self, decoding: Ints) -> Ints:
        """Give a block to each decoding sequence that needs one. While no block is free, preempt the newest
        sequence. Returns the slots that still run."""
        table = self.slots
        needed = -(-table.num_tokens[decoding] // self.pool.block_size)
        short = decoding[needed > table.num_blocks[decoding]]
        if not len(short):
            return decoding
        if (blocks := self.pool.allocate(len(short))) is not None:
            table.add_block_each(short, blocks)
            return decoding
        for slot in short.tolist():
            while slot in self.running:
                if (block := self.pool.allocate(1)) is not None:
                    table.add_blocks(table[slot], block)
                    break
                self.preempt(table[self.running[-1]])
                self.num_preemptions += 1
        still_running = set(self.running)
        return np.array([slot for slot in decoding.tolist() if slot in still_running], dtype=np.int32)

    def preempt(self, sequence: SequenceState) -> None:
        """Free a running sequence's blocks; it keeps its slot."""
        self.running.remove(sequence.slot)
        self.pool.release(self.slots.end_visit(sequence))
        bisect.insort(self.preempted, sequence, key=lambda other: other.rank)

    def _preempt_background(self, sequence: SequenceState) -> bool:
        """Preempt the newest running background sequence for an interactive one; False if there is none."""
        if sequence.request.is_background or not self.running:
            return False
        newest = self.slots[self.running[-1]]
        if not newest.request.is_background:
            return False
        self.preempt(newest)
        self.num_preemptions += 1
        return True

    def drop(self, sequence: SequenceState) -> None:
        """Free a sequence's slot and blocks."""
        if sequence.slot in self.running:
            self.running.remove(sequence.slot)
            self.pool.release(self.slots.end_visit(sequence))
        else:
            self.preempted.remove(sequence)
        self.prompt_logprobs.leave(sequence)
        self.slots.free(sequence)

    def check_integrity(self) -> int:
        """Assert that every slot and block belongs to one sequence or to none. Returns the number of
        sequences with a slot."""
        preempted = [sequence.slot for sequence in self.preempted]
        self.slots.check_integrity(self.running, preempted, self.pool.block_size)
        self.pool.check()
        return len(self.running) + len(preempted)
