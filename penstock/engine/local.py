"""An engine core in this process, on a thread of its own: what offline use talks to."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.core import Answer, Request
from penstock.engine.build import build_core
from penstock.engine.core import Outcome
from penstock.errors import Cancelled, EngineUnavailable, PenstockError


class LocalEngine:
    """submit → future. Safe to call from any thread."""

    def __init__(self, spec: ModelSpec, settings: Resolved) -> None:
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()  # str: cancel, None: wake
        self._waiters: dict[str, Future[Answer]] = {}
        self._closing = False
        self._core = build_core(spec, settings, wake=lambda: self._inbox.put(None))
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Future[Answer]:
        if self._closing:
            raise EngineUnavailable("the engine is closed")
        future: Future[Answer] = Future()
        self._waiters[request.id] = future
        self._inbox.put(request)
        return future

    def cancel(self, request_id: str) -> None:
        self._inbox.put(request_id)

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        if not self._closing:
            self._closing = True
            self._inbox.put(None)
            self._thread.join()
            self._core.close()

    def _run(self) -> None:
        try:
            while not self._closing or self._core.busy:
                self._take(self._inbox.get())
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._take(self._inbox.get_nowait())
                self._settle(self._core.step())
        except BaseException as error:
            self._closing = True
            for future in self._waiters.values():
                if not future.done():
                    future.set_exception(EngineUnavailable(f"the engine stopped: {error!r}"))
            raise

    def _take(self, message: Request | str | None) -> None:
        if isinstance(message, Request):
            try:
                self._core.add(message)
            except PenstockError as error:
                self._waiters.pop(message.id).set_exception(error)
        elif message is not None:
            self._core.cancel(message)
            if (future := self._waiters.pop(message, None)) is not None and not future.done():
                future.set_exception(Cancelled("the request was cancelled"))

    def _settle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            future = self._waiters.pop(outcome.id, None)
            if future is None or future.done():
                continue
            if isinstance(outcome, Answer):
                future.set_result(outcome)
            else:
                future.set_exception(outcome.error)
