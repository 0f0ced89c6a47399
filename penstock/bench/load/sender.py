"""Sends the requests of one load process, at their due times and within its share of the concurrency."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable

from penstock.bench.load.plan import WorkerPlan
from penstock.bench.load.refusal import refusal
from penstock.bench.load.samples import GIVEN_UP, OK, Recorder
from penstock.bench.load.store import Store, draw
from penstock.bench.load.wire import CONNECTIONS, Connection, StreamConnection

_GIVE_UP_AFTER = 200  # failed connections in a row, after which the server counts as gone


class Sender:
    """Keeps connections busy until no tickets or no time is left, then calls `finished` once."""

    def __init__(
        self, plan: WorkerPlan, store: Store, recorder: Recorder, finished: Callable[[], None]
    ) -> None:
        self.plan, self.store, self.recorder, self.finished = plan, store, recorder, finished
        self.completed = 0
        self.reason: str | None = None  # why sending ended early
        self._loop = asyncio.get_running_loop()
        self._make = CONNECTIONS[plan.reader]
        self._tls = ssl.create_default_context() if plan.address.tls else None
        self._timed = bool(store.due_s)
        self._live: set[Connection] = set()
        self._idle: list[Connection] = []
        self._active = 0
        self._refused = 0  # failed connections in a row
        self._held: int | None = None  # a ticket that is not due yet
        self._count = plan.number
        self._exhausted = False
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def begin(self, at_s: float) -> None:
        self._at_s = at_s
        self._deadline = at_s + self.plan.duration_s if self.plan.duration_s else float("inf")
        self._loop.call_later(1.0, self._fail_late_requests)
        self._pump()

    def stop(self) -> None:
        """Stop sending. Requests in flight are recorded as neither answered nor failed."""
        self._exhausted = True
        now = time.monotonic()
        for connection in [c for c in self._live if c.busy]:
            connection.busy = False
            self._active -= 1
            self._note(connection, now, GIVEN_UP)
        self._pump()

    # drawing and sending

    def _pump(self) -> None:
        """Send every request that is due while slots are free. Called again by a timer, or when a slot
        becomes free."""
        slots, store = self.plan.slots, self.store
        while not self._exhausted and (slots is None or self._active < slots):
            ticket = self._draw() if self._held is None else self._held
            if ticket is None:
                self._exhausted = True
                break
            now = time.monotonic()
            due = self._at_s + store.due_s[ticket] if self._timed else now
            if due > now:
                self._held = ticket
                self._wake_in(due - now)
                return
            self._held = None
            self._send(ticket % store.count, due, now)
        if self._exhausted and not self._active and not self._over:
            self._over = True
            for connection in list(self._live):
                connection.close()
            self.finished()

    def _draw(self) -> int | None:
        if self.plan.tickets_fd is not None:
            return draw(self.plan.tickets_fd)
        if time.monotonic() >= self._deadline:
            return None
        self._count += self.plan.processes
        return self._count - self.plan.processes

    def _wake_in(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(delay_s, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._pump()

    def _send(self, index: int, due: float, start: float) -> None:
        self._active += 1
        if self._idle:
            connection = self._idle.pop()
            connection.begin(index, due, start)
            connection.write(self.store[index])
        else:
            self._open(index, due, start)

    def _open(self, index: int, due: float, start: float) -> None:
        connection = self._make(self)
        connection.begin(index, due, start)
        self._live.add(connection)
        opened_socket = None if self._tls else self._connect_socket(connection)
        task = self._loop.create_task(self._connect(connection, opened_socket))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _connect_socket(self, connection: Connection) -> socket.socket | OSError:
        """A socket that is connecting, with the request already written if the system accepts it.

        Otherwise, with hundreds of requests at once, the event loop needs three iterations before the first
        byte is sent.
        """
        address = self.plan.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            return error
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if (code := sock.connect_ex((address.host, address.port))) not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            connection.sent = sock.send(self.store[connection.index])
        except BlockingIOError:  # connecting takes longer, for example across a network
            pass
        except OSError as error:
            sock.close()
            return error
        return sock

    async def _connect(self, connection: Connection, opened_socket: socket.socket | OSError | None) -> None:
        address = self.plan.address
        try:
            if isinstance(opened_socket, OSError):
                raise opened_socket
            if opened_socket is None:
                name = address.server_name
                await self._loop.create_connection(
                    lambda: connection, address.host, address.port, ssl=self._tls, server_hostname=name
                )
                return
            if not connection.sent:
                await self._established(opened_socket)
            await self._loop.create_connection(lambda: connection, sock=opened_socket)
        except OSError as error:
            self._live.discard(connection)
            self._refused += 1
            self._fail(connection, _cannot_connect(error))

    async def _established(self, sock: socket.socket) -> None:
        """Wait until the server accepts or refuses the connection."""
        done, number = asyncio.Event(), sock.fileno()
        self._loop.add_writer(number, done.set)
        try:
            await done.wait()
        finally:
            self._loop.remove_writer(number)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            sock.close()
            raise OSError(code, os.strerror(code))

    # events of the connections

    def connected(self, connection: Connection) -> None:
        if not connection.busy:  # stopped in the meantime
            connection.close()
            return
        request = self.store[connection.index]
        if connection.sent < len(request):
            connection.write(request[connection.sent :])

    def answered(self, connection: Connection, now: float) -> None:
        connection.busy = False
        connection.served += 1
        self._active -= 1
        self._refused = 0
        status = connection.status
        if status == 200:
            fault = connection.fault()
        else:
            fault = refusal(status, connection.head)
        self._note(connection, now, OK if fault is None else self.recorder.message(fault), status)
        if self.plan.keepalive and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        self._pump()

    def lost(self, connection: Connection, reason: str) -> None:
        self._live.discard(connection)
        if not connection.busy:
            if connection in self._idle:
                self._idle.remove(connection)
            return
        if connection.served and not connection.first_byte:
            # The server may close a kept-alive connection just as it is used again. That is not a failure.
            connection.busy = False
            self._open(connection.index, connection.due, connection.start)
            return
        self._refused += 1
        self._fail(connection, reason)

    def _fail(self, connection: Connection, reason: str) -> None:
        if not connection.busy:
            return
        connection.busy = False
        self._active -= 1
        self._note(connection, time.monotonic(), self.recorder.message(reason))
        if self._refused >= _GIVE_UP_AFTER and not self._exhausted:
            self._exhausted = True
            self.reason = f"{self._refused} connections in a row failed, the last with: {reason}"
        self._loop.call_soon(self._pump)

    def _fail_late_requests(self) -> None:
        if self._over:
            return
        now = time.monotonic()
        for connection in [c for c in self._live if c.busy and now - c.start > self.plan.timeout_s]:
            self._fail(connection, f"no complete answer within {self.plan.timeout_s:g} s")
            connection.close()
        self._loop.call_later(1.0, self._fail_late_requests)

    def _note(self, connection: Connection, now: float, error: int, status: int = 0) -> None:
        input_tokens, output_tokens, first, last = -1, 0, 0.0, 0.0
        gaps: list[float] = []
        if error == OK:
            self.completed += 1
            input_tokens, output_tokens = connection.tokens()
            if isinstance(connection, StreamConnection):
                stream = connection.stream
                first, last, gaps = stream.first_token, stream.last_token, stream.gaps
        self.recorder.add(
            (
                connection.index,
                connection.due,
                connection.start,
                connection.first_byte,
                now,
                first,
                last,
                status,
                error,
                input_tokens,
                output_tokens,
                connection.body_bytes,
                len(gaps),
            ),
            gaps,
        )


def _cannot_connect(error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return "too many open files in the load client: raise `ulimit -n` or lower --max-concurrency"
    return f"cannot connect: {error.strerror or error}"
