"""Generation requests that are not finished. Owns their sequences, deadlines and failures, and frees
everything that a request holds when it finishes, fails or is cancelled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.content import PrefixKeys
from penstock.errors import PenstockError
from penstock.scheduler.active_sequences import ActiveSequences
from penstock.scheduler.prompt_queue import PromptQueue
from penstock.scheduler.queue import HEAD_START_S
from penstock.scheduler.sequence import Constraint, SequenceState
from penstock.scheduler.start_deadlines import StartDeadlines
from penstock.scheduler.suspects import SuspectRequests
from penstock.types import Request, SamplerParams

_BEHIND_ALL = 1e12  # seconds added to the rank of background sequences, so that they are preempted first


class UnfinishedRequests:
    """add → finish each sequence, or cancel."""

    def __init__(self, queue: PromptQueue, active: ActiveSequences) -> None:
        self.suspects = SuspectRequests()
        self.background_ids: set[str] = set()
        self.unreplayable_ids: set[str] = set()  # requests whose prompts no graph can run beside decodes
        self._queue = queue
        self._active = active
        self._sequences: dict[str, list[SequenceState]] = {}  # by request id
        self._failures: dict[str, PenstockError] = {}  # errors of requests that cannot continue, by id
        self._may_have_deadlines = False
        self._start_by = StartDeadlines(self._waits_to_start)
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: str) -> list[SequenceState]:
        """The unfinished sequences of a request."""
        return self._sequences[request_id]

    def requests(self) -> list[Request]:
        return [sequences[0].request for sequences in self._sequences.values()]

    @property
    def has_interactive(self) -> bool:
        """Whether there are any interactive requests."""
        return len(self._sequences) > len(self.background_ids)

    def is_interactive(self, request_id: str) -> bool:
        return request_id not in self.background_ids

    def add(
        self,
        request: Request,
        sampling: SamplerParams,
        constraints: Sequence[Constraint] = (),
        start_by_s: float | None = None,
    ) -> None:
        """Queue the sequences of a request. `constraints` is empty or has one for each row."""
        number = next(self._count)
        start = request.arrival_s + request.priority * HEAD_START_S
        if request.is_background:
            start += _BEHIND_ALL
            self.background_ids.add(request.id)
        if _is_unreplayable(request, sampling):
            self.unreplayable_ids.add(request.id)
        size = self._active.pool.block_size
        sequences = [
            SequenceState(request, sampling, row, (start, number, row), PrefixKeys(request, row, size))
            for row in range(request.num_rows)
        ]
        for sequence, constraint in zip(sequences, constraints, strict=False):
            sequence.constraint = constraint
        self._sequences[request.id] = sequences
        self._may_have_deadlines |= request.deadline_s is not None
        self._queue.add(request, sequences)
        if start_by_s is not None:
            self._start_by.add(start_by_s, sequences)

    # Finish, cancel and fail.

    def finish(self, sequence: SequenceState) -> None:
        """Free everything that a finished sequence holds."""
        num_known = int(self._active.slots.num_known[sequence.slot])
        self._queue.note_output(num_known - len(sequence.prompt))
        sequences = self._sequences[sequence.request.id]
        sequences.remove(sequence)
        if not sequences:
            del self._sequences[sequence.request.id]
            self.background_ids.discard(sequence.request.id)
            self.unreplayable_ids.discard(sequence.request.id)
        self._drop(sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request. Its blocks and slots are free for the next step."""
        for sequence in self._sequences.pop(request_id, ()):
            self._drop(sequence)
        self.background_ids.discard(request_id)
        self.unreplayable_ids.discard(request_id)
        self.suspects.discard(request_id)

    def _drop(self, sequence: SequenceState) -> None:
        if sequence.slot < 0:
            self._queue.remove(sequence)
        else:
            self._active.drop(sequence)

    def clear(self) -> list[str]:
        """Drop every request and return their ids."""
        request_ids = list(self._sequences)
        for request_id in request_ids:
            self.cancel(request_id)
        return request_ids

    def fail(self, request_id: str, error: PenstockError) -> None:
        """Record that a request cannot continue. `take_failures` drops it."""
        self._failures[request_id] = error

    def take_failures(self) -> dict[str, PenstockError]:
        """Drop the requests that cannot continue, and return their errors by request id."""
        failures, self._failures = self._failures, {}
        for request_id in failures:
            self.cancel(request_id)
        return failures

    # Deadlines.

    def expire(self, now_s: float) -> list[Request]:
        """Drop and return the requests whose deadline has passed."""
        if not self._may_have_deadlines:
            return []
        expired = [r for r in self.requests() if r.deadline_s is not None and r.deadline_s <= now_s]
        for request in expired:
            self.cancel(request.id)
        return expired

    def overdue(self, now_s: float) -> list[Request]:
        """Drop and return the requests that had to start by now and have not."""
        requests = [sequences[0].request for sequences in self._start_by.pop_overdue(now_s)]
        for request in requests:
            self.cancel(request.id)
        return requests

    def _waits_to_start(self, sequences: list[SequenceState]) -> bool:
        """Whether no sequence of a request has started."""
        if not sequences or len(sequences) < sequences[0].request.num_rows:
            return False
        is_current = self._sequences.get(sequences[0].request.id) is sequences
        return is_current and all(sequence.slot < 0 for sequence in sequences)

    def next_deadline_s(self) -> float | None:
        start_by_s = self._start_by.next_s()
        if not self._may_have_deadlines:
            return start_by_s
        deadlines = [request.deadline_s for request in self.requests()]
        self._may_have_deadlines = any(d is not None for d in deadlines)
        return min((d for d in (start_by_s, *deadlines) if d is not None), default=None)

    def check_integrity(self) -> None:
        """Assert that every sequence waits or has a slot, and that nothing else holds blocks."""
        num_sequences = sum(map(len, self._sequences.values()))
        assert num_sequences == self._active.check_integrity() + self._queue.check_integrity()
        assert self.background_ids <= self._sequences.keys()
        assert self.unreplayable_ids <= self._sequences.keys()
        pool = self._active.pool
        if not self._sequences:
            assert pool.available == pool.num_blocks, "blocks are held though no sequence is left"


def _is_unreplayable(request: Request, sampling: SamplerParams) -> bool:
    """Whether no graph can run a request's prompt beside decodes."""
    has_images = request.images is not None or request.rope_positions is not None
    return has_images or sampling.prompt_logprobs is not None
