"""Sequences that wait for a slot. Owns their fair order and their token counts. Background sequences wait in
a separate queue."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.backlog import max_queued_of
from penstock.errors import QueueFull
from penstock.scheduler.fair_queue import STEPS_IN_HEAD_START, FairQueue
from penstock.scheduler.limits import GenerationLimits
from penstock.scheduler.sequence import SequenceState
from penstock.types import Request

_LATEST_WEIGHT = 0.05  # weight of the latest sequence in the mean output length


class PromptQueue:
    """add → start, or remove."""

    def __init__(self, limits: GenerationLimits) -> None:
        self.num_tokens = 0  # waiting prompt tokens, without background sequences
        self.num_background_tokens = 0
        self.num_started_tokens = 0  # prompt tokens of all sequences started so far, without background ones
        self._max_tokens = limits.max_queued_tokens
        self._interactive = FairQueue[SequenceState]()
        self._interactive.head_start_tokens = STEPS_IN_HEAD_START * limits.max_tokens
        self._background = FairQueue[SequenceState]()
        self._mean_output = 0.0  # mean number of tokens that finished sequences have generated

    def __len__(self) -> int:
        """Number of waiting sequences, without background ones."""
        return len(self._interactive)

    @property
    def weight(self) -> float:
        """The total weight of clients with waiting prompts."""
        return self._interactive.weight

    def num_tokens_of(self, client: str) -> int:
        """Tokens of a client's waiting prompts."""
        return self._interactive.num_tokens_of(client)

    def walk(self, *, is_background: bool = False) -> Iterator[SequenceState]:
        """The sequences in the order in which they should run."""
        return (self._background if is_background else self._interactive).walk()

    def check_room(self, request: Request) -> None:
        """Raise `QueueFull` if too many tokens wait."""
        limit = self._max_tokens
        waiting = self.num_background_tokens if request.is_background else self.num_tokens
        if not waiting or waiting + request.num_tokens <= limit:
            return
        if not request.is_background:  # a client below its share may exceed the limit a little
            held = self.num_tokens_of(request.client)
            limit = max_queued_of(limit, waiting, held, self._interactive.num_clients)
        if waiting + request.num_tokens > limit:
            raise QueueFull(
                f"{waiting} tokens of prompts are waiting and at most {limit} may; try again shortly"
            )

    def add(self, request: Request, sequences: list[SequenceState]) -> None:
        """Queue the sequences of a request."""
        line = self._line_of(request)
        for sequence in sequences:
            num_tokens = len(sequence.prompt)
            sequence.client = line.add(sequence.rank, sequence, num_tokens)
            sequence.client.num_tokens += num_tokens
        self._count(request, request.num_tokens)

    def start(self, sequence: SequenceState, now_s: float) -> None:
        """Remove a sequence that has got its slot. Charge its client for its prompt and expected output."""
        request, num_tokens = sequence.request, len(sequence.prompt)
        output = min(self._mean_output, sequence.sampling.max_tokens)
        self.remove(sequence, num_charged=num_tokens + output)
        if not request.is_background:
            self.num_started_tokens += num_tokens
        sequence.queued_s = max(0.0, now_s - request.arrival_s)

    def remove(self, sequence: SequenceState, num_charged: float = 0.0) -> None:
        """Remove a sequence from the queue, and charge its client for `num_charged` tokens."""
        num_tokens, client = len(sequence.prompt), sequence.client
        line = self._line_of(sequence.request)
        self._count(sequence.request, -num_tokens)
        assert client is not None
        client.num_tokens -= num_tokens
        if num_charged:
            line.charge(client, num_charged)
        line.remove(client, sequence.rank)

    def note_output(self, num_tokens: int) -> None:
        """Record how many tokens a finished sequence has generated."""
        self._mean_output += _LATEST_WEIGHT * (num_tokens - self._mean_output)

    def check_integrity(self) -> int:
        """Assert that the counts are right. Returns the number of waiting sequences, background included."""
        waiting, background = list(self.walk()), list(self.walk(is_background=True))
        assert all(not sequence.blocks for sequence in waiting + background)
        assert self.num_tokens == sum(len(sequence.prompt) for sequence in waiting)
        assert self.num_background_tokens == sum(len(sequence.prompt) for sequence in background)
        return len(waiting) + len(background)

    def _line_of(self, request: Request) -> FairQueue[SequenceState]:
        return self._background if request.is_background else self._interactive

    def _count(self, request: Request, num_tokens: int) -> None:
        if request.is_background:
            self.num_background_tokens += num_tokens
        else:
            self.num_tokens += num_tokens
