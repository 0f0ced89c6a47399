"""The engine's side of the wire: an `EngineCore` behind a ZeroMQ socket.

A request belongs to the connection that submitted it: only that connection gets its outcomes and can cancel
it. When an API process exits or reconnects, the engine cancels all work of its former connection. A message
or a request that cannot be read does not affect others.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import zmq

from penstock.engine.loop import EngineCore
from penstock.engine.sleep import Command, Done, SleepCommand, SleepController, SleepReport, WakeCommand
from penstock.errors import BadValue, EngineError
from penstock.types import (
    Array,
    Comparison,
    DecodedTokens,
    EngineSleep,
    Failure,
    Outcome,
    PooledRows,
    Request,
    SequenceIds,
)
from penstock.wire.frames import receive_frames, send_frames
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
    unpack_each,
    unpack_requests,
)
from penstock.wire.processes import Clients
from penstock.wire.router import OutcomeRouter
from penstock.wire.shared_memory import Region, open_shared_memory
from penstock.wire.status import EngineStatus, StatusWriter

log = logging.getLogger("penstock.engine")


class EngineServer:
    """Runs the core and the socket on one thread, which sleeps until a message arrives or a step finishes."""

    IDLE_POLL_MS = 250  # also the longest time between two heartbeats of a healthy loop
    STALE_METRICS_POLL_MS = 100  # while the published metrics are out of date
    STATUS_INTERVAL_S = 0.002  # between two writes of the status page
    FAILURE_DELIVERY_S = (
        0.2  # time for API processes to read why requests failed, until the connection closes
    )

    def __init__(self, address: str, shared_bytes: int = 0, status: StatusWriter | None = None) -> None:
        self.memory = open_shared_memory(shared_bytes)
        self._status = status
        # Several I/O threads send large outputs to several API processes in parallel.
        self._context = zmq.Context(io_threads=4)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._address = address
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)
        self._clients = Clients()
        self._poller.register(self._clients.fileno(), zmq.POLLIN)
        self._number = secrets.randbits(32)  # identifies this engine process in its messages
        self._router: OutcomeRouter[bytes] = OutcomeRouter()  # owners are the connections of API processes
        self._last_rows: dict[bytes, SequenceIds] = {}  # rows of each connection's last `DecodedTokens`
        # When to write the status page next, and whether it shows waiting work.
        self._publish_at_s, self._published_waits = 0.0, False
        self._last_request_s = 0.0  # when a request last arrived or was answered
        self._stopping = False
        self.wake_timeout_s = 30.0  # how long a request waits for a sleeping model; 0: not at all
        # Called on the thread that wakes the model, with the number of bytes that the model will allocate.
        self.make_room: Callable[[int], None] = lambda num_bytes: None
        # Called when the status page shows that the model has allocated its memory, or failed to.
        self.leave_room: Callable[[], None] = lambda: None
        self.observe_sleep: Callable[[SleepReport], None] = lambda report: None
        self._sleep_commands: deque[Command] = deque()
        self._ends: list[Callable[[], None]] = []  # `done` calls due after the next write of the status page
        self._calls: deque[Callable[[EngineCore], None]] = deque()  # appended on any thread

    def sleep(self, level: int | None, done: Done) -> None:
        """Finish everything in flight, then free the model's memory; callable from any thread.

        `level`: one of `SLEEP_LEVELS`, None for the device's default. The engine's thread calls `done` with
        None when the model sleeps, or with the reason why it does not.
        """
        self._sleep_commands.append(SleepCommand(level, self._after_status(done)))
        self.wake()

    def wake_up(self, done: Done) -> None:
        """Wake the model; callable from any thread. `done` is called as in `sleep`."""
        self._sleep_commands.append(WakeCommand(self._after_status(done)))
        self.wake()

    def _after_status(self, done: Done) -> Done:
        """Delay `done` until the status page shows the end of the sleep or wake-up."""
        return lambda reason: self._ends.append(partial(done, reason))

    def call(self, work: Callable[[EngineCore], None]) -> None:
        """Run a short function on the engine's thread between two steps; callable from any thread."""
        self._calls.append(work)
        self.wake()

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
            core.mark_launch = self._status.launching
        sleep = self._attach(core, ready)
        self._socket.bind(self._address)  # only now: a connection means that the engine can serve
        metrics_are_current = True
        self._publish_status()
        self.leave_room()
        published_state = sleep.state
        while core.device_failure is None and (not self._stopping or core.busy or sleep.busy):
            readable = dict(self._poller.poll(self._poll_timeout_ms(metrics_are_current)))
            if self._wake_receiver.fileno() in readable:
                self._drain_wakeups()
            while self._calls:
                self._calls.popleft()(core)
            if self._clients.fileno() in readable or self._clients.must_ask:
                self._drop_exited_clients()
            if self._socket in readable:
                self._send_outcomes(self._receive())
            self._send_outcomes(core.step())
            if sleep.needs_turn:
                self._send_outcomes(sleep.turn())
                if sleep.is_awake:
                    self._send_outcomes(core.step())  # launch held requests before polling again
            elif not readable and sleep.is_awake:
                core.run_idle_work()
            if not core.busy:
                self._last_rows.clear()  # otherwise closed connections would accumulate
            metrics_are_current = publish_metrics(core)
            if sleep.state is not published_state:
                self._publish_state(sleep.state)
                published_state = sleep.state
            self._publish_status()
            while self._ends:
                self._ends.pop(0)()
        if core.device_failure is None:  # otherwise threads of the core may wait for the device forever
            core.close()
        else:
            time.sleep(self.FAILURE_DELIVERY_S)
        self._context.destroy(linger=2000)
        self._clients.close()
        if self.memory is not None:
            self.memory.close()

    def _attach(self, core: EngineCore, ready: Ready) -> SleepController:
        """Attach the core that this server runs."""
        core.pending.joins_answers = True
        self._core, self._ready = core, msgspec.structs.replace(ready, engine=self._number)
        self._last_request_s = core.clock()
        self._sleep = SleepController(
            core,
            core.sleeper,
            wake_timeout_s=self.wake_timeout_s,
            make_room=lambda num_bytes: self.make_room(num_bytes),
            observe=self.observe_sleep,
            commands=self._sleep_commands,
        )
        return self._sleep

    def _publish_state(self, state: EngineSleep) -> None:
        self._publish_at_s = 0.0
        self._publish_status()
        if state in (EngineSleep.AWAKE, EngineSleep.ASLEEP):
            self.leave_room()

    def _publish_status(self) -> None:
        """Publish the loop's heartbeat and the waiting work. Called in every iteration of the loop. The page
        is written every `STATUS_INTERVAL_S`, and at once when requests start or stop waiting."""
        core = self._core
        queue, held = core.scheduler.queue, core.held
        now_s, waits = core.clock(), queue.num_tokens > 0 or held.num_rows > 0
        if self._status is not None and (now_s >= self._publish_at_s or waits is not self._published_waits):
            self._publish_at_s, self._published_waits = now_s + self.STATUS_INTERVAL_S, waits
            backlog, prompts = core.backlog, core.prompt_backlog
            adapters = core.adapter_stats
            self._status.publish(
                EngineStatus(
                    pid=self._ready.pid,
                    heartbeat_s=now_s,
                    step_began_s=core.oldest_launch_s,
                    queued_tokens=backlog.num_tokens,
                    queued_rows=queue.num_rows + held.num_rows,
                    tokens_per_s=backlog.tokens_per_s,
                    queued_large_tokens=backlog.large_tokens,
                    queued_prompt_tokens=prompts.num_tokens,
                    prompt_tokens_per_s=prompts.tokens_per_s,
                    small_weight=backlog.small_weight,
                    large_weight=backlog.large_weight,
                    prompt_weight=prompts.small_weight,
                    state=self._sleep.state,
                    last_request_s=self._last_request_s,
                    device_bytes=self._sleep.device_bytes,
                    adapters_on_host=adapters.num_on_host,
                    adapters_on_device=adapters.num_on_device,
                    adapter_host_loads=adapters.num_host_loads,
                    adapter_device_loads=adapters.num_device_loads,
                )
            )

    def _poll_timeout_ms(self, metrics_are_current: bool) -> int:
        idle_ms = self.IDLE_POLL_MS if metrics_are_current else self.STALE_METRICS_POLL_MS
        core, sleep = self._core, self._sleep
        other = core.idle_work_due_s() if sleep.is_awake else sleep.next_deadline_s()
        deadlines = [each for each in (core.next_deadline_s(), other) if each is not None]
        deadline = min(deadlines, default=None)
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
                sender, *parts = [frame.bytes for frame in receive_frames(self._socket)]
            except zmq.Again:
                return refused
            try:
                refused += self._handle(sender, parts)
            except Exception:  # no message may stop the engine
                log.exception("a message of an API process could not be handled")
            if self._core.can_fill_step:  # checked after a message, so that every call handles one
                return refused

    def _handle(self, sender: bytes, parts: Sequence[bytes]) -> list[Outcome]:
        """Handle one message. Returns the failures of requests that the core refuses."""
        header, *frames = parts
        try:
            message = decode_to_engine(header)
        except msgspec.DecodeError:
            return self._submit_each(sender, header, frames)
        if isinstance(message, Hello):
            self._welcome(sender, message)
        elif sender not in self._clients:
            return []  # its process has exited, or it was sent to an earlier engine
        elif isinstance(message, Submit):
            return self._submit(sender, message, header, frames)
        elif isinstance(message, Compare):
            return self._compare(sender, message, frames)
        elif isinstance(message, Cancel):
            for request_id in message.ids:
                if self._router.owner(request_id) == sender:
                    self._cancel(request_id)
                    self._router.remove(request_id)
        elif self.memory is not None and message.memory == self.memory.info.name:
            if isinstance(message, MemoryMapped):
                self.memory.add_reader(sender, message.reader, message.pid)
            else:
                self.memory.release(sender, message.blocks)
        return []

    def _submit(
        self, sender: bytes, message: Submit, header: bytes, frames: Sequence[bytes]
    ) -> list[Outcome]:
        try:
            requests = unpack_requests(message.requests, frames[0], frames[1:])
        except Exception:
            return self._submit_each(sender, header, frames)
        return self._take_on(sender, requests)

    def _submit_each(self, sender: bytes, header: bytes, frames: Sequence[bytes]) -> list[Outcome]:
        """Submit the readable requests of a message, and fail the others."""
        requests, failures = unpack_each(header, frames[0], frames[1:])
        if sender not in self._clients:
            return []
        log.error("%d requests of an API process could not be read: %s", len(failures), failures[:1])
        self._send(sender, failures)
        return self._take_on(sender, requests)

    def _compare(self, sender: bytes, message: Compare, frames: Sequence[bytes]) -> list[Outcome]:
        try:
            comparison = unpack_comparison(message, frames)
        except (ValueError, TypeError) as error:
            why = BadValue(f"the engine cannot read this comparison: {error}")
            self._send(sender, [Failure(message.id, why)])
            return []
        return self._take_on(sender, [comparison])

    def _take_on(self, sender: bytes, work: Sequence[Request | Comparison]) -> list[Outcome]:
        refused: list[Outcome] = []
        self._last_request_s = self._core.clock()
        submit = self._core.submit if self._sleep.is_awake else self._sleep.hold
        for each in work:
            if self._router.add(each.id, sender):
                refused += submit(each)
            else:  # the earlier request keeps the id and its outcomes
                in_use = BadValue(f"request_id {each.id!r} is already in use", param="request_id")
                self._send(sender, [Failure(each.id, in_use)])
        return refused

    def _cancel(self, request_id: str) -> None:
        if self._sleep.is_awake or not self._sleep.cancel(request_id):
            self._core.cancel(request_id)

    # API processes that come and go.

    def _welcome(self, sender: bytes, message: Hello) -> None:
        """Report to an API process that the engine is ready. Work of its former connection is cancelled."""
        if sender not in self._clients:
            for former in self._clients.connections_of(message.client):
                self._drop_client(former)
            self._clients.add(sender, message.client, message.pid)
        if sender in self._clients:  # otherwise its process has exited
            send_frames(self._socket, [sender, encode(self._ready)])

    def _drop_exited_clients(self) -> None:
        for connection in self._clients.exited():
            self._drop_client(connection)

    def _drop_client(self, connection: bytes) -> None:
        """Remove a connection and cancel its requests, which nothing waits for any more."""
        self._clients.remove(connection)
        self._last_rows.pop(connection, None)
        abandoned = self._router.remove_owner(connection)
        for request_id in abandoned:
            self._cancel(request_id)
        log.info("an API process is gone; %d of its requests were cancelled", len(abandoned))

    # Outcomes.

    def _send_outcomes(self, outcomes: list[Outcome]) -> None:
        if not outcomes:
            return
        self._last_request_s = self._core.clock()
        for connection, theirs in self._router.route(outcomes, self._core.generates).items():
            self._send(connection, theirs)

    def _send(self, connection: bytes, outcomes: Sequence[Outcome]) -> None:
        """Send outcomes in one message, and one for each large output.

        Sending never waits: ZeroMQ queues the messages of an API process that reads slowly.
        """
        last_rows = self._last_rows.get(connection, ())
        for group in split_into_messages(outcomes):
            try:
                messages = [self._pack(connection, group, last_rows)]
                last_rows = last_decoded_rows(group, last_rows)
            except Exception:
                messages, last_rows = self._pack_each(connection, group), ()
            for frames in messages:
                send_frames(self._socket, [connection, *frames])
        self._last_rows[connection] = last_rows

    def _pack(self, connection: bytes, outcomes: Sequence[Outcome], last_rows: SequenceIds) -> list[Any]:
        """The frames of one message. If packing fails, release the blocks that were shared for it."""
        shared: list[int] = []

        def share(array: Array) -> Region | None:
            region = None if self.memory is None else self.memory.share(array, connection)
            if region is not None:
                shared.append(region.start)
            return region

        try:
            return pack_outcomes(outcomes, last_rows, share, self._number)
        except Exception:
            if self.memory is not None:
                self.memory.release(connection, shared)
            raise

    def _pack_each(self, connection: bytes, outcomes: Sequence[Outcome]) -> list[list[Any]]:
        """The frames of a message for each outcome. One that cannot be packed becomes a failure."""
        messages: list[list[Any]] = []
        for outcome in outcomes:
            try:
                messages.append(self._pack(connection, [outcome], ()))
            except Exception as error:
                log.exception("an outcome could not be packed")
                messages.append(self._pack(connection, self._unsendable(outcome, error), ()))
        return messages

    def _unsendable(self, outcome: Outcome, error: Exception) -> list[Failure]:
        """End the requests of an outcome that cannot be sent."""
        if isinstance(outcome, Failure):  # its message has characters that cannot be encoded
            readable = outcome.error.message.encode(errors="backslashreplace").decode()
            return [Failure(outcome.id, type(outcome.error)(readable))]
        if isinstance(outcome, DecodedTokens):
            ids = {name for name, _ in outcome.rows}
        else:
            ids = set(outcome.ids) if isinstance(outcome, PooledRows) else {outcome.id}
        for request_id in ids:
            self._core.cancel(request_id)
            self._router.remove(request_id)
        why = EngineError(f"the output cannot be sent: {type(error).__name__}: {error}")
        return [Failure(request_id, why) for request_id in ids]
