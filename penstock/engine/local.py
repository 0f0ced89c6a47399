"""An engine core in this process, on a thread of its own: what offline use talks to."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future, InvalidStateError

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.core import Answer, Comparison, Request
from penstock.engine.build import build_core
from penstock.engine.core import Outcome
from penstock.errors import BadValue, Cancelled, EngineUnavailable, PenstockError


class LocalEngine:
    """submit → future. Safe to call from any thread."""

    def __init__(self, spec: ModelSpec, settings: Resolved) -> None:
        self._inbox: queue.SimpleQueue[Request | Comparison | str | None] = (
            queue.SimpleQueue()
        )  # str: cancel, None: wake
        self._waiters: dict[str, Future[Answer]] = {}
        self._closing = False
        self._why = "the engine is closed"
        self._gate = threading.Lock()  # nothing is submitted once closing has begun
        self._core = build_core(spec, settings, wake=lambda: self._inbox.put(None))
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request | Comparison) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._gate:
            if self._closing:
                raise EngineUnavailable(self._why)
            if request.id in self._waiters:
                raise BadValue(f"request_id {request.id!r} is already in use", param="request_id")
            self._waiters[request.id] = future
            self._inbox.put(request)
        return future

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
                self._take(self._inbox.get())
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._take(self._inbox.get_nowait())
                self._settle(self._core.step())
                if self._core.broken is not None:
                    return self._end(self._core.broken)
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        self._why = f"the engine stopped: {error!r}"
        self._closing = True
        for future in list(self._waiters.values()):
            _settle(future, EngineUnavailable(self._why))

    def _take(self, message: Request | Comparison | str | None) -> None:
        if isinstance(message, Comparison):
            self._core.compare(message)
        elif isinstance(message, Request):
            try:
                self._core.add(message)
            except PenstockError as error:
                _settle(self._waiters.pop(message.id), error)
        elif message is not None:
            self._core.cancel(message)
            _settle(self._waiters.pop(message, None), Cancelled("the request was cancelled"))

    def _settle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            result = outcome if isinstance(outcome, Answer) else outcome.error
            _settle(self._waiters.pop(outcome.id, None), result)


def _settle(future: Future[Answer] | None, result: Answer | PenstockError) -> None:
    """Hand a result over, unless its caller has given up, which may happen at any moment."""
    if future is None:
        return
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, Answer):
            future.set_result(result)
        else:
            future.set_exception(result)
