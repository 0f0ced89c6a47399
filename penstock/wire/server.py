"""The engine's side of the wire: an `EngineCore` behind a ZeroMQ socket."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from penstock.engine.loop import EngineCore
from penstock.errors import PenstockError
from penstock.types import Array, Failure, Outcome, SequenceIds
from penstock.wire.messages import (
    Cancel,
    Compare,
    Hello,
    MemoryMapped,
    Ready,
    Submit,
    decode_to_engine,
    encode,
    last_decoded_rows,
    pack_outcomes,
    split_into_messages,
    unpack_comparison,
    unpack_requests,
)
from penstock.wire.router import OutcomeRouter
from penstock.wire.shared_memory import Region, open_shared_memory
from penstock.wire.status import EngineStatus, StatusWriter


class EngineServer:
    """Runs the core and the socket on one thread, which sleeps until a message arrives or a step finishes."""

    IDLE_POLL_MS = 250  # also the longest time between two heartbeats of a loop that is well
    STALE_METRICS_POLL_MS = 100  # while the published metrics are out of date
    FAILURE_DELIVERY_S = 0.2  # for API processes to read why requests failed, before the connection closes

    def __init__(self, address: str, shared_bytes: int = 0, status: StatusWriter | None = None) -> None:
        self.memory = open_shared_memory(shared_bytes)
        self._status = status
        self._context = zmq.Context(
            io_threads=4
        )  # so that several API processes get large outputs in parallel
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._address = address
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._router: OutcomeRouter[bytes] = OutcomeRouter()  # owners are the connections of API processes
        self._last_rows: dict[bytes, SequenceIds] = {}  # of the last `DecodedTokens` sent to each connection
        self._stopping = False

    def wake(self) -> None:
        """Wake the thread; callable from any thread and from a signal handler."""
        with contextlib.suppress(BlockingIOError):
            self._wake_sender.send(b"!")

    def stop(self) -> None:
        """Return from `serve` once all requests have finished."""
        self._stopping = True
        self.wake()

    def serve(self, core: EngineCore, ready: Ready, publish_metrics: Callable[[EngineCore], bool]) -> None:
        """Serve until `stop` is called or the device fails.

        `publish_metrics` is called after each step and returns whether the metrics are up to date.
        """
        if self.memory is not None:
            core.pending.allocate = self.memory.empty
            ready = msgspec.structs.replace(ready, shared=self.memory.info)
        if self._status is not None:
            core.before_launch = self._status.launching
        self._core, self._ready = core, ready
        self._socket.bind(self._address)  # only now: a connection means that the engine can serve
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        metrics_are_current = True
        self._publish_status()
        while core.device_failure is None and (not self._stopping or core.busy):
            if self._wake_receiver.fileno() in dict(poller.poll(self._poll_timeout_ms(metrics_are_current))):
                self._drain_wakeups()
            self._send_outcomes(self._receive())
            self._send_outcomes(core.step())
            if not core.busy:
                self._last_rows.clear()  # otherwise closed connections would accumulate
            metrics_are_current = publish_metrics(core)
            self._publish_status()
        if core.device_failure is None:  # otherwise threads of the core may wait for the device forever
            core.close()
        else:
            time.sleep(self.FAILURE_DELIVERY_S)
        self._context.destroy(linger=2000)
        if self.memory is not None:
            self.memory.close()

    def _publish_status(self) -> None:
        """Tell other processes that the loop turns, and how much waits. Called once a turn."""
        if self._status is not None:
            core, backlog, prompts = self._core, self._core.backlog, self._core.prompt_backlog
            self._status.publish(
                EngineStatus(
                    pid=self._ready.pid,
                    heartbeat_s=core.clock(),
                    step_began_s=core.oldest_launch_s,
                    queued_tokens=backlog.num_tokens,
                    queued_rows=core.scheduler.queue.num_rows,
                    tokens_per_s=backlog.tokens_per_s,
                    queued_large_tokens=backlog.large_tokens,
                    queued_prompt_tokens=prompts.num_tokens,
                    prompt_tokens_per_s=prompts.tokens_per_s,
                )
            )

    def _poll_timeout_ms(self, metrics_are_current: bool) -> int:
        idle_ms = self.IDLE_POLL_MS if metrics_are_current else self.STALE_METRICS_POLL_MS
        deadline = self._core.next_deadline_s()
        if deadline is None:
            return idle_ms
        return max(1, min(idle_ms, int((deadline - self._core.clock()) * 1000) + 1))

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._wake_receiver.recv(4096)) == 4096:
                pass

    def _receive(self) -> list[Outcome]:
        """Handle received messages until none is left or a full step could be launched.

        Without the second condition, the device would idle until the last message of a burst is read. Returns
        the failures of requests that the core refuses.
        """
        refused: list[Outcome] = []
        while True:
            try:
                sender, header, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return refused
            message = decode_to_engine(header)
            if isinstance(message, Submit):
                refused += self._submit(sender, message, frames[0])
            elif isinstance(message, Compare):
                self._router.add(message.id, sender)
                self._core.compare(unpack_comparison(message, frames))
            elif isinstance(message, Cancel):
                for request_id in message.ids:
                    self._core.cancel(request_id)
                    self._router.remove(request_id)
            elif isinstance(message, Hello):
                self._socket.send_multipart([sender, encode(self._ready)])
            elif self.memory is not None and message.memory == self.memory.info.name:
                if isinstance(message, MemoryMapped):
                    self.memory.add_reader(sender, message.reader, message.pid)
                else:
                    self.memory.release(sender, message.blocks)
            if self._core.can_fill_step:  # checked after a message, so that every call handles one
                return refused

    def _submit(self, sender: bytes, message: Submit, frame: bytes) -> list[Outcome]:
        refused: list[Outcome] = []
        for request in unpack_requests(message.requests, frame):
            self._router.add(request.id, sender)
            try:
                self._core.add(request)
            except PenstockError as error:
                refused.append(Failure(request.id, error))
        return refused

    def _send_outcomes(self, outcomes: list[Outcome]) -> None:
        """Send a message to each API process that has outcomes, and one for each large output.

        Sending never waits: ZeroMQ queues the messages of an API process that reads slowly.
        """
        for connection, theirs in self._router.route(outcomes, self._core.generates).items():
            last_rows = self._last_rows.get(connection, ())
            for group in split_into_messages(theirs):
                frames = pack_outcomes(group, last_rows, partial(self._share, connection))
                self._socket.send_multipart([connection, *frames], zmq.NOBLOCK, copy=False)
                last_rows = last_decoded_rows(group, last_rows)
            self._last_rows[connection] = last_rows

    def _share(self, connection: bytes, array: Array) -> Region | None:
        return None if self.memory is None else self.memory.share(array, connection)
