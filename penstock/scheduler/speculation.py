"""Speculative decoding: which sequences run proposed tokens, how many, and whether that is faster.

A speculative step runs the last token of a sequence and its proposed tokens, each as a row of its own. It
samples after each row, exactly as plain decoding would, with the same noise (`kernels.sampling`). A proposal
is accepted if it equals the sample of the row before it. So the output does not change, and a step yields one
more token for each accepted proposal.

Proposals need the known tokens, so no decode step is planned ahead while speculation is on. Step times are
measured continuously, to decide whether the gained tokens outweigh the longer steps. While speculation is
off, free proposals are still made and compared with the tokens that follow. A draft model is not free: it
runs in trials of a few steps, which measure its gain again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.decode_times import DecodeTimes
from penstock.scheduler.prompt_lookup import Proposals
from penstock.scheduler.sequence import SequenceState
from penstock.scheduler.slots import SlotTable
from penstock.types import Ints, SamplePlan, VerifyPlan

MAX_ROWS = 1024  # rows of a decode step, proposed tokens included; larger steps run without a graph
_LATEST_WEIGHT = 0.2  # weight of the latest proposal in a sequence's means
_PRIOR_GAIN = 0.5  # expected gain of a proposal in tokens, before any is compared
_PRIOR_TRIES = 2.0  # weight of the expected acceptance of a new sequence, in proposed tokens
_PRIOR_ACCEPTANCE = 0.7
_MARGIN = 1.03  # speed-up that speculation must promise before it is switched on
_MAX_ROW_COST = 0.5  # upper limit of the cost of a proposed token, in decoded tokens
_RETRY_AFTER = 32  # tokens to wait before the draft model is tried again on a sequence that it predicts badly


class Proposer(Protocol):
    num_tokens: int  # maximum number of tokens proposed per sequence

    @property
    def is_free(self) -> bool:
        """Whether proposals are free for the device. If not, propose only tokens that will run, for sequences
        that have KV cache blocks for them."""

    def propose(self, slots: Ints, max_counts: Ints) -> Proposals:
        """Propose tokens after the known tokens of these slots, at most `max_counts` [slots] for each. A free
        proposer may propose more."""

    def forget(self, slots: Ints) -> None:
        """Forget the sequences of these slots, because other sequences have taken them."""


class ProposedRows(NamedTuple):
    """How many proposed tokens each decoding sequence runs. In the slot table, their ids follow its known
    tokens."""

    counts: Ints  # [sequences]
    total: int


@dataclass(slots=True)
class SpeculationCounts:
    """Totals of speculation, for metrics."""

    num_drafts: int = 0  # proposals that ran; one per sequence and step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_s: float = 0.0  # time that the draft model took to propose


def can_speculate(sequence: SequenceState) -> bool:
    """Whether proposed tokens of a sequence can be verified in one step. Penalties and bad words prevent it,
    because they depend on the tokens before. Other edits of logits prevent it, because their values are
    stored once per sequence, not per row."""
    params = sequence.sampling
    edits = (
        params.logit_bias
        or params.bad_token_ids
        or params.allowed_token_ids is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
    )
    return sequence.constraint is None and not edits


def is_last_of_run(offsets: Ints) -> NDArray[np.bool_]:
    """Which rows are the last of their sequence. `offsets`: number of earlier rows of the same sequence."""
    is_last = np.ones(len(offsets), dtype=bool)
    is_last[:-1] = offsets[1:] == 0
    return is_last


class Speculation:
    """Speculation for all sequences of a `GenerationScheduler`."""

    def __init__(
        self, slots: SlotTable, pool: BlockPool, proposer: Proposer, *, is_adaptive: bool = True
    ) -> None:
        """Without `is_adaptive`, speculation is always on, and proposals run in full length."""
        self.counts = SpeculationCounts()
        self.accepted_at: NDArray[np.int64] = np.zeros(proposer.num_tokens, dtype=np.int64)  # by position
        self.is_on = not is_adaptive
        self.times = DecodeTimes()
        self.proposer = proposer
        self._slots, self._pool = slots, pool
        self._is_adaptive = is_adaptive
        count, width = slots.num_slots, proposer.num_tokens
        self._epochs = np.full(count, -1, dtype=np.int32)  # slot epochs that the arrays below belong to
        self._eligible = np.zeros(count, dtype=bool)
        self._gain = np.zeros(count)  # mean number of tokens that a proposal gains
        self._hits, self._tries = np.zeros(count), np.zeros(count)  # proposed tokens: accepted, compared
        self._pending: Ints = np.zeros((count, width), dtype=np.int32)  # the latest proposal
        self._pending_count: Ints = np.zeros(count, dtype=np.int32)
        self._pending_at = np.full(count, -1, dtype=np.int32)  # known tokens at the latest proposal; -1: none
        self._tried_at: Ints = np.zeros(count, dtype=np.int32)  # known tokens at the last non-empty proposal
        self._proposed_at = np.full(count, -1, dtype=np.int32)  # known tokens when proposals last ran
        self._catch_up_s = 0.0  # catch-up time of the latest proposals
        self._mean_gain = _PRIOR_GAIN
        self._num_unobserved = 0  # steps since proposals were last compared while speculation was off

    # Plan.

    def must_wait(self, decoding: Ints) -> bool:
        """Whether tokens of these sequences have to be read before their next step is planned. Then all
        sequences wait, because alternating steps of different sequences would take more steps. While
        speculation is off, wait only for steps with proposals, whose number of tokens is not known yet."""
        known = self._slots.num_known[decoding]
        is_unread = known < self._slots.num_tokens[decoding]
        if not self.is_on:
            is_unread &= self._proposed_at[decoding] == known
        return bool(is_unread.any())

    def propose(self, decoding: Ints, max_tokens: int) -> ProposedRows | None:
        """Write proposals after the known tokens of the decoding sequences, at most `max_tokens` in total.
        None if nothing is proposed."""
        if not len(decoding) or not self._is_due():
            return None
        self._meet(decoding)
        self._compare(decoding)
        wanted, is_free = self._worthwhile(decoding), self.proposer.is_free
        limits = np.full_like(wanted, self.proposer.num_tokens)
        if not is_free:
            limits = self._fitting(decoding, wanted, max_tokens)
        proposals = self._make(decoding, limits)
        if not self.is_on:
            return None
        counts = proposals.counts
        if is_free:
            counts = self._fitting(decoding, np.minimum(counts, wanted), max_tokens)
        if not (total := int(counts.sum())):
            return None
        table, own = self._slots, np.repeat(np.arange(len(decoding)), counts)
        offsets = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = decoding[own]
        self._proposed_at[slots] = table.num_known[slots]
        table.token_ids[slots, table.num_known[slots] + offsets] = proposals.token_ids[own, offsets]
        return ProposedRows(counts, total)

    def planned(self, now_s: float, decoding: Ints, num_proposed: int) -> None:
        """Record that a step of only these decoding sequences begins now, and decide whether to speculate
        next."""
        self.times.begin(
            now_s,
            len(decoding),
            num_proposed,
            is_speculative=self.is_on,
            catch_up_s=self._catch_up_s if self.is_on else 0.0,
        )
        if not self._is_adaptive:
            return
        was_on, self.is_on = self.is_on, self._pays(decoding)
        if self.is_on and not was_on and not self.proposer.is_free:
            self._expect_average()

    def interrupted(self) -> None:
        """Record that a step of another kind was planned: the time until the next decode is not measured."""
        self.times.interrupt()

    def _is_due(self) -> bool:
        """Whether to make proposals and compare them now. Always true while speculation is on. While it is
        off, a free proposer proposes once in as many steps as a proposal has tokens."""
        self._num_unobserved += 1
        is_skipped = self._num_unobserved < self.proposer.num_tokens or not self.proposer.is_free
        if not self.is_on and is_skipped:
            return False
        self._num_unobserved = 0
        return True

    def _meet(self, slots: Ints) -> None:
        """Reset the state of slots with new sequences. New sequences are expected to be average."""
        new = slots[self._epochs[slots] != self._slots.epoch[slots]]
        if not len(new):
            return
        self._epochs[new] = self._slots.epoch[new]
        self._eligible[new] = [can_speculate(self._slots[slot]) for slot in new.tolist()]
        self._pending_at[new], self._tried_at[new] = -1, self._slots.num_known[new]
        self._gain[new] = np.where(self._eligible[new], self._mean_gain, 0.0)
        self._tries[new], self._hits[new] = _PRIOR_TRIES, _PRIOR_TRIES * _PRIOR_ACCEPTANCE
        self.proposer.forget(new)

    def _expect_average(self) -> None:
        """Reset the acceptance of all sequences, because no proposals were made for a while. Otherwise a
        trial would propose nothing for sequences that were predicted badly, and never notice an
        improvement."""
        self._tries[:], self._hits[:] = _PRIOR_TRIES, _PRIOR_TRIES * _PRIOR_ACCEPTANCE
        self._pending_at[:] = -1

    def _compare(self, slots: Ints) -> None:
        """Compare the last proposals with the tokens that have followed."""
        table, width = self._slots, self.proposer.num_tokens
        known, at, count = table.num_known[slots], self._pending_at[slots], self._pending_count[slots]
        compared = np.minimum(count, known - at)
        ahead = np.arange(width, dtype=np.int32)
        positions = np.minimum(at[:, None] + ahead, table.token_ids.shape[1] - 1)
        equal = (table.token_ids[slots[:, None], positions] == self._pending[slots]) & (
            ahead < compared[:, None]
        )
        num_equal = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
        is_compared = (at >= 0) & (known > at) & self._eligible[slots]
        self._learn(slots[is_compared], num_equal[is_compared], compared[is_compared])

    def _make(self, slots: Ints, max_counts: Ints) -> Proposals:
        """Make new proposals. The counts of sequences that may not run them are set to 0."""
        table = self._slots
        proposals = self.proposer.propose(slots, max_counts)
        self.counts.draft_s += proposals.seconds
        self._catch_up_s = proposals.catch_up_s
        known = table.num_known[slots]
        self._pending[slots], self._pending_count[slots] = proposals.token_ids, proposals.counts
        self._pending_at[slots] = known
        self._tried_at[slots] = np.where(proposals.counts > 0, known, self._tried_at[slots])
        return proposals._replace(counts=np.where(self._may_run(slots), proposals.counts, 0))

    def _may_run(self, slots: Ints) -> NDArray[np.bool_]:
        """Which sequences may run proposed tokens now."""
        may: NDArray[np.bool_] = self._eligible[slots]
        return may & (self._slots.num_known[slots] >= self._slots.min_length[slots])

    def _learn(self, slots: Ints, num_equal: NDArray[np.intp], compared: Ints) -> None:
        """Update the means with the number of correct tokens in the last proposals."""
        if not len(slots):
            return
        self._gain[slots] += _LATEST_WEIGHT * (num_equal - self._gain[slots])
        weight = np.where(compared > 0, 1 - _LATEST_WEIGHT, 1.0)
        self._hits[slots] = self._hits[slots] * weight + num_equal
        self._tries[slots] = self._tries[slots] * weight + np.minimum(num_equal + 1, compared)
        self._mean_gain += _LATEST_WEIGHT / 4 * (float(num_equal.mean()) - self._mean_gain)

    def _worthwhile(self, slots: Ints) -> Ints:
        """How many proposed tokens of each sequence are worth their cost, by their chance of acceptance."""
        width, may = self.proposer.num_tokens, self._may_run(slots)
        if not self._is_adaptive:
            return np.where(may, np.int32(width), np.int32(0))
        cost = min(self.times.row_cost(len(slots)), _MAX_ROW_COST)
        acceptance = np.clip(self._hits[slots] / self._tries[slots], 1e-3, 0.999)
        counts: Ints = np.minimum(np.log(cost) / np.log(acceptance), width).astype(np.int32)
        if not self.proposer.is_free:  # retry badly predicted sequences, as only proposals are compared
            is_due = self._slots.num_known[slots] - self._tried_at[slots] >= _RETRY_AFTER
            counts = np.where(is_due, np.maximum(counts, np.int32(1)), counts)
        return np.where(may, counts, np.int32(0))

    def _fitting(self, slots: Ints, counts: Ints, max_tokens: int) -> Ints:
        """Limit `counts` to the rest of each sequence's length, the room of the step, and the free blocks. No
        sequence is preempted for a proposal."""
        table, pool = self._slots, self._pool
        length = table.num_tokens[slots]
        counts = np.minimum(counts, table.max_length[slots] - length - 1)
        room = max(0, min(max_tokens, MAX_ROWS - len(slots)))
        if int(counts.sum()) > room:
            counts = np.clip(room - (np.cumsum(counts) - counts), 0, counts)
        needed = -(-(length + counts) // pool.block_size) - table.num_blocks[slots]
        short = slots[needed > 0]
        if len(short) and (total := int(needed[needed > 0].sum())) <= pool.available - len(slots):
            blocks = pool.allocate(total)
            for slot, number in zip(short.tolist(), needed[needed > 0].tolist(), strict=True):
                if blocks is not None:
                    table.add_blocks(table[slot], [blocks.pop() for _ in range(number)])
        fitting: Ints = np.minimum(counts, table.num_blocks[slots] * pool.block_size - length)
        return fitting.astype(np.int32)

    # Collect.

    def verify(
        self, sample: SamplePlan, verify: VerifyPlan, token_ids: Ints, current: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which sampled tokens to keep: those after accepted proposals, up to a stop token. `current`:
        whether the sampled token still belongs to its sequence."""
        counts, num_accepted = verify.counts, verify.num_accepted(token_ids)
        keep = verify.offsets <= np.repeat(num_accepted, counts)
        stops = keep & self._slots.stopped(sample.sampled_slots, token_ids, verify.offsets)
        if stops.any():
            first_stop = np.minimum.reduceat(np.where(stops, verify.offsets, len(stops)), verify.firsts)
            keep &= verify.offsets <= np.repeat(first_stop, counts)
        is_verified = current[verify.firsts] & (counts > 1)
        self._count(counts[is_verified] - 1, num_accepted[is_verified])
        return keep

    def _count(self, num_proposed: Ints, num_accepted: Ints) -> None:
        totals = self.counts
        totals.num_drafts += len(num_accepted)
        totals.num_draft_tokens += int(num_proposed.sum())
        totals.num_accepted_tokens += int(num_accepted.sum())
        sequences = np.bincount(num_accepted, minlength=len(self.accepted_at) + 1)  # by accepted tokens
        self.accepted_at += sequences[::-1].cumsum()[::-1][1:]

    # Decide.

    @property
    def speedup(self) -> float:
        """Estimated speed-up of decoding by speculation; 1 while it is off."""
        return self.times.speedup(self._mean_gain) if self.is_on else 1.0

    def _pays(self, decoding: Ints) -> bool:
        """Whether the next step should speculate."""
        is_known = self._epochs[decoding] == self._slots.epoch[decoding]
        gain = (
            float(np.where(is_known, self._gain[decoding], self._mean_gain).mean()) if len(decoding) else 0.0
        )
        return self.times.prefers_speculation(
            1.0 + gain, is_on=self.is_on, margin=_MARGIN, is_gain_known=self.proposer.is_free
        )
