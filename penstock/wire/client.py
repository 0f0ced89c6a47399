"""The API process's side of the wire: an `EngineHandle` of an engine in another process. Free of torch.

All requests submitted in one iteration of the event loop are sent in one message. A request that cannot be
encoded fails without affecting the others. When the engine process exits or hangs, all pending requests fail
at once. The client reconnects when a new engine listens, and drops messages of an earlier engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.errors import BadValue, EngineError, EngineUnavailable
from penstock.handle import EngineHandle, EngineStats, StreamListener, Unsubscribe
from penstock.types import Comparison, PooledOutput, Request, SequenceIds
from penstock.wire.frames import is_readable, receive_frames, send_frames
from penstock.wire.liveness import HangLimits, LivenessWatch
from penstock.wire.messages import (
    BlocksReleased,
    Cancel,
    Hello,
    MemoryMapped,
    Outcomes,
    Ready,
    decode_from_engine,
    encode,
    last_decoded_rows,
    merge_shared_frames,
    pack_comparison,
    pack_requests,
    unpack_outcomes,
)
from penstock.wire.router import Subscribers
from penstock.wire.shared_memory import MappedMemory, SharedMemoryInfo
from penstock.wire.status import StatusReader

log = logging.getLogger("penstock.client")
RECONNECT_MS = 20  # between attempts to reach a starting engine; ZeroMQ at most doubles it
MAX_CONNECTING_S = 2.0  # how long requests wait for the first connection to an engine that already serves
LOST = "the engine process stopped while this request was in flight; it is being restarted, try again"


class EngineClient(EngineHandle):
    """The connection to one engine process."""

    LIVENESS_INTERVAL_S = 0.25

    def __init__(
        self,
        address: str,
        explain_unavailable: Callable[[], str] = lambda: "the engine is starting",
        status: StatusReader | None = None,
        hang_limits: HangLimits | None = None,
    ) -> None:
        """`explain_unavailable` returns why the engine cannot be reached; the text becomes part of a 503.

        An engine whose `status` exceeds `hang_limits` counts as unavailable until it makes progress again.
        """
        self._watch = None if hang_limits is None else LivenessWatch(hang_limits)
        self._hang = ""  # why the engine counts as hung; empty if it does not
        self._liveness_timer: asyncio.TimerHandle | None = None
        self.on_ready: Callable[[int], None] = lambda pid: None  # called with the engine's process id
        self.status = status  # the engine's status page, if it publishes one
        self._address = address
        self._explain_unavailable = explain_unavailable
        self._subscribers = Subscribers()
        self._last_rows: SequenceIds = ()  # rows of the last `DecodedTokens`; the engine does not repeat them
        self._outgoing: list[Request] = []
        self._held_comparisons: list[list[Any]] = []  # frames that wait for the first connection
        self._cancelled: list[str] = []
        self._name = secrets.token_hex(8)
        self._memory: MappedMemory | None = None  # the engine's shared memory, if it could be mapped
        self._released: deque[tuple[str, int]] = deque()  # memory and block, appended on any thread
        self._engine: Ready | None = None  # None: not connected
        self._awaits_first_engine = True  # requests may wait for the first connection
        self._connecting_timer: asyncio.TimerHandle | None = None  # set while requests wait for the first one

    @property
    def ready(self) -> bool:
        return self._engine is not None and not self._hang

    @property
    def holds_requests(self) -> bool:
        """Whether requests wait in this process: the engine already serves, but is not connected yet."""
        return self._awaits_first_engine and self.status is not None and self.status.has_served

    @property
    def unavailable_reason(self) -> str:
        return self._explain_unavailable() if self._engine is None else self._hang

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The resolved settings of the engine; empty until it is ready."""
        return {} if self._engine is None else self._engine.settings

    @property
    def revision(self) -> str:
        return "" if self._engine is None else self._engine.revision

    def stats(self) -> EngineStats:
        return EngineStats(num_requests=len(self._subscribers))

    def start(self) -> None:
        """Connect; call from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        # zmq.IMMEDIATE is not set, because it discards answers that have arrived when the engine disconnects.
        # Messages sent just before the monitor reports the disconnect are queued for the next engine, which
        # ignores everything before the Hello.
        # The interval is short and does not grow. Otherwise some API processes would refuse requests for up
        # to 0.2 s after the first process has reported that the server is ready.
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(self._address)
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._on_readable)
        self._loop.add_reader(int(self._monitor.getsockopt(zmq.FD)), self._on_monitor)
        self._loop.call_soon(self._on_monitor)
        self._check_liveness()

    def close(self) -> None:
        for timer in (self._liveness_timer, self._connecting_timer):
            if timer is not None:
                timer.cancel()
        for socket in (self._socket, self._monitor):
            with contextlib.suppress(zmq.ZMQError):
                self._loop.remove_reader(int(socket.getsockopt(zmq.FD)))
        self._fail_all("the server is closing")
        self._context.destroy(linger=0)

    async def run(self, request: Request) -> PooledOutput:
        future = self._expect(request.id)
        self._enqueue(request)
        return await self._outcome(request.id, future)

    async def compare(self, comparison: Comparison) -> PooledOutput:
        try:
            frames = pack_comparison(comparison)
        except Exception as error:
            raise _unsendable(error) from None
        future = self._expect(comparison.id)
        self._send_comparison(frames)
        return await self._outcome(comparison.id, future)

    def _expect(self, request_id: str) -> asyncio.Future[PooledOutput]:
        """Register a request that is about to be sent, and return the future of its output."""
        self._check(request_id)
        future: asyncio.Future[PooledOutput] = self._loop.create_future()
        self._subscribers.add_future(request_id, future)
        return future

    async def _outcome(self, request_id: str, future: asyncio.Future[PooledOutput]) -> PooledOutput:
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request_id)
            raise
        finally:
            self._subscribers.remove_future(request_id)

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        self._check(request.id)
        self._subscribers.add_listener(request.id, listener)
        self._enqueue(request)

        def unsubscribe() -> None:
            removed = self._subscribers.remove_listener(request.id)
            if removed is not None and not removed.finished:
                self._cancel(request.id)

        return unsubscribe

    def _check(self, request_id: str) -> None:
        if not self.ready:
            self._hold_until_connected()
        if request_id in self._subscribers:
            raise BadValue(f"request_id {request_id!r} is already in use", param="request_id")

    def _hold_until_connected(self) -> None:
        """Let a request wait if `holds_requests`, because another process may already have reported that the
        server is ready. Otherwise refuse it."""
        if not self.holds_requests:
            raise EngineUnavailable(self.unavailable_reason)
        if self._connecting_timer is None:
            self._connecting_timer = self._loop.call_later(MAX_CONNECTING_S, self._stop_holding)

    def _stop_holding(self) -> None:
        self._end_first_connection()
        self._outgoing.clear()
        self._held_comparisons.clear()
        self._cancelled.clear()
        self._fail_all(self.unavailable_reason)

    def _end_first_connection(self) -> None:
        """From now on, refuse requests whenever there is no connection."""
        self._awaits_first_engine = False
        if self._connecting_timer is not None:
            self._connecting_timer.cancel()
            self._connecting_timer = None

    def _enqueue(self, request: Request) -> None:
        self._schedule_flush()
        self._outgoing.append(request)

    def _send_comparison(self, frames: list[Any]) -> None:
        if self._connecting_timer is None:
            self._send(frames)
        else:
            self._held_comparisons.append(frames)  # `_welcome` sends them

    def _cancel(self, request_id: str) -> None:
        self._schedule_flush()
        self._cancelled.append(request_id)

    def _schedule_flush(self) -> None:
        if not self._outgoing and not self._cancelled:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send new requests, then cancellations, because some may cancel these requests."""
        if self._connecting_timer is not None:
            return  # `_welcome` sends them
        requests, self._outgoing = self._outgoing, []
        cancelled, self._cancelled = self._cancelled, []
        if requests:
            self._submit(requests)
        if cancelled:
            self._send([encode(Cancel(cancelled))])

    def _submit(self, requests: list[Request]) -> None:
        try:
            frames = pack_requests(requests)
        except Exception:
            requests = [request for request in requests if self._can_send(request)]
            if not requests:
                return
            frames = pack_requests(requests)
        self._send(frames)

    def _can_send(self, request: Request) -> bool:
        """Whether a request can be encoded. If not, fail it."""
        try:
            pack_requests([request])
        except Exception as error:
            self._subscribers.fail(request.id, _unsendable(error))
            return False
        return True

    def _send(self, frames: list[Any]) -> None:
        if self._engine is None:
            return  # all pending requests have already failed
        send_frames(self._socket, frames)
        self._on_readable()  # a send may consume the edge that announces a received message

    def _on_readable(self) -> None:
        while is_readable(self._socket):
            header, *frames = receive_frames(self._socket)
            try:
                self._handle(decode_from_engine(header.buffer), [frame.buffer for frame in frames])
            except Exception as error:
                # It is unknown which requests the message answers. Fail all, so that none waits for ever.
                log.exception("a message of the engine could not be handled")
                for request_id in self._subscribers.unfinished():
                    self._cancel(request_id)
                self._subscribers.fail_all(f"a message of the engine could not be read: {error}", EngineError)

    def _handle(self, message: Ready | Outcomes, frames: list[Any]) -> None:
        if isinstance(message, Ready):
            self._welcome(message)
        elif self._engine is not None and message.engine == self._engine.engine:
            self._deliver(message, frames)
        # Outcomes of an earlier engine are dropped: its requests have already failed.

    def _welcome(self, engine: Ready) -> None:
        """Connect to an engine that can serve. Requests that an earlier engine has not answered are lost."""
        if self._engine is not None and self._engine.engine != engine.engine:
            self._fail_all(LOST)
        self._engine = engine
        self._last_rows = ()
        self._map_memory(engine.shared)
        log.info("engine ready (process %d)", engine.pid)
        self._end_first_connection()
        comparisons, self._held_comparisons = self._held_comparisons, []
        for frames in comparisons:
            self._send(frames)
        self._flush()
        self.on_ready(engine.pid)

    def _map_memory(self, info: SharedMemoryInfo | None) -> None:
        """Map the engine's shared memory and notify the engine. If this fails, the engine sends large outputs
        in messages."""
        if info is None:
            self._memory = None
            return
        if self._memory is None or self._memory.name != info.name:
            try:
                self._memory = MappedMemory(info, self._release_block)
            except (OSError, ValueError) as error:
                self._memory = None
                log.warning(
                    "cannot map the engine's shared memory, large outputs are sent instead: %s", error
                )
                return
        self._send([encode(MemoryMapped(info.name, self._name, os.getpid()))])
        self._flush_released()

    def _release_block(self, memory: str, block: int) -> None:
        """Release a block that nothing in this process reads any more. Called on any thread."""
        self._released.append((memory, block))
        with contextlib.suppress(RuntimeError):  # the loop is closed: the engine will see that we have exited
            self._loop.call_soon_threadsafe(self._flush_released)

    def _flush_released(self) -> None:
        if self._engine is None or not self._released:
            return  # if the same engine reconnects, the blocks are released then
        released = [self._released.popleft() for _ in range(len(self._released))]
        info = self._engine.shared
        if info is not None and (blocks := [block for memory, block in released if memory == info.name]):
            self._send([encode(BlocksReleased(info.name, blocks))])

    def _deliver(self, message: Outcomes, frames: list[Any]) -> None:
        if message.shared:
            if self._memory is None:
                raise RuntimeError("the engine sent a region of memory that this process has not mapped")
            frames = merge_shared_frames(frames, message.shared, self._memory.read)
        outcomes = unpack_outcomes(message.items, frames, self._last_rows)
        self._last_rows = last_decoded_rows(outcomes, self._last_rows)
        self._subscribers.deliver(outcomes)

    def _on_monitor(self) -> None:
        while is_readable(self._monitor):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._send_hello()
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_readable()  # handle what the engine sent before
                self._engine, self._hang = None, ""
                self._fail_all(LOST)

    def _check_liveness(self) -> None:
        """Fail the pending requests of a hung engine, and serve again when it recovers. Called every
        `LIVENESS_INTERVAL_S`."""
        if self.status is None or self._watch is None:
            return
        self._liveness_timer = self._loop.call_later(self.LIVENESS_INTERVAL_S, self._check_liveness)
        hang = self._watch.check(self.status.read(), time.monotonic())
        if self._engine is None or hang == self._hang == "":
            self._hang = ""
        elif not hang:
            log.warning("the engine responds again")
            self._hang = ""
        else:
            is_new, self._hang = not self._hang, f"{hang}; try again shortly"
            if is_new:
                self._abandon_all()

    def _abandon_all(self) -> None:
        """Fail all pending requests, and cancel them for the case that the engine recovers."""
        for request_id in self._subscribers.unfinished():
            self._cancel(request_id)
        self._fail_all(self._hang)

    def _send_hello(self) -> None:
        """Ask a new engine whether it is ready; it answers as soon as it is."""
        send_frames(self._socket, [encode(Hello(self._name, os.getpid()))])
        self._on_readable()

    def _fail_all(self, reason: str) -> None:
        """Fail all pending requests. Their rows are lost; the client may send them again."""
        if num_failed := self._subscribers.fail_all(reason):
            log.warning("%d requests were in flight: %s", num_failed, reason)


def _unsendable(error: Exception) -> BadValue:
    return BadValue(f"the request has a value that cannot be sent to the engine: {error}")
