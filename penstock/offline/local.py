"""`LocalEngine`: an engine in this process, on its own thread, for offline use."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.engine.build import build_core
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, EngineUnavailable
from penstock.handle import EngineHandle, EngineStats, StreamListener, Unsubscribe
from penstock.runner.base import AdapterInfo
from penstock.types import Comparison, Failure, Outcome, PooledOutput, Request
from penstock.wire.router import OutcomeRouter, Subscribers


class _Recipient(ABC):
    """Owner of requests. `deliver` is called on the engine's thread with all its outcomes of a step."""

    @abstractmethod
    def deliver(self, outcomes: list[Outcome]) -> None: ...


class _LoopRecipient(_Recipient):
    """An event loop and its requests. A step's outcomes reach the loop in one `call_soon_threadsafe`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.subscribers = Subscribers()
        # Abandoned requests whose cancellation the engine has not confirmed yet. Their ids stay in use until
        # then, so that no late outcome reaches a new request with the same id.
        self.cancelling: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.subscribers or request_id in self.cancelling

    def deliver(self, outcomes: list[Outcome]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task awaits the outcomes
            self.loop.call_soon_threadsafe(self.subscribers.deliver, outcomes)

    def confirm_cancel(self, request_id: str) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.cancelling.discard, request_id)


class _FutureRecipient(_Recipient):
    """A single request whose caller waits on any thread."""

    def __init__(self) -> None:
        self.future: Future[PooledOutput] = Future()

    def deliver(self, outcomes: list[Outcome]) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller may cancel the future at any moment
            for outcome in outcomes:
                if isinstance(outcome, PooledOutput):
                    self.future.set_result(_writable(outcome))
                elif isinstance(outcome, Failure):
                    self.future.set_exception(outcome.error)


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str
    caller: _LoopRecipient  # receives the confirmation


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[EngineCore], None]  # short; runs between two steps


_Message = Request | Comparison | _Cancel | _Call | None  # None: wake up


class LocalEngine(EngineHandle):
    """An engine in this process. Several event loops and threads may call its methods at once."""

    def __init__(self, spec: ModelSpec, settings: Resolved) -> None:
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._router: OutcomeRouter[_Recipient] = OutcomeRouter()
        self._loops: dict[asyncio.AbstractEventLoop, _LoopRecipient] = {}
        self._closing = False
        self._closed_reason = "the engine is closed"
        self._submit_lock = threading.Lock()  # nothing is submitted after `close`
        self._core = build_core(spec, settings, wake=lambda: self._inbox.put(None))
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    @property
    def core(self) -> EngineCore:
        """The engine's core. Its state may be read while the engine is idle."""
        return self._core

    @property
    def ready(self) -> bool:
        return not self._closing

    @property
    def unavailable_reason(self) -> str:
        return self._closed_reason if self._closing else ""

    def stats(self) -> EngineStats:
        return EngineStats(num_requests=len(self._router))

    async def run(self, request: Request) -> PooledOutput:
        return await self._await_output(request)

    async def compare(self, comparison: Comparison) -> PooledOutput:
        return await self._await_output(comparison)

    async def _await_output(self, request: Request | Comparison) -> PooledOutput:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PooledOutput] = loop.create_future()
        with self._submit_lock:
            recipient = self._recipient(loop)
            self._check(request.id, recipient)
            recipient.subscribers.add_future(request.id, future)
            self._submit(request, recipient)
        try:
            return _writable(await future)
        except asyncio.CancelledError:
            self._abandon(request.id, recipient)
            raise
        finally:
            recipient.subscribers.remove_future(request.id)

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        with self._submit_lock:
            recipient = self._recipient(asyncio.get_running_loop())
            self._check(request.id, recipient)
            recipient.subscribers.add_listener(request.id, listener)
            self._submit(request, recipient)

        def unsubscribe() -> None:
            removed = recipient.subscribers.remove_listener(request.id)
            if removed is not None and not removed.finished:
                self._abandon(request.id, recipient)

        return unsubscribe

    def submit(self, request: Request | Comparison) -> Future[PooledOutput]:
        """Submit a pooling request and return a future, for callers without an event loop."""
        recipient = _FutureRecipient()
        with self._submit_lock:
            self._check(request.id)
            self._submit(request, recipient)
        return recipient.future

    def load_adapter(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        """Load a LoRA adapter under an id that was never used before. Can be called from any thread."""
        loaded: Future[AdapterInfo] = Future()

        def copy(done: Future[AdapterInfo]) -> None:
            error = done.exception()
            if error is None:
                loaded.set_result(done.result())
            else:
                loaded.set_exception(error)

        with self._submit_lock:
            if self._closing:
                raise EngineUnavailable(self._closed_reason)
            begin = _Call(lambda core: core.load_adapter(adapter_id, folder, name).add_done_callback(copy))
            self._inbox.put(begin)
        return loaded

    def unload_adapter(self, adapter_id: int) -> None:
        """Refuse new requests with an adapter; running ones finish. Can be called from any thread."""
        self._inbox.put(_Call(lambda core: core.unload_adapter(adapter_id)))

    def close(self) -> None:
        with self._submit_lock:
            if self._closing:
                return
            self._closing = True
            self._inbox.put(None)
        self._thread.join()
        self._core.close()

    def _recipient(self, loop: asyncio.AbstractEventLoop) -> _LoopRecipient:
        if (recipient := self._loops.get(loop)) is None:
            self._loops = {known: each for known, each in self._loops.items() if not known.is_closed()}
            recipient = self._loops[loop] = _LoopRecipient(loop)
        return recipient

    def _check(self, request_id: str, recipient: _LoopRecipient | None = None) -> None:
        if self._closing:
            raise EngineUnavailable(self._closed_reason)
        if request_id in self._router or (recipient is not None and request_id in recipient):
            raise BadValue(f"request_id {request_id!r} is already in use", param="request_id")

    def _submit(self, request: Request | Comparison, recipient: _Recipient) -> None:
        self._router.add(request.id, recipient)
        self._inbox.put(request)

    def _abandon(self, request_id: str, recipient: _LoopRecipient) -> None:
        """Cancel a request whose caller has given up. Nothing more is delivered."""
        recipient.cancelling.add(request_id)
        self._inbox.put(_Cancel(request_id, recipient))

    def _run(self) -> None:
        try:
            while not self._closing or self._core.busy or not self._inbox.empty():
                self._handle(self._next_message())
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._handle(self._inbox.get_nowait())
                self._deliver(self._core.step())
                if self._core.device_failure is not None:
                    return self._stop(self._core.device_failure)
        except BaseException as error:
            self._stop(error)
            raise

    def _next_message(self) -> _Message:
        """Wait for the next message. Returns None when the next deadline has passed."""
        deadline = self._core.next_deadline_s()
        try:
            return self._inbox.get(
                timeout=None if deadline is None else max(0.0, deadline - self._core.clock())
            )
        except queue.Empty:
            return None

    def _stop(self, error: BaseException) -> None:
        self._closed_reason = f"the engine stopped: {error!r}"
        with self._submit_lock:
            self._closing = True
        for recipient, outcomes in self._router.fail_all(self._closed_reason).items():
            recipient.deliver(outcomes)

    def _handle(self, message: _Message) -> None:
        if isinstance(message, Request | Comparison):
            self._deliver(self._core.submit(message))
        elif isinstance(message, _Call):
            message.work(self._core)
        elif message is not None:
            self._cancel(message)

    def _cancel(self, message: _Cancel) -> None:
        request_id, caller = message.request_id, message.caller
        # Otherwise the request has finished, and its id may belong to a new request.
        if self._router.owner(request_id) is caller:
            self._core.cancel(request_id)
            self._router.remove(request_id)
        caller.confirm_cancel(request_id)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for recipient, theirs in self._router.route(outcomes, self._core.generates).items():
            recipient.deliver(theirs)


def _writable(output: PooledOutput) -> PooledOutput:
    """Copy an output that is not writable: deduplicated requests receive the same arrays."""
    if output.values.flags.writeable:
        return output
    return replace(
        output, values=output.values.copy(), extra_values=tuple(array.copy() for array in output.extra_values)
    )
