"""Carries log probabilities from steps to answers: of prompts, chunk by chunk, and of sampled tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.sequence import SequenceState
from penstock.scheduler.slots import SlotTable
from penstock.scheduler.steps import PromptRequest
from penstock.types import Ints, PromptPlan, SamplePlan, TokenLogprobs


class Logprobs(NamedTuple):
    """The log probabilities of one answer; all None if none were requested."""

    ids: Ints | None = None
    values: NDArray[np.float32] | None = None
    ranks: Ints | None = None


NO_LOGPROBS = Logprobs()


class PromptLogprobs:
    """Collects log probabilities of prompts, until they are sent with the first sampled token."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._num_asking = 0  # sequences with a slot that request them

    def join(self, sequence: SequenceState) -> None:
        self._num_asking += sequence.sampling.prompt_logprobs is not None

    def leave(self, sequence: SequenceState) -> None:
        self._num_asking -= sequence.sampling.prompt_logprobs is not None

    def requested(self, slots: Ints) -> PromptRequest | None:
        """The prompts among these slots whose log probabilities are still to be computed."""
        if not self._num_asking:
            return None
        asked = []
        for slot in slots.tolist():
            sequence = self._slots[slot]
            top = sequence.sampling.prompt_logprobs if sequence.wants_prompt_logprobs else None
            asked.append(-1 if top is None else top)
        if max(asked) < 0:
            return None
        lengths = np.where(np.array(asked) < 0, 0, self._slots.prompt_length[slots]).astype(np.int32)
        return PromptRequest(lengths, max(asked))

    def store(self, plan: PromptPlan, sample: SamplePlan, found: TokenLogprobs) -> list[SequenceState]:
        """Store a step's prompt log probabilities by position, since a sequence that started over computes
        some again. Returns the sequences with NaN values."""
        not_finite: list[SequenceState] = []
        at = 0
        for row, begin, count in zip(
            plan.rows.tolist(), plan.begins.tolist(), plan.counts.tolist(), strict=True
        ):
            slot = int(sample.slots[row])
            sequence = self._slots.find(slot)
            if sequence is not None and self._slots.epoch[slot] == sample.epochs[row]:
                stored = sequence.prompt_logprobs = sequence.prompt_logprobs or _empty(sequence)
                for into, array in zip(stored, found, strict=True):
                    part = array[at : at + count]
                    if np.isnan(part).any():
                        not_finite.append(sequence)
                    into[begin : begin + count] = part if part.ndim == 1 else part[:, : into.shape[1]]
            at += count
        return not_finite

    @staticmethod
    def take(sequence: SequenceState) -> Logprobs:
        """Take the prompt log probabilities to send with the first sampled token of a sequence."""
        if not sequence.wants_prompt_logprobs:
            return NO_LOGPROBS
        sequence.prompt_logprobs_sent = True
        return Logprobs(*(sequence.prompt_logprobs or _empty(sequence)))


def _empty(sequence: SequenceState) -> TokenLogprobs:
    count, width = len(sequence.prompt) - 1, 1 + (sequence.sampling.prompt_logprobs or 0)
    ids, values = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
    return TokenLogprobs(ids, values, np.zeros(count, np.int32))


def split_logprobs(
    found: TokenLogprobs | None, num_logprobs: Ints, keep: NDArray[np.bool_]
) -> list[Logprobs]:
    """Log probabilities of each sampled row that is kept. A step returns them only for rows that request
    them, with as many columns as the largest request."""
    if found is None:
        return [NO_LOGPROBS] * int(keep.sum())
    out: list[Logprobs] = []
    at = 0
    for count, kept in zip(num_logprobs.tolist(), keep.tolist(), strict=True):
        own = NO_LOGPROBS
        if count >= 0:
            cell = slice(at, at + 1), slice(0, 1 + count)
            own = Logprobs(found.ids[cell].copy(), found.values[cell].copy(), found.ranks[at : at + 1].copy())
            at += 1
        if kept:
            out.append(own)
    return out
