"""An engine core in this process, on a thread of its own: what offline use talks to."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.engine.build import build_core
from penstock.errors import BadValue, Cancelled, EngineUnavailable, PenstockError
from penstock.types import Comparison, DecodedTokens, GeneratedTokens, Outcome, PooledOutput, Request
from penstock.wire.router import Division, Hear, Leave, Listener, Parts, Receive, Stream, Told, parts_of


class LocalEngine:
    """submit → future. Safe to call from any thread."""

    constrains = True  # rows may be made to follow a grammar

    def __init__(self, spec: ModelSpec, settings: Resolved) -> None:
        self._inbox: queue.SimpleQueue[Request | Comparison | str | None] = (
            queue.SimpleQueue()
        )  # str: cancel, None: wake
        self._waiters: dict[str, Future[PooledOutput]] = {}
        self._receivers: dict[str, Hear] = {}
        self._division = Division()
        self._closing = False
        self._why = "the engine is closed"
        self._gate = threading.Lock()  # nothing is submitted once closing has begun
        self._core = build_core(spec, settings, wake=lambda: self._inbox.put(None))
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request | Comparison) -> Future[PooledOutput]:
        future: Future[PooledOutput] = Future()
        with self._gate:
            self._check(request)
            self._waiters[request.id] = future
            self._inbox.put(request)
        return future

    def stream(self, request: Request, receive: Receive) -> None:
        """Continue a request's rows; `receive` is called on the engine's thread with what comes."""
        self.stream_all(
            [request], lambda told: receive(told if isinstance(told, PenstockError) else parts_of(told))
        )

    def stream_all(self, requests: Sequence[Request], receive: Hear) -> None:
        """The same of several requests, with one call for all that a step gives them."""
        with self._gate:
            for request in requests:
                self._check(request)
                self._receivers[request.id] = receive
                self._inbox.put(request)

    async def generate(self, request: Request) -> AsyncIterator[list[GeneratedTokens]]:
        """Parts of the request's rows as they come. Closing the iterator cancels what is left."""
        stream = Stream(request)
        leave = self.listen(request, stream)
        try:
            async for parts in stream.parts():
                yield parts
        finally:
            leave()

    def listen(self, request: Request, listener: Listener) -> Leave:
        """Have a request's rows continued; the listener is told on the running loop as it comes."""
        loop = asyncio.get_running_loop()

        def receive(parts: Parts | PenstockError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(listener.receive, parts)

        self.stream(request, receive)
        return lambda: None if listener.over else self.cancel(request.id)

    def _check(self, request: Request | Comparison) -> None:
        if self._closing:
            raise EngineUnavailable(self._why)
        if request.id in self._waiters or request.id in self._receivers:
            raise BadValue(f"request_id {request.id!r} is already in use", param="request_id")

    def cancel(self, request_id: str) -> None:
        self._inbox.put(request_id)

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        with self._gate:
            if self._closing:
                return
            self._closing = True
            self._inbox.put(None)
        self._thread.join()
        self._core.close()

    def _run(self) -> None:
        try:
            while not self._closing or self._core.busy or not self._inbox.empty():
                self._take(self._next())
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._take(self._inbox.get_nowait())
                self._settle(self._core.step())
                if self._core.device_failure is not None:
                    return self._stop(self._core.device_failure)
        except BaseException as error:
            self._stop(error)
            raise

    def _next(self) -> Request | Comparison | str | None:
        """What comes next, or nothing once some request may be late."""
        deadline = self._core.next_deadline_s()
        try:
            return self._inbox.get(
                timeout=None if deadline is None else max(0.0, deadline - self._core.clock())
            )
        except queue.Empty:
            return None

    def _stop(self, error: BaseException) -> None:
        self._why = f"the engine stopped: {error!r}"
        self._closing = True
        for future in list(self._waiters.values()):
            _settle(future, EngineUnavailable(self._why))
        for receive in set(self._receivers.values()):
            receive(EngineUnavailable(self._why))

    def _take(self, message: Request | Comparison | str | None) -> None:
        if isinstance(message, Comparison):
            self._core.compare(message)
        elif isinstance(message, Request):
            try:
                self._core.add(message)
            except PenstockError as error:
                self._end(message.id, error)
        elif message is not None:
            self._core.cancel(message)
            self._end(message, Cancelled("the request was cancelled"))

    def _settle(self, outcomes: list[Outcome]) -> None:
        told: dict[Hear, Told] = {}
        for outcome in outcomes:
            if isinstance(outcome, DecodedTokens):
                for receive, (rows, places) in self._division.of(outcome.rows, self._receivers).items():
                    told.setdefault(receive, []).append(DecodedTokens(rows, outcome.token_ids[places]))
            elif (
                isinstance(outcome, GeneratedTokens)
                and (hears := self._receivers.get(outcome.id)) is not None
            ):
                told.setdefault(hears, []).append(outcome)
        for outcome in outcomes:
            if isinstance(outcome, GeneratedTokens) and not self._core.generates(outcome.id):
                self._receivers.pop(outcome.id, None)
        for receive, theirs in told.items():
            receive(theirs)
        for outcome in outcomes:
            if not isinstance(outcome, DecodedTokens | GeneratedTokens):
                self._end(outcome.id, outcome if isinstance(outcome, PooledOutput) else outcome.error)

    def _end(self, request_id: str, result: PooledOutput | PenstockError) -> None:
        _settle(self._waiters.pop(request_id, None), result)
        receive = self._receivers.pop(request_id, None)
        if receive is not None and isinstance(result, PenstockError):
            receive(result)


def _own(answer: PooledOutput) -> PooledOutput:
    """What its caller may write to: requests that are alike have been given the same arrays."""
    if answer.values.flags.writeable:
        return answer
    return replace(answer, values=answer.values.copy(), more=tuple(array.copy() for array in answer.more))


def _settle(future: Future[PooledOutput] | None, result: PooledOutput | PenstockError) -> None:
    """Hand a result over, unless its caller has given up, which may happen at any moment."""
    if future is None:
        return
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, PooledOutput):
            future.set_result(_own(result))
        else:
            future.set_exception(result)
