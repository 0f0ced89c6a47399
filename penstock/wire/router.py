"""Delivery of an engine's outcomes to the requests that await them.

`OutcomeRouter` runs beside the engine. It divides the outcomes of a step among their owners: connections of
API processes, or event loops of this process. `Subscribers` runs on an event loop. It passes outcomes to the
futures and listeners of single requests. A server has a router, a client has subscribers, and an engine in
the caller's process has both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from penstock.errors import EngineError, EngineUnavailable, PenstockError
from penstock.handle import StreamListener
from penstock.types import (
    DecodedTokens,
    Failure,
    GeneratedTokens,
    Ints,
    Outcome,
    PooledOutput,
    PooledRows,
    SequenceIds,
)

log = logging.getLogger("penstock.client")
Owner = TypeVar("Owner", bound=Hashable)


class _OwnedSequences(NamedTuple):
    """The sequences of a decode step that belong to one owner."""

    rows: SequenceIds
    indices: Ints | None  # their positions within the step; None: the owner owns every sequence


class OutcomeRouter(Generic[Owner]):
    """Divides outcomes among the owners of their requests.

    `add` and `remove` may be called on any thread, but `add` on one thread at a time. All other methods must
    be called on the engine's thread.
    """

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self._divided: SequenceIds = ()  # the sequences that `_division` divides
        self._division: dict[Owner, _OwnedSequences] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._owners

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, request_id: str, owner: Owner) -> bool:
        """Record the owner of a request's outcomes. False if the id is in use; its owner then stays."""
        if request_id in self._owners:
            return False
        self._owners[request_id] = owner
        return True

    def remove(self, request_id: str) -> None:
        self._owners.pop(request_id, None)

    def remove_owner(self, owner: Owner) -> list[str]:
        """Remove all requests of an owner that is gone, and return their ids."""
        theirs = [request_id for request_id, each in self._owners.items() if each == owner]
        for request_id in theirs:
            del self._owners[request_id]
        self._divided = ()  # `_division` still has the owner's sequences
        return theirs

    def owner(self, request_id: str) -> Owner | None:
        return self._owners.get(request_id)

    def route(
        self, outcomes: Iterable[Outcome], is_generating: Callable[[str], bool]
    ) -> dict[Owner, list[Outcome]]:
        """The outcomes of each owner, in order, except that failures come last.

        Finished requests are removed; `is_generating` returns whether a request has unfinished sequences.
        Outcomes of requests without an owner are dropped.
        """
        routed: dict[Owner, list[Outcome]] = {}
        finished: list[str] = []
        failures: list[Failure] = []
        for outcome in outcomes:
            if isinstance(outcome, DecodedTokens):
                for owner, decoded in self._divide(outcome):
                    routed.setdefault(owner, []).append(decoded)
                continue
            if isinstance(outcome, PooledRows):
                for owner, theirs in self._divide_answers(outcome):
                    routed.setdefault(owner, []).append(theirs)
                continue
            if isinstance(outcome, Failure):
                failures.append(outcome)
                continue
            if (found := self._owners.get(outcome.id)) is not None:
                routed.setdefault(found, []).append(outcome)
            if isinstance(outcome, PooledOutput) or outcome.finish_reason is not None:
                finished.append(outcome.id)
        for failure in failures:
            if (found := self._owners.pop(failure.id, None)) is not None:
                routed.setdefault(found, []).append(failure)
        for request_id in finished:
            if not is_generating(request_id):
                self._owners.pop(request_id, None)
        return routed

    def fail_all(self, reason: str) -> dict[Owner, list[Outcome]]:
        """A failure for every request, because the engine is gone. All requests are removed."""
        routed: dict[Owner, list[Outcome]] = {}
        while self._owners:
            request_id, owner = self._owners.popitem()
            routed.setdefault(owner, []).append(Failure(request_id, EngineUnavailable(reason)))
        return routed

    def _divide_answers(self, answers: PooledRows) -> Iterable[tuple[Owner, PooledRows]]:
        """The answers of each owner. Their requests are removed."""
        at_of: dict[Owner, list[int]] = {}
        for at, owner in enumerate([self._owners.pop(each, None) for each in answers.ids]):
            if owner is not None:
                at_of.setdefault(owner, []).append(at)
        for owner, own in at_of.items():
            if len(own) == len(answers.ids):
                yield owner, answers
                return
            ids, queue_s = [answers.ids[at] for at in own], [answers.queue_s[at] for at in own]
            yield owner, PooledRows(ids, answers.values[own], queue_s, answers.device_s)

    def _divide(self, decoded: DecodedTokens) -> Iterable[tuple[Owner, DecodedTokens]]:
        """The tokens of each owner. The division is reused while steps decode the same sequences."""
        if self._divided is not decoded.rows:
            self._division = self._divide_rows(decoded.rows)
            self._divided = decoded.rows
        for owner, (rows, indices) in self._division.items():
            yield owner, decoded if indices is None else DecodedTokens(rows, decoded.token_ids[indices])

    def _divide_rows(self, rows: SequenceIds) -> dict[Owner, _OwnedSequences]:
        indices: dict[Owner, list[int]] = {}
        for index, (request_id, _) in enumerate(rows):
            if (owner := self._owners.get(request_id)) is not None:
                indices.setdefault(owner, []).append(index)
        if len(indices) == 1 and len(next(iter(indices.values()))) == len(rows):
            return {owner: _OwnedSequences(rows, None) for owner in indices}
        return {
            owner: _OwnedSequences(tuple(rows[i] for i in own), np.array(own, dtype=np.int32))
            for owner, own in indices.items()
        }


