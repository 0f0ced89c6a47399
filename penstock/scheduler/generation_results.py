"""Applies the results of a generation step: new tokens, published blocks, failures, finished sequences.

Turns a step's sampled tokens into outputs. Sequences that only continue share one `DecodedTokens`; a sequence
that ends, or requested more than tokens, gets a `GeneratedTokens` of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import NotPossible, PenstockError, RowFailed
from penstock.scheduler.active_sequences import ActiveSequences
from penstock.scheduler.logprobs import Logprobs, PromptLogprobs, split_logprobs
from penstock.scheduler.sequence import Constraint, SequenceState
from penstock.scheduler.speculation import Speculation, is_last_of_run
from penstock.scheduler.unfinished import UnfinishedRequests
from penstock.types import DecodedTokens, GeneratedTokens, Ints, SampledResult, SamplePlan, Timings

_NOT_FINITE = "the model gave logits that are not finite"
_ALL_FORBIDDEN = (
    "no token may follow: the grammar, allowed_token_ids, bad_words and min_tokens of the request leave none"
)
_ALL_MINUS_INFINITY = "no token may follow: the model gives −inf for all of them"


class _NewTokens(NamedTuple):
    """The sampled tokens of a step that are kept. Tokens of one sequence are in order."""

    slots: Ints  # [tokens]
    token_ids: Ints  # [tokens]
    offsets: Ints | None  # [tokens], earlier new tokens of the same sequence; None: one token per sequence
    keep: NDArray[np.bool_]  # [sampled tokens of the step], whether the token is kept
    current: NDArray[np.bool_]  # [rows of the step], whether the row still belongs to its sequence

    def where(self, chosen: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints | None]:
        """Slots, token ids and offsets of the chosen tokens."""
        offsets = None if self.offsets is None else self.offsets[chosen]
        return self.slots[chosen], self.token_ids[chosen], offsets


class ResultCollector:
    """Applies the results of steps to requests and sequences."""

    def __init__(
        self, requests: UnfinishedRequests, active: ActiveSequences, *, prefix_caching: bool
    ) -> None:
        self._requests = requests
        self._active = active
        self._slots = active.slots
        self._prefix_caching = prefix_caching

    def collect(
        self, sample: SamplePlan, result: SampledResult, speculation: Speculation | None
    ) -> list[DecodedTokens | GeneratedTokens]:
        """Append a step's tokens, publish the blocks that it filled, and finish sequences that end."""
        new = self._new_tokens(sample, result, speculation)
        self._append(sample, new)
        if self._prefix_caching:
            self._publish(sample, new.current)
        if sample.prompts is not None and result.prompt_logprobs is not None:
            prompt_logprobs = self._active.prompt_logprobs
            for sequence in prompt_logprobs.store(sample.prompts, sample, result.prompt_logprobs):
                self._requests.fail(sequence.request.id, RowFailed(_NOT_FINITE))
        if self._requests.suspects and len(new.slots):
            ran_well = {request_id for request_id, _ in self._slots.sequence_ids(new.slots)}
            self._requests.suspects.clear(ran_well)
        return self._outcomes(sample, result, new)

    def _new_tokens(
        self, sample: SamplePlan, result: SampledResult, speculation: Speculation | None
    ) -> _NewTokens:
        """Select the tokens to keep. Requests for which no token could be sampled fail."""
        table, token_ids, verify = self._slots, result.token_ids, sample.verify
        current = table.is_current(sample)
        table.device_s[sample.slots[current]] += result.device_s
        keep = current[sample.sampled_rows]
        if speculation is not None and verify is not None:
            keep &= speculation.verify(sample, verify, token_ids, keep)
        if (token_ids < 0).any():
            missing = keep & (token_ids < 0)
            self._fail_without_token(sample.sampled_slots[missing], token_ids[missing])
            current = table.is_current(sample)
            keep &= current[sample.sampled_rows]
        offsets = None if verify is None else verify.offsets[keep]
        return _NewTokens(sample.sampled_slots[keep], token_ids[keep], offsets, keep, current)

    def _fail_without_token(self, slots: Ints, codes: Ints) -> None:
        """Fail requests for which no token could be sampled. If the logits were not finite, unpublish the
        request's blocks too."""
        for slot, code in zip(slots.tolist(), codes.tolist(), strict=True):
            sequence = self._slots.find(slot)
            if sequence is None:  # an earlier sequence of the same request has failed it
                continue
            request_id, not_finite = sequence.request.id, code == -1
            error = RowFailed(_NOT_FINITE) if not_finite else _no_token_error(sequence)
            self._requests.fail(request_id, error)
            for other in self._requests[request_id] if not_finite else ():
                self._active.pool.retract(other.blocks)
            self._requests.cancel(request_id)

    def _append(self, sample: SamplePlan, new: _NewTokens) -> None:
        """Append the new tokens to their sequences."""
        table = self._slots
        if new.offsets is None:
            table.append(new.slots, new.token_ids)
        else:
            has_blocks = table.visit[new.slots] == sample.visits[sample.sampled_rows][new.keep]
            table.append_runs(new.slots, new.token_ids, new.offsets, has_blocks)

    def _publish(self, sample: SamplePlan, current: NDArray[np.bool_]) -> None:
        """Publish the blocks that a step has filled with known tokens, for sequences with the same prefix."""
        table, pool, slots = self._slots, self._active.pool, sample.slots
        size = pool.block_size
        current = current & (table.visit[slots] == sample.visits)
        # Tokens after the computed ones are rejected proposals.
        ends = np.minimum(sample.ends, np.minimum(table.num_known[slots], table.num_computed[slots]))
        for i in np.flatnonzero(current & (ends // size > table.num_published[slots])).tolist():
            slot, num_full = int(slots[i]), int(ends[i]) // size
            sequence = table[slot]
            keys = sequence.prefix_keys.extend(table.token_ids[slot, : num_full * size])
            for block in range(int(table.num_published[slot]), num_full):
                pool.publish(sequence.blocks[block], keys[block])
            table.num_published[slot] = num_full

    # Outputs.

    def _outcomes(
        self, sample: SamplePlan, result: SampledResult, new: _NewTokens
    ) -> list[DecodedTokens | GeneratedTokens]:
        """The outputs of all sequences. Finishes sequences that end."""
        table, slots, token_ids, offsets = self._slots, new.slots, new.token_ids, new.offsets
        stopped, full = table.stopped(slots, token_ids), table.is_full(slots)
        if offsets is not None:
            full &= is_last_of_run(offsets)
        in_detail = stopped | full | table.needs_details[slots]
        if offsets is not None:
            in_detail = np.isin(slots, slots[in_detail])  # keeps all tokens of a sequence together, in order
        if not in_detail.any():
            return [*self._decoded(slots, token_ids, offsets)]
        others = ~in_detail
        outcomes: list[DecodedTokens | GeneratedTokens] = []
        if others.any():
            outcomes += self._decoded(*new.where(others))
        logprobs = split_logprobs(result.logprobs, sample.num_logprobs, new.keep)
        for i in np.flatnonzero(in_detail).tolist():
            ends = bool(stopped[i]), bool(full[i])
            outcomes.append(self._output(table[int(slots[i])], token_ids[i : i + 1], *ends, logprobs[i]))
        return outcomes

    def _decoded(self, slots: Ints, token_ids: Ints, offsets: Ints | None) -> list[DecodedTokens]:
        """New tokens of sequences that only continue: the first of each sequence, then the second ones, …"""
        if not len(slots):
            return []
        if offsets is None or not offsets.any():
            return [DecodedTokens(self._slots.sequence_ids(slots), token_ids)]
        columns = [offsets == offset for offset in range(int(offsets.max()) + 1)]
        return [
            DecodedTokens(self._slots.sequence_ids(slots[column]), token_ids[column]) for column in columns
        ]

    def _output(
        self, sequence: SequenceState, new: Ints, stopped: bool, full: bool, logprobs: Logprobs
    ) -> GeneratedTokens:
        """One new token of a sequence, and its finish reason if it ends. A stop token is not part of the
        output."""
        completed = False
        if sequence.constraint is not None and not stopped:
            completed = self._accept(sequence, sequence.constraint, int(new[0]))
        prompt_logprobs = PromptLogprobs.take(sequence)
        finish, timings = None, None
        if stopped or completed or full:
            finish = "stop" if stopped or completed else "length"
            timings = Timings(sequence.queued_s, float(self._slots.device_s[sequence.slot]))
            self._requests.finish(sequence)
        return GeneratedTokens(
            id=sequence.request.id,
            row=sequence.row,
            token_ids=new[:0] if stopped else new,
            finish_reason=finish,
            stop_token=int(new[0]) if stopped else None,
            logprob_ids=logprobs.ids,
            logprobs=logprobs.values,
            ranks=logprobs.ranks,
            timings=timings,
            prompt_logprob_ids=prompt_logprobs.ids,
            prompt_logprobs=prompt_logprobs.values,
            prompt_ranks=prompt_logprobs.ranks,
        )

    def _accept(self, sequence: SequenceState, constraint: Constraint, token: int) -> bool:
        """Advance a constraint by a token. Returns whether the text is complete."""
        try:
            constraint.accept(token)
        except PenstockError as error:
            self._requests.fail(sequence.request.id, error)
        return constraint.done


def _no_token_error(sequence: SequenceState) -> PenstockError:
    """The reason why no token could be sampled: the request forbids all tokens, or the model gives −inf."""
    sampling = sequence.sampling
    forbids = sampling.grammar or sampling.allowed_token_ids or sampling.bad_token_ids or sampling.min_tokens
    return NotPossible(_ALL_FORBIDDEN) if forbids else RowFailed(_ALL_MINUS_INFINITY)
