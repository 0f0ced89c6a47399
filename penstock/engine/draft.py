"""Proposes tokens with a draft model: a small model with the same vocabulary that runs ahead of the engine's
model.

The draft model has its own weights, sampler and KV cache. Its cache uses the block tables of the engine's
model, so blocks are allocated, shared and freed in one place. Its steps are ordinary generation plans. All
steps of a proposal are launched without waiting in between, and their results are read at the end.

Its sampler uses the same noise as that of the engine's model: seed, stream and position of a token are the
same. So a sampled token is accepted about as often as the two distributions agree on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.runner.base import DraftRunner
from penstock.scheduler.prompt_lookup import Proposals
from penstock.scheduler.slots import SlotTable
from penstock.scheduler.speculation import is_last_of_run
from penstock.scheduler.steps import SamplerChanges, SequenceMemory, StepRows, generation_plan
from penstock.types import (
    GeneratePlan,
    Ints,
    Join,
    Rewind,
    SampledResult,
    SamplerParams,
    StepResult,
    runs,
)

log = logging.getLogger("penstock.engine")

MAX_FAILURES = 3  # failures in a row after which the draft model is not used any more
_MAX_LAG = 2  # known tokens that the first step of a proposal may run: the last one and the one before it


class _Chosen(NamedTuple):
    """The sequences of a proposal. All arrays are [sequences]."""

    rows: NDArray[np.intp]  # indices in the slots passed to `propose`
    slots: Ints
    num_known: Ints
    num_cached: Ints  # tokens whose keys the draft's cache holds
    counts: Ints  # tokens to propose

    def where(self, mask: NDArray[np.bool_]) -> _Chosen:
        return _Chosen(
            self.rows[mask],
            self.slots[mask],
            self.num_known[mask],
            self.num_cached[mask],
            self.counts[mask],
        )


class DraftProposer:
    """A `Proposer` that runs a draft model and waits for its tokens."""

    is_free = False

    def __init__(
        self,
        slots: SlotTable,
        draft: DraftRunner,
        *,
        num_tokens: int,
        vocab_size: int,
        block_size: int,
        max_tokens: int,
    ) -> None:
        """`vocab_size`: that of the engine's model. `max_tokens`: known tokens that one proposal may run."""
        self.num_tokens = num_tokens
        # Called with True before a wait that may be long, and with False after it.
        self.mark_wait: Callable[[bool], None] = lambda waits: None
        self._slots, self._draft, self._vocab_size = slots, draft, vocab_size
        self._memory = SequenceMemory(slots.token_ids, slots.block_tables, block_size)
        self._max_tokens = max_tokens
        self._num_failures = 0  # in a row
        count = slots.num_slots
        # For each slot, the draft's cache holds the keys of the first `_num_run` tokens of the sequence, then
        # of `_num_ahead` drafted tokens. Keys of drafted tokens are valid as far as the sequence continued
        # with the same tokens.
        self._visit: Ints = np.full(count, -1, dtype=np.int32)  # visit of the slot when they were written
        self._num_run: Ints = np.zeros(count, dtype=np.int32)
        self._num_ahead: Ints = np.zeros(count, dtype=np.int32)
        self._ahead: Ints = np.full((count, num_tokens), -1, dtype=np.int32)
        self._has_joined = np.zeros(count, dtype=bool)  # whether it is in the draft's sampler
        self._is_excluded = np.zeros(count, dtype=bool)  # whether nothing is drafted for it

    @property
    def is_given_up(self) -> bool:
        """Whether too many steps have failed."""
        return self._num_failures >= MAX_FAILURES

    def forget(self, slots: Ints) -> None:
        """Forget the sequences of these slots, because other sequences have taken them."""
        self._visit[slots] = -1
        self._has_joined[slots] = False
        self._is_excluded[slots] = self._slots.has_images[slots]  # the draft model reads only text

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        """Propose tokens for the sequences that the draft model has caught up with. If a draft step fails,
        nothing is proposed, and the engine's model decodes without proposals."""
        proposals = _nothing(len(slots), self.num_tokens)
        chosen = self._choose(slots, max_counts)
        if not len(chosen.slots):
            return proposals
        began_s = time.perf_counter()
        self.mark_wait(True)
        try:
            proposals = self._draft_tokens(chosen, proposals)
            self._num_failures = 0
        except Exception as error:
            self._step_failed(chosen.slots, error)
        finally:
            self.mark_wait(False)
        return proposals._replace(seconds=time.perf_counter() - began_s)

    # Choose sequences, and find what the draft's cache holds of them.

    def _choose(self, slots: Ints, max_counts: Ints) -> _Chosen:
        """The sequences that the draft model can run and that have room for a proposal."""
        table = self._slots
        known = table.num_known[slots]
        can = (max_counts > 0) & ~self._is_excluded[slots] & (known == table.num_tokens[slots])
        can &= known + max_counts <= self._draft.max_length
        rows = np.flatnonzero(can if not self.is_given_up else np.zeros_like(can))
        own = slots[rows]
        chosen = _Chosen(rows, own, known[rows], self._num_cached(own), max_counts[rows])
        if self._draft.vocab_size >= self._vocab_size:
            return chosen
        is_unknown = self._has_unknown_token(chosen)
        self._is_excluded[own[is_unknown]] = True
        return chosen.where(~is_unknown)

    def _num_cached(self, slots: Ints) -> Ints:
        """Number of tokens of each sequence whose keys are in the draft's cache, without the last token."""
        table, known = self._slots, self._slots.num_known[slots]
        base, width = self._num_run[slots], self.num_tokens
        ahead = np.arange(width, dtype=np.int32)
        positions = np.minimum(base[:, None] + ahead, table.token_ids.shape[1] - 1)
        is_right = table.token_ids[slots[:, None], positions] == self._ahead[slots]
        is_right &= ahead < np.minimum(self._num_ahead[slots], known - base)[:, None]
        num_right = np.logical_and.accumulate(is_right, axis=1).sum(axis=1, dtype=np.int32)
        is_current = self._visit[slots] == table.visit[slots]
        cached: Ints = np.minimum(np.where(is_current, base + num_right, np.int32(0)), known - 1)
        return cached

    def _has_unknown_token(self, chosen: _Chosen) -> NDArray[np.bool_]:
        """[sequences], whether a token that the draft model has yet to run is not in its vocabulary."""
        counts = chosen.num_known - chosen.num_cached  # at least 1
        ids = self._slots.token_ids[np.repeat(chosen.slots, counts), runs(chosen.num_cached, counts)]
        if not len(ids):
            return np.zeros(0, dtype=bool)
        unknown: NDArray[np.bool_] = np.logical_or.reduceat(
            ids >= self._draft.vocab_size, np.cumsum(counts) - counts
        )
        return unknown

    # Run.

    def _draft_tokens(self, chosen: _Chosen, proposals: Proposals) -> Proposals:
        """Launch all steps of a proposal, and read their tokens."""
        changes = self._changes(chosen.slots)
        self._visit[chosen.slots] = -1  # until all steps have succeeded
        # Sequences that are far behind first run all their tokens but the last as prompts, up to the token
        # limit of a step.
        lag = chosen.num_known - chosen.num_cached
        behind = np.where(lag > _MAX_LAG, lag - 1, 0)
        taken: Ints = np.clip(self._max_tokens - (np.cumsum(behind) - behind), 0, behind).astype(np.int32)
        chosen = chosen._replace(num_cached=chosen.num_cached + taken)
        plans, num_prompt_steps = [], 0
        if taken.any():
            some = chosen.where(taken > 0)
            begins, counts = some.num_cached - taken[taken > 0], taken[taken > 0]
            samples = np.zeros(len(counts), dtype=bool)
            plans.append(self._plan(self._step_rows(some, begins, counts, samples), changes))
            changes, num_prompt_steps = SamplerChanges(), 1
        ready = chosen.where(chosen.num_known - chosen.num_cached <= _MAX_LAG)
        for ahead in range(int(ready.counts.max(initial=0))):
            some = ready.where(ready.counts > ahead)
            plans.append(self._decode_plan(some, ahead, changes))
            changes = SamplerChanges()
        results = self._run(plans)
        row_of = np.zeros(self._slots.num_slots, dtype=np.intp)
        row_of[ready.slots] = ready.rows
        for ahead, (plan, result) in enumerate(
            zip(plans[num_prompt_steps:], results[num_prompt_steps:], strict=True)
        ):
            is_own = plan.sample.sampled_slots != self._draft.padding_slot
            rows = row_of[plan.sample.sampled_slots[is_own]]
            proposals.token_ids[rows, ahead] = result.token_ids[is_own]
        self._remember(chosen, ready, proposals.token_ids)
        proposals.counts[ready.rows] = self._num_usable(proposals.token_ids[ready.rows], ready.counts)
        return proposals._replace(catch_up_s=sum(each.device_s for each in results[:num_prompt_steps]))

    def _decode_plan(self, chosen: _Chosen, ahead: int, changes: SamplerChanges) -> GeneratePlan:
        """The plan of a step that drafts one token per sequence. If the draft's cache lacks the token before
        the last, the first step runs it too, as a separate row whose sample is discarded."""
        ones = np.ones(len(chosen.slots), dtype=np.int32)
        if ahead:
            begins = chosen.num_known + np.int32(ahead - 1)
            return self._plan(self._step_rows(chosen, begins, ones, ones.astype(bool)), changes)
        lag = chosen.num_known - chosen.num_cached
        rows = self._step_rows(chosen, chosen.num_cached, ones, ones.astype(bool))
        offsets = runs(np.zeros_like(lag), lag)
        rows = rows.ordered(np.repeat(np.arange(len(lag)), lag))
        rows = rows._replace(begins=rows.begins + offsets, offsets=offsets)
        plan = self._plan(rows, changes)
        num_sampled = chosen.num_known - self._slots.prompt_length[chosen.slots]
        is_last = is_last_of_run(offsets if plan.paged.offsets is None else plan.paged.offsets)
        sampled_slots = np.where(is_last, plan.sample.slots, np.int32(self._draft.padding_slot))
        sample = replace(plan.sample, sampled_slots=sampled_slots, rewind=Rewind(chosen.slots, num_sampled))
        return replace(plan, sample=sample)

    def _step_rows(self, chosen: _Chosen, begins: Ints, counts: Ints, samples: NDArray[np.bool_]) -> StepRows:
        slots = chosen.slots
        return StepRows(
            slots=slots,
            begins=begins,
            counts=counts,
            samples=samples,
            num_known=chosen.num_known,
            num_logprobs=np.full(len(slots), -1, dtype=np.int32),
            epochs=self._slots.epoch[slots],
            visits=self._slots.visit[slots],
        )

    def _plan(self, rows: StepRows, changes: SamplerChanges) -> GeneratePlan:
        return generation_plan(rows, self._memory, changes)

    def _changes(self, slots: Ints) -> SamplerChanges:
        """Add new sequences to the draft's sampler, with the parameters that decide which token is drawn."""
        new = slots[~self._has_joined[slots]].tolist()
        self._has_joined[new] = True
        joins = []
        for slot in new:
            params, stream = self._slots[slot].sampling, int(self._slots.stream[slot])
            own = SamplerParams(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed,
            )
            joins.append(Join(slot, own, self._slots.token_ids[slot, :0], stream=stream))
        return SamplerChanges(leaves=tuple(new), joins=tuple(joins))

    def _run(self, plans: list[GeneratePlan]) -> list[SampledResult]:
        """Launch all steps, then wait for all of them, even if one fails. Raises the first error."""
        launched: list[Future[StepResult]] = []
        try:
            launched.extend(self._draft.runner.launch(plan) for plan in plans)
        finally:
            errors = [error for each in launched if (error := each.exception()) is not None]
        if errors:
            raise errors[0]
        results = [each.result() for each in launched]
        return [result for result in results if isinstance(result, SampledResult)]

    def _remember(self, chosen: _Chosen, ready: _Chosen, token_ids: Ints) -> None:
        """Record which keys the cache holds now."""
        self._visit[chosen.slots] = self._slots.visit[chosen.slots]
        self._num_run[chosen.slots] = chosen.num_cached
        self._num_ahead[chosen.slots] = 0
        self._num_run[ready.slots] = ready.num_known
        self._num_ahead[ready.slots] = ready.counts - 1  # the last drafted token has not run
        self._ahead[ready.slots] = token_ids[ready.rows]

    def _num_usable(self, token_ids: Ints, counts: Ints) -> Ints:
        """Number of tokens of each proposal that the engine's model may run: those before the first that is
        outside its vocabulary or could not be sampled."""
        is_usable = (token_ids >= 0) & (token_ids < self._vocab_size)
        is_usable &= np.arange(self.num_tokens, dtype=np.int32) < counts[:, None]
        usable: Ints = np.logical_and.accumulate(is_usable, axis=1).sum(axis=1, dtype=np.int32)
        return usable

    def _step_failed(self, slots: Ints, error: Exception) -> None:
        """Stop drafting for these sequences; after too many failures in a row, for all sequences."""
        self._num_failures += 1
        self._has_joined[:] = False  # the sampler's state is unknown
        self._visit[:] = -1
        self._is_excluded[slots] = True
        log.warning("a step of the draft model %s failed: %s", self._draft.name, error)
        if self.is_given_up:
            log.error(
                "the draft model %s has failed %d times in a row and is not used any more",
                self._draft.name,
                self._num_failures,
            )


def _nothing(count: int, width: int) -> Proposals:
    tokens: Ints = np.full((count, width), -1, dtype=np.int32)
    return Proposals(tokens, np.zeros(count, dtype=np.int32))