class Subscribers:
    """The pending requests of one event loop: futures for pooling, listeners for generation.

    Used only on the loop's thread.
    """

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[PooledOutput]] = {}
        self._listeners: dict[str, StreamListener] = {}
        self._decoded: SequenceIds = ()  # the sequences of the last decode step
        # The callback and row of each of them; None: the listeners have changed since.
        self._callbacks: list[tuple[Callable[[int, int], None], int]] | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures or request_id in self._listeners

    def __len__(self) -> int:
        return len(self._futures) + len(self._listeners)

    def add_future(self, request_id: str, future: asyncio.Future[PooledOutput]) -> None:
        self._futures[request_id] = future

    def remove_future(self, request_id: str) -> None:
        self._futures.pop(request_id, None)

    def add_listener(self, request_id: str, listener: StreamListener) -> None:
        self._listeners[request_id] = listener
        self._callbacks = None

    def remove_listener(self, request_id: str) -> StreamListener | None:
        self._callbacks = None
        return self._listeners.pop(request_id, None)

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        """Deliver outcomes in order. Outcomes of removed requests are dropped."""
        generated: dict[str, list[GeneratedTokens]] = {}  # by request
        for outcome in outcomes:
            if isinstance(outcome, GeneratedTokens):
                generated.setdefault(outcome.id, []).append(outcome)
                continue
            if generated:
                self._deliver_generated(generated)
                generated = {}
            if isinstance(outcome, DecodedTokens):
                self._deliver_decoded(outcome)
            elif isinstance(outcome, PooledRows):
                for output in outcome.parts():
                    future = self._futures.get(output.id)
                    if future is not None and not future.done():
                        future.set_result(output)
            elif isinstance(outcome, PooledOutput):
                future = self._futures.get(outcome.id)
                if future is not None and not future.done():
                    future.set_result(outcome)
            else:
                self.fail(outcome.id, outcome.error)
        self._deliver_generated(generated)

    def fail_all(self, reason: str, kind: type[PenstockError] = EngineUnavailable) -> int:
        """Fail every unfinished request, by default because the engine is gone. Returns how many."""
        pending = self.unfinished()
        for request_id in pending:
            self.fail(request_id, kind(reason))
        return len(pending)

    def unfinished(self) -> list[str]:
        """The requests that still await outcomes."""
        pending = [request_id for request_id, future in self._futures.items() if not future.done()]
        return pending + [request_id for request_id, each in self._listeners.items() if not each.finished]

    def _deliver_decoded(self, decoded: DecodedTokens) -> None:
        """One call per sequence. Callbacks are looked up only when sequences or listeners have changed."""
        if self._callbacks is None or decoded.rows is not self._decoded:
            self._decoded = decoded.rows
            listeners = [(self._listeners.get(request_id), row) for request_id, row in decoded.rows]
            self._callbacks = [
                (_drop_token if listener is None else listener.on_token, row) for listener, row in listeners
            ]
        callbacks = self._callbacks
        for (on_token, row), token_id in zip(callbacks, decoded.token_ids.tolist(), strict=True):
            try:
                on_token(row, token_id)
            except Exception as error:  # fails this request; the others still get their tokens
                self._listener_failed(decoded.rows[callbacks.index((on_token, row))][0], error)

    def _deliver_generated(self, generated: dict[str, list[GeneratedTokens]]) -> None:
        for request_id, parts in generated.items():
            if (listener := self._listeners.get(request_id)) is not None:
                try:
                    listener.on_tokens(parts)
                except Exception as error:
                    self._listener_failed(request_id, error)

    def _listener_failed(self, request_id: str, error: Exception) -> None:
        log.error("the tokens of a request could not be delivered", exc_info=error)
        self.fail(request_id, EngineError(f"the tokens cannot be delivered: {type(error).__name__}: {error}"))

    def fail(self, request_id: str, error: PenstockError) -> None:
        """Fail a request, if it is still awaited."""
        if (listener := self._listeners.get(request_id)) is not None:
            try:
                listener.on_error(error)
            except Exception:
                log.exception("the failure of a request could not be delivered")
        elif (future := self._futures.get(request_id)) is not None and not future.done():
            future.set_exception(error)


def _drop_token(row: int, token_id: int) -> None:
    """Ignore the token of a request that was removed."""
