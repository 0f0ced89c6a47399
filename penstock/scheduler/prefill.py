"""Chooses the prompts that run in a step, and how many tokens of each.

Owns the order of prompts: running, then preempted, then waiting. It also owns the admission of waiting
sequences, and the budget that keeps steps with prompts within the target inter-token latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.scheduler.active_sequences import ActiveSequences
from penstock.scheduler.generation_images import num_features
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.limits import GenerationLimits
from penstock.scheduler.prefill_budget import PrefillBudget, PrefillDemand
from penstock.scheduler.prompt_queue import PromptQueue
from penstock.scheduler.sequence import SequenceState
from penstock.scheduler.suspects import MayRun


class Turn(NamedTuple):
    """Which sequences may run in the next step, and how many tokens."""

    now_s: float
    may_run: MayRun | None  # None: all requests may run
    admits: bool  # waiting sequences may take slots and blocks
    max_tokens: int
    is_background: bool = False  # admit background sequences instead of interactive ones


class Prefills:
    """Chooses the prompts of a step. Gives slots and blocks to the waiting sequences that it admits."""

    def __init__(
        self,
        queue: PromptQueue,
        active: ActiveSequences,
        limits: GenerationLimits,
        image_cache: ImageCache | None = None,
    ) -> None:
        self.budget = PrefillBudget(limits.target_itl_s)
        self._queue = queue
        self._active = active
        self._slots = active.slots
        self._image_cache = image_cache
        self._max_chunk_tokens = limits.max_chunk_tokens
        self._max_partial = limits.max_partial_prefills
        self._max_background = limits.max_rows / 2

    def max_tokens_beside(self, num_decoding: int, num_proposed: int, max_tokens: int) -> int:
        """Prompt tokens that may run beside these decoding tokens, in a step with room for `max_tokens`."""
        return self.budget.max_tokens(self._demand(num_decoding, num_proposed, max_tokens))

    def _demand(self, num_decoding: int, num_proposed: int, max_tokens: int) -> PrefillDemand:
        """The prompts that have begun, and those that could begin with the free slots and blocks."""
        table, active, queue = self._slots, self._active, self._queue
        running = np.array(active.running, dtype=np.int32)
        lengths = table.num_tokens[running]
        begun = lengths[lengths - table.num_computed[running] > 1]
        preempted = sum(int(table.num_tokens[sequence.slot]) for sequence in active.preempted)
        num_prompts, num_tokens = len(begun) + len(active.preempted), int(begun.sum()) + preempted
        if num_waiting := len(queue):
            mean_length = queue.num_tokens / num_waiting
            num_fitting = active.pool.available // max(1, active.pool.blocks_for(int(mean_length)))
            num_waiting = min(num_waiting, table.num_free, num_fitting)
        return PrefillDemand(
            num_decoding,
            num_prompts + num_waiting,
            num_tokens + (int(num_waiting * mean_length) if num_waiting else 0),
            max_tokens,
            num_proposed,
        )

    def choose(self, turn: Turn, max_tokens: int, max_rows: int) -> Iterator[tuple[int, int]]:
        """Yield the slots that prefill, with the number of tokens of each."""
        if max_tokens <= 0 or max_rows <= 0:
            return
        table, num_image_features, num_partial = self._slots, 0, 0
        for slot in self._candidates(turn):
            num_left = table.num_to_run(slot)
            count = min(num_left, self._max_chunk_tokens, max_tokens)
            if count < num_left and (num_partial := num_partial + 1) > self._max_partial > 0:
                return
            if self._image_cache is not None and table.has_images[slot]:
                first = int(table.num_computed[slot])
                needed = num_features(table[slot], first, first + count)
                if num_image_features and num_image_features + needed > self._image_cache.size:
                    return  # the sequence runs in the next step
                num_image_features += needed
            yield slot, count
            max_tokens, max_rows = max_tokens - count, max_rows - 1
            if max_tokens <= 0 or max_rows <= 0:
                return

    def _candidates(self, turn: Turn) -> Iterator[int]:
        """Yield slots with prompt tokens to run: of running, then preempted, then new sequences."""
        table, active, may_run = self._slots, self._active, turn.may_run
        running = np.array(active.running, dtype=np.int32)
        for slot in running[table.num_tokens[running] - table.num_computed[running] > 1].tolist():
            if may_run is None or may_run(table[slot].request.id):
                yield slot
        for sequence in [s for s in active.preempted if may_run is None or may_run(s.request.id)]:
            slot = sequence.slot
            if table.num_known[slot] < table.num_tokens[slot]:
                continue  # the sequence's last token is in flight
            if not active.has_adapter_room(sequence) or not active.resume(sequence):
                return
            yield slot
        while turn.admits and table.has_free and not (turn.is_background and self._leaves_few_slots()):
            waiting = self._queue.walk(is_background=turn.is_background)
            new = next((s for s in waiting if may_run is None or may_run(s.request.id)), None)
            if new is None or not self._admit(new, turn.now_s):
                return
            yield new.slot

    def _admit(self, sequence: SequenceState, now_s: float) -> bool:
        """Start a waiting sequence; False if there is no room for it."""
        if not self._active.has_adapter_room(sequence) or not self._active.start(sequence):
            return False
        self._queue.start(sequence, now_s)
        return True

    def _leaves_few_slots(self) -> bool:
        """Whether background sequences hold half of all slots. The rest is kept for interactive sequences."""
        return self._active.num_background >= self._max_background
