"""The API process's side of the wire: submit a request, await its answer. Free of torch.

Requests of one turn of the event loop leave in one message. When the engine's process goes away, all
that wait for it fail at once; the connection comes back by itself when a new engine listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.errors import EngineUnavailable
from penstock.types import (
    Comparison,
    DecodedTokens,
    Failure,
    GeneratedTokens,
    PooledOutput,
    Request,
    SequenceIds,
)
from penstock.wire.messages import (
    Attached,
    Cancel,
    GivenBack,
    Hello,
    Outcomes,
    Ready,
    decode_from_engine,
    encode,
    pack_comparison,
    pack_requests,
    unpack_outcomes,
    with_shared,
)
from penstock.wire.router import Leave, Listener, Parts, Stream
from penstock.wire.shared_memory import Window

log = logging.getLogger("penstock.client")


class EngineClient:
    """`reason` tells, when asked, why the engine is not there; it stands in the 503."""

    constrains = True  # rows may be made to follow a grammar

    def __init__(self, address: str, reason: Callable[[], str] = lambda: "the engine is starting") -> None:
        self._address = address
        self.reason = reason
        self._waiters: dict[str, asyncio.Future[PooledOutput]] = {}
        self._streams: dict[str, Listener] = {}
        self._going_on: SequenceIds = ()  # the rows that the engine last named,
        # and who hears of each; None: somebody has come or gone.
        self._told: list[tuple[Callable[[int, int], None], int]] | None = None
        self._outgoing: list[Request] = []
        self._cancelled: list[str] = []
        self._name = secrets.token_hex(8)
        self._window: Window | None = None  # the engine's memory, where we could map it
        self._given_back: deque[tuple[str, int]] = deque()
        self.ready: Ready | None = None

    def start(self) -> None:
        """Connect; call from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is gone
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(self._address)
        self._loop.add_reader(int(self._socket.getsockopt(zmq.FD)), self._on_readable)
        self._loop.add_reader(int(self._monitor.getsockopt(zmq.FD)), self._on_monitor)
        self._loop.call_soon(self._on_monitor)

    def close(self) -> None:
        for socket in (self._socket, self._monitor):
            with contextlib.suppress(zmq.ZMQError):
                self._loop.remove_reader(int(socket.getsockopt(zmq.FD)))
        self._fail_all("the server is closing")
        self._context.destroy(linger=0)

    @property
    def waiting(self) -> int:
        return len(self._waiters) + len(self._streams)

    async def run(self, request: Request) -> PooledOutput:
        """The answer to one request. Cancelling the caller cancels the request's rows."""
        return await self._ask(request.id, lambda: self._enqueue(request))

    async def compare(self, comparison: Comparison) -> PooledOutput:
        """The scores of vectors that the caller brought."""
        return await self._ask(comparison.id, lambda: self._send(pack_comparison(comparison)))

    async def _ask(self, request_id: str, send: Callable[[], None]) -> PooledOutput:
        """Register the waiter, then send."""
        if self.ready is None:
            raise EngineUnavailable(self.reason())
        future: asyncio.Future[PooledOutput] = self._loop.create_future()
        self._waiters[request_id] = future
        send()
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request_id)
            raise
        finally:
            self._waiters.pop(request_id, None)

    def _enqueue(self, request: Request) -> None:
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(request)

    def listen(self, request: Request, listener: Listener) -> Leave:
        """Have a request's rows continued; the listener is told as it comes."""
        if self.ready is None:
            raise EngineUnavailable(self.reason())
        self._streams[request.id] = listener
        self._told = None
        self._enqueue(request)
        return lambda: self._leave(request.id)

    def _leave(self, request_id: str) -> None:
        listener = self._streams.pop(request_id, None)
        self._told = None
        if listener is not None and not listener.over:
            self._cancel(request_id)

    async def generate(self, request: Request) -> AsyncIterator[list[GeneratedTokens]]:
        """Parts of the request's rows as they come. Closing the iterator cancels what is left."""
        stream = Stream(request)
        leave = self.listen(request, stream)
        try:
            async for parts in stream.parts():
                yield parts
        finally:
            leave()

    def _cancel(self, request_id: str) -> None:
        if not self._cancelled:
            self._loop.call_soon(self._flush_cancelled)
        self._cancelled.append(request_id)

    def _flush(self) -> None:
        requests, self._outgoing = self._outgoing, []
        self._send(pack_requests(requests))

    def _flush_cancelled(self) -> None:
        ids, self._cancelled = self._cancelled, []
        self._send([encode(Cancel(ids))])

    def _send(self, frames: list[Any]) -> None:
        if self.ready is None:
            return  # whoever waits has been told
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # it is going away this very moment; the monitor will say so
            return
        self._on_readable()  # a send may swallow the edge that announces a message

    def _on_readable(self) -> None:
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            header, *bulk = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            message = decode_from_engine(header.buffer)
            if isinstance(message, Ready):
                self.ready = message
                self._attach(message)
                log.info("engine ready (process %d)", message.pid)
            elif isinstance(message, Outcomes):
                self._settle(message, [frame.buffer for frame in bulk])

    def _attach(self, ready: Ready) -> None:
        """Map the engine's memory and say so; what cannot be mapped is sent instead."""
        shared, window = ready.shared, self._window
        if shared is None:
            self._window = None
            return
        if window is None or window.name != shared.name:
            try:
                self._window = Window(shared, self._give_back)
            except (OSError, ValueError) as error:
                self._window = None
                log.warning("the engine's memory cannot be shared, answers are sent: %s", error)
                return
        self._send([encode(Attached(shared.name, self._name, os.getpid()))])
        self._flush_given_back()

    def _give_back(self, shared: str, block: int) -> None:
        """Nothing here reads this block any more; called on whatever thread that turned out."""
        self._given_back.append((shared, block))
        with contextlib.suppress(RuntimeError):  # the loop is closed: the engine will see us go
            self._loop.call_soon_threadsafe(self._flush_given_back)

    def _flush_given_back(self) -> None:
        if self.ready is None or not self._given_back:
            return  # if it is the same engine that comes back, it is told then
        given = [self._given_back.popleft() for _ in range(len(self._given_back))]
        name = None if self.ready.shared is None else self.ready.shared.name
        if blocks := [block for shared, block in given if shared == name]:
            self._send([encode(GivenBack(str(name), blocks))])

    def _settle(self, message: Outcomes, frames: list[Any]) -> None:
        if message.shared:
            assert self._window is not None, "the engine shares only with those who have said that they can"
            frames = with_shared(frames, message.shared, self._window.block)
        outcomes = unpack_outcomes(message.items, frames, self._going_on)
        by_request: dict[str, Parts] = {}
        for outcome in outcomes:
            if isinstance(outcome, DecodedTokens):
                self._go_on(outcome)
            elif isinstance(outcome, GeneratedTokens):
                by_request.setdefault(outcome.id, []).append(outcome)
        for request_id, parts in by_request.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.receive(parts)
        for outcome in outcomes:
            if isinstance(outcome, DecodedTokens | GeneratedTokens):
                continue
            if isinstance(outcome, Failure) and (stream := self._streams.get(outcome.id)) is not None:
                stream.receive(outcome.error)
                continue
            future = self._waiters.get(outcome.id)
            if future is None or future.done():
                continue  # its client went away
            if isinstance(outcome, PooledOutput):
                future.set_result(outcome)
            else:
                future.set_exception(outcome.error)

    def _go_on(self, step: DecodedTokens) -> None:
        """Tell each row's listener its token; who that is, is looked up when something has changed."""
        if self._told is None or step.rows is not self._going_on:
            self._going_on = step.rows
            heard = [(self._streams.get(request_id), row) for request_id, row in step.rows]
            self._told = [(_unheard if stream is None else stream.token, row) for stream, row in heard]
        for (token, row), number in zip(self._told, step.token_ids.tolist(), strict=True):
            token(row, number)

    def _on_monitor(self) -> None:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet()
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_readable()  # what it said before it went
                self.ready = None
                self._fail_all("the engine process stopped while this request was in flight")

    def _greet(self) -> None:
        """Ask the new engine whether it is ready; it answers as soon as it is."""
        try:
            self._socket.send_multipart([encode(Hello())], zmq.NOBLOCK)
        except zmq.Again:  # the handshake is done a moment before the socket can be written to
            self._loop.call_later(0.005, self._greet)
        self._on_readable()

    def _fail_all(self, reason: str) -> None:
        """Tell everyone who waits. The rows are lost; the client may send them again."""
        lost = [future for future in self._waiters.values() if not future.done()]
        if lost or self._streams:
            log.warning("%s; %d requests fail", reason, len(lost) + len(self._streams))
        for future in lost:
            future.set_exception(EngineUnavailable(f"{reason}; it is being restarted, try again"))
        for stream in self._streams.values():
            stream.receive(EngineUnavailable(f"{reason}; it is being restarted, try again"))


def _unheard(row: int, number: int) -> None:
    """Its client went away."""
