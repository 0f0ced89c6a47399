"""One HTTP connection: uvicorn's protocol with bounds on what a client can make the server hold or wait for.

A request's body is collected here and passed to the application as a whole, so that an incomplete body does
not count as a request in flight. Only an upload is passed on in pieces. If a request exceeds a limit,
`receive` raises the error, and the endpoint turns it into an answer in its dialect's shape.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import httptools
import msgspec
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState as UvicornState

from penstock.api.access_log import SCOPE_KEY, Claim, log_unrouted
from penstock.api.call import JSON
from penstock.api.connection_table import ConnectionTable
from penstock.api.direct import Header, OnEnd, offer, withdraw
from penstock.api.error_styles import OPENAI_ERRORS
from penstock.api.metrics import REQUESTS
from penstock.api.uploads import STREAM_BODY
from penstock.errors import (
    BadValue,
    BodyTooLarge,
    Cancelled,
    HeadersTooLarge,
    PenstockError,
    ReadTimeout,
    UnknownHost,
    UrlTooLong,
)

MAX_PIPELINED = 64  # requests of one connection that wait for an earlier one
ALWAYS_READ_BYTES = 1 << 16  # a body of this size is read even if the server's buffers are full
MAX_DISCARDED_BYTES = 1 << 30  # a client may send this many after its answer, within the timeouts
MAX_WAITING_BYTES = 1 << 19  # of an upload, before the server stops reading from its client
UPLOAD_PATH = "/files"  # suffix of paths that take uploads
LINGER_S = 2.0  # for a client to read why its connection ends
MAX_KNOWN_URLS, MAX_KNOWN_URL_BYTES = 256, 256  # cached targets of requests, and the longest cached URL
_FRAMING = (b"content-length", b"transfer-encoding")  # headers that say where a body ends
_STATUS_PREFIX = b"HTTP/1.1 "  # every answer begins with it


class _LimitMet(Exception):
    """Stops the parser. The connection has the reason in `_limit_met`."""


class Exchange(RequestResponseCycle):
    """A request and its answer."""

    # Class defaults: few requests set any of these, and an exchange is made for every request.
    access_log = False  # see `send`
    disconnected = False
    more_body = True
    response_started = False
    response_complete = False
    chunked_encoding: bool | None = None
    expected_content_length = 0
    failure: PenstockError | None = None  # raised to the waiting application
    num_body_bytes = 0
    body: bytes | bytearray = b""  # type: ignore[assignment]
    _num_held = 0  # bytes of this request that count against the process's buffer limit
    _is_delivered = False
    _is_streamed = False
    _on_end: OnEnd | None = None  # called if the request ends without an answer
    _change: asyncio.Event | None = None  # see `message_event`
    task: asyncio.Task[None] | None = None  # that runs the application

    def __init__(self, connection: Connection, *, expect_100_continue: bool, keep_alive: bool) -> None:
        """Set all attributes that uvicorn's own class sets and that are not properties here."""
        self.connection = connection
        self.scope = connection.scope
        self.transport = connection.transport
        self.flow = connection.flow
        self.logger = connection.logger
        self.default_headers = connection.server_state.default_headers
        self.waiting_for_100_continue = expect_100_continue
        self.keep_alive = keep_alive
        self.on_response = connection.on_response_complete

    @property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        """Set whenever `receive` should look again. Most bodies are complete before the application asks for
        them, so it is made when it is first used."""
        if self._change is None:
            self._change = asyncio.Event()
        return self._change

    def _wake(self) -> None:
        """Let `receive` look again, if it waits."""
        if self._change is not None:
            self._change.set()

    def start(self, app: ASGI3Application) -> None:
        """Run the application in a task of its own."""
        self.task = task = self.connection.loop.create_task(self.run_asgi(app))
        self.connection.tasks.add(task)

    async def run_asgi(self, app: ASGI3Application) -> None:
        """Like uvicorn's. The task forgets itself: a callback for that would cost a turn of the loop."""
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            await self._end_badly("Exception in ASGI application\n", error)
        else:
            if not self.response_complete and not self.disconnected:
                await self._end_badly("the application has returned without a complete answer")
        finally:
            if self.task is not None:
                self.connection.tasks.discard(self.task)

    async def _end_badly(self, message: str, error: BaseException | None = None) -> None:
        """Log a fault of the application, and answer with 500 if it has not begun to answer."""
        self.logger.error(message, exc_info=error)
        if self.response_started:
            self.transport.close()
        else:
            await self.send_500_response()

    def stream_body(self) -> None:
        """Deliver the body in pieces as it arrives. Few bytes are buffered; the reader limits its size."""
        self._is_streamed = True

    def add_body(self, piece: bytes) -> None:
        """Collect a piece of the body, or fail the request if the body is too large."""
        if self.failure is not None or self.response_complete:
            self.connection.discard(len(piece))
            return
        size = self.num_body_bytes = self.num_body_bytes + len(piece)
        table = self.connection.table
        table.buffered.held += len(piece)
        self._num_held += len(piece)
        if size > table.limits.max_body_bytes and not self._is_streamed:
            self.fail(BodyTooLarge(f"the body exceeds the limit of {table.limits.max_body_bytes} bytes"))
        elif table.buffered.held > table.buffered.limit and size > ALWAYS_READ_BYTES:
            table.count("buffered_bytes")
            self.fail(table.buffered.full())
        elif not self.body:
            self.body = piece
        elif isinstance(self.body, bytearray):
            self.body += piece
        else:
            self.body = bytearray(self.body)
            self.body += piece
        if self._is_streamed:
            self._wake()
            if len(self.body) > MAX_WAITING_BYTES:
                self.connection.flow.pause_reading()

    def _take_piece(self) -> ASGIReceiveEvent:
        """The bytes of an upload that have arrived; the client may send more."""
        piece = bytes(self.body)
        self.release()
        self._is_delivered = not self.more_body
        self.connection.flow.resume_reading()
        return {"type": "http.request", "body": piece, "more_body": self.more_body}

    def fail(self, error: PenstockError, *, close: bool = False) -> None:
        """Raise the error to the application. `close` ends the connection after the answer."""
        self.failure = error
        self.release()
        if close:
            self.keep_alive = False
            if self.more_body and not isinstance(self.transport, _Detour):
                self.transport = cast(asyncio.Transport, _Detour(self.connection))
        self._wake()
        self._end()

    def release(self) -> None:
        """Let go of the body."""
        self.body = b""
        self.connection.table.buffered.held -= self._num_held
        self._num_held = 0

    def disconnect(self) -> None:
        if not self.response_complete:
            self.disconnected = True
        self.release()
        self._wake()
        self._end()

    def on_end(self, callback: OnEnd | None) -> None:
        self._on_end = callback
        if callback is not None and (self.failure is not None or self.disconnected):
            self.connection.loop.call_soon(self._end)

    def _end(self) -> None:
        """Call back that the request ended without an answer."""
        callback, self._on_end = self._on_end, None
        if callback is not None:
            callback(self.failure or Cancelled("the client disconnected"))

    def probe(self) -> None:
        """Send bytes that do not change the answer. The machine of a disconnected client rejects them.

        Before the answer these are the start of its status line; within a chunked answer, a leading zero of
        the next chunk's size.
        """
        if not self.response_started:
            self.transport.write(_STATUS_PREFIX)
            self.transport = cast(asyncio.Transport, _Detour(self.connection, len(_STATUS_PREFIX)))
        elif self.chunked_encoding and not self.response_complete:
            self.transport.write(b"0")

    def take_body(self) -> bytes | bytearray | None:
        """What `receive` would return at once, if that is the whole body."""
        has_ended = self.failure is not None or self.disconnected
        if has_ended or self.more_body or self._is_delivered or self.waiting_for_100_continue:
            return None
        self._is_delivered = True
        body, self.body = self.body, b""
        return body

    async def receive(self) -> ASGIReceiveEvent:
        """The whole body, or a piece of an upload; after that, the disconnect. Raises the error of a failed
        request."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        while not self.disconnected and not self.response_complete:
            if self.failure is not None:
                raise self.failure
            if self._is_streamed and self.body:
                return self._take_piece()
            if not self.more_body and not self._is_delivered:
                self._is_delivered = True
                body, self.body = self.body, b""
                return {"type": "http.request", "body": cast(bytes, body), "more_body": False}
            await self.message_event.wait()
            self.message_event.clear()
        return {"type": "http.disconnect"}

    def respond(
        self, status: int, lines: bytes, headers: Sequence[Header], body: bytes, *, head_only: bool
    ) -> bool:
        """Send a whole answer in one write. The endpoint has logged the request."""
        if self.disconnected:
            return True
        if self.flow.write_paused or self.response_started:
            return False
        if headers:
            if HEADER_VALUE_RE.search(b"".join([value for _, value in headers])) is not None:
                return False  # `send` reports what is wrong
            lines += b"".join([b"%b: %b\r\n" % header for header in headers])
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the client may or may not still send its body
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        if not self.keep_alive:
            lines += b"connection: close\r\n"
        self.transport.write(b"".join((STATUS_LINE[status], lines, b"\r\n", b"" if head_only else body)))
        self._wake()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
        return True

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        if not self.response_started:
            if self.waiting_for_100_continue and self.more_body:
                self.keep_alive = False  # the client may or may not still send its body
            if self.connection.logs_access and message["type"] == "http.response.start":
                scope: Any = self.scope
                if not scope[SCOPE_KEY].is_claimed:
                    log_unrouted(scope, message["status"])
        return super().send(message)


class _Detour:
    """A transport for an answer that does not begin or end as usual.

    It skips the bytes that were already sent. It does not close while the client still sends, because the
    client's machine would drop the answer.
    """

    def __init__(self, connection: Connection, num_sent: int = 0) -> None:
        self._connection = connection
        self._num_sent = num_sent

    def write(self, data: bytes) -> None:
        if self._num_sent:
            data, self._num_sent = data[self._num_sent :], 0
        self._connection.transport.write(data)

    def close(self) -> None:
        self._connection.linger()

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()


class _BodyReader:
    """Passes one body on from a parser to its connection, and nothing else."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_complete = False

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._connection.on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_complete:
            self._is_complete = True
            self._connection.on_message_complete()


class Connection(HttpToolsProtocol):
    """A client's connection. `check_time` is called periodically, and enforces the timeouts."""

    cycle: Exchange  # the last request of which the headers are complete

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: ConnectionTable,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.table = table
        self.limits = table.limits
        self.hosts = table.hosts
        self.address = ""  # under which the table counts it
        self.logs_access = self.access_log
        self._asgi: Any = {"version": self.asgi_version, "spec_version": "2.3"}
        self.host: bytes | None = None
        self._waiting: deque[tuple[Exchange, ASGI3Application]] = deque()
        self._running: Exchange | None = None
        self._refusal: PenstockError | None = None  # the last answer of this connection
        self._limit_met: PenstockError | None = None  # exceeded by the request that the parser is reading
        self._reads_head = False
        self._discards = False  # ignore whatever else the client sends
        self._has_ended = False  # the client sends no more
        self._head_bytes = 0
        self._chunk_bytes = 0
        self._chunk_s = 0.0  # when the last data came
        self._has_progress = False  # the last chunk had headers, content or the end of a body
        self._num_discarded = 0
        self._num_overhead = 0  # bytes of a body that are not content
        self._since_s = self.loop.time()  # when the connection's current activity began
        self._write_paused_s: float | None = None
        self._closing_s: float | None = None
        self._lingering_s: float | None = None

    # --- the transport's side ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (error := self.table.add(self)) is not None:
            if self.table.may_explain():
                self._refuse(error)
            else:
                transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        for exchange in (self._running, *(each for each, _ in self._waiting)):
            if exchange is not None:
                exchange.disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discards:
            self.discard(len(data))
            return
        self._chunk_bytes = len(data)
        self._chunk_s = self.loop.time()
        self._has_progress = False
        was_in_head = self._reads_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if self._limit_met is None:
                self.table.count("syntax")
            self._stop(self._limit_met or BadValue("this is not a valid HTTP request"))
        else:
            if self._reads_head:
                if was_in_head:
                    self._count_head(len(data))
            elif not self._has_progress:
                self._count_overhead(len(data))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection if an answer is due: the client may still read. TLS has no half-open
        connections."""
        self._has_ended = True
        if self.scheme == "https":
            return None
        if self._reads_head:
            self._stop(BadValue("the connection ended before the headers were complete"))
            return True
        if not self._has_answer_due:
            return None
        if self.cycle.more_body and self.cycle.failure is None and not self.cycle.response_started:
            size = self.cycle.num_body_bytes
            self.cycle.fail(BadValue(f"the connection ended after {size} bytes of the body"), close=True)
        self.cycle.keep_alive = self.cycle.keep_alive and self._refusal is not None
        if self._running is not None:
            self._running.probe()
        self.table.watch_half_closed(self)
        return True

    def pause_writing(self) -> None:
        self._write_paused_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_paused_s = None
        super().resume_writing()

    def file_number(self) -> int:
        """The number of the socket; -1 if it is closed."""
        connected = self.transport.get_extra_info("socket")
        return -1 if connected is None else int(connected.fileno())

    # --- the parser's side ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.host = None
        self.expect_100_continue = False
        self.headers = []
        self._reads_head = True
        self._head_bytes = self._num_discarded = self._num_overhead = 0
        self._since_s = self._chunk_s

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > self.limits.max_url_bytes:
            limit = self.limits.max_url_bytes
            self._meet("url_bytes", UrlTooLong(f"the URL is longer than the limit of {limit} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reads_head:  # a trailer: nothing here uses them
            self._num_overhead += 1
            return
        name = name.lower()
        if name == b"host":
            if self.host is not None:
                self._meet("syntax", BadValue("the request has more than one Host header"))
            self.host = value
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        if len(self.headers) > self.limits.max_headers:
            limit = self.limits.max_headers
            self._meet("headers", HeadersTooLarge(f"the request has more than {limit} headers"))

    def on_headers_complete(self) -> None:
        if self._head_bytes + self._chunk_bytes > self.limits.max_header_bytes:
            self._check_head_bytes()
        self._reads_head = False
        self._has_progress = True
        self._since_s = self._chunk_s
        app = self._make_scope()
        version = self.scope["http_version"]
        is_last = self.table.is_draining
        previous = self.cycle
        self.cycle = exchange = Exchange(
            self,
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=version != "1.0" and not is_last and self.parser.should_keep_alive(),
        )
        offer(self.scope, exchange)
        if self.scope["path"].endswith(UPLOAD_PATH):
            cast(dict[str, Any], self.scope)[STREAM_BODY] = exchange.stream_body
        if previous is None or previous.response_complete:
            self._start(exchange, app)
            return
        self.flow.pause_reading()
        self._waiting.append((exchange, app))
        if len(self._waiting) > MAX_PIPELINED:
            self.table.count("pipelined")
            refused = BadValue(f"more than {MAX_PIPELINED} requests wait on this connection")
            exchange.fail(refused, close=True)
            self._limit_met = refused
            raise _LimitMet

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        self.cycle.add_body(body)

    def on_message_complete(self) -> None:
        self._has_progress = True
        self._since_s = self._chunk_s
        self.cycle.more_body = False
        self.cycle._wake()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._running is not None:
            self._running.release()
            withdraw(self._running.scope)
            self._running = None
        if self.transport.is_closing() or self._lingering_s is not None:
            return
        if self._waiting:
            self._start(*self._waiting.popleft())
            if self._waiting:
                return
        elif self._refusal is not None:
            self._send_refusal()
            return
        elif self.cycle.more_body:
            pass  # an early answer: the rest of the body is discarded, and its timeout still applies
        else:
            self._since_s = self.loop.time()
        self.flow.resume_reading()

    # --- timeouts and limits ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the connection has no unanswered request, not even a partial one."""
        is_reading = self._reads_head or (self.cycle is not None and self.cycle.more_body)
        return not self._has_answer_due and not is_reading

    @property
    def _has_answer_due(self) -> bool:
        return self._running is not None or bool(self._waiting) or self._refusal is not None

    def check_time(self, now_s: float) -> None:
        """End the connection, or its request, if the client has taken too long."""
        if self.transport.is_closing():
            self._closing_s = self._closing_s or now_s
            if now_s - self._closing_s > self.limits.write_timeout_s:
                self._abort("write_timeout")
        elif self._write_paused_s is not None:
            if now_s - self._write_paused_s > self.limits.write_timeout_s:
                self._abort("write_timeout")
        elif self._lingering_s is not None:
            if now_s - self._lingering_s > LINGER_S:
                self.transport.close()
        elif self.flow.read_paused:
            self._since_s = now_s
        elif self._reads_head:
            self._check_head_time(now_s)
        elif self.cycle is not None and self.cycle.more_body:
            self._check_body_time(now_s)
        elif self.is_idle and now_s - self._since_s > self.limits.idle_timeout_s:
            self.table.count("idle_timeout")
            self.transport.close()

    def shutdown(self) -> None:
        """Called when the server begins to drain."""
        self.table.begin_drain()
        if self.cycle is None or self._reads_head:
            return  # a request may be on its way; it is answered with `connection: close`
        if self._has_answer_due:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def end_requests(self, error: PenstockError) -> None:
        """Fail all unanswered requests."""
        if self._reads_head:
            self._stop(error)
        for exchange in (self._running, *(each for each, _ in self._waiting)):
            if exchange is not None:
                exchange.fail(error, close=exchange is self.cycle)
        if not self._has_answer_due and self._lingering_s is None:
            self.transport.close()

    def discard(self, num_bytes: int) -> None:
        """Count discarded bytes; disconnect a client that does not stop sending."""
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_DISCARDED_BYTES:
            self.transport.close()

    def linger(self) -> None:
        """End our side, and wait a moment for the client to end its own."""
        self._discards = True
        if self._has_ended or self.transport.is_closing():
            self.transport.close()
            return
        self._lingering_s = self.loop.time()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    def _check_head_time(self, now_s: float) -> None:
        if now_s - self._since_s > (limit_s := self.limits.header_timeout_s):
            self.table.count("header_timeout")
            self._stop(ReadTimeout(f"the headers were not complete after {limit_s:g} s"))

    def _check_body_time(self, now_s: float) -> None:
        limits, exchange = self.limits, self.cycle
        received = exchange.num_body_bytes  # discarded bytes do not extend the timeout
        if now_s - self._since_s <= limits.body_timeout_s + received / limits.min_body_rate:
            return
        self.table.count("body_timeout")
        if exchange.response_started:
            self.transport.close()
            return
        exchange.fail(
            ReadTimeout(
                f"the body was not complete after {now_s - self._since_s:.0f} s; {received} bytes of it came"
            ),
            close=True,
        )
        self._discards = True

    def _decline_upgrade(self, rest: bytes) -> None:
        """Answer as if no upgrade was requested. The parser takes the body for data of the new protocol."""
        framing = [b"%s: %s\r\n" % each for each in self.headers if each[0] in _FRAMING]
        self.cycle.keep_alive = False
        if not framing:
            self._discards = True
            return
        self.cycle.more_body = True
        self.parser = httptools.HttpRequestParser(_BodyReader(self))
        self.data_received(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n", rest)))

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.max_header_bytes:
            self._stop(self._head_too_large())

    def _check_head_bytes(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._limit_met = self._head_too_large()
            raise _LimitMet

    def _head_too_large(self) -> HeadersTooLarge:
        self.table.count("header_bytes")
        return HeadersTooLarge(f"the headers exceed the limit of {self.limits.max_header_bytes} bytes")

    def _count_overhead(self, num_bytes: int) -> None:
        """Bound chunk extensions and trailers, which the parser may collect."""
        self._num_overhead += num_bytes
        if self._num_overhead > self.limits.max_header_bytes:
            self._stop(self._head_too_large())

    def _meet(self, limit: str, error: PenstockError) -> None:
        self.table.count(limit)
        self._limit_met = error
        raise _LimitMet

    def _abort(self, limit: str) -> None:
        self.table.count(limit)
        self.transport.abort()

    # --- answers ----------------------------------------------------------------------------------------

    def _make_scope(self) -> ASGI3Application:
        """Make the request's scope; return the application that answers it."""
        target = _known_target(self.url) if len(self.url) <= MAX_KNOWN_URL_BYTES else _target(self.url)
        self.scope = {
            "type": "http",
            "asgi": self._asgi,
            "http_version": self.parser.get_http_version(),
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": target.path,
            "raw_path": target.raw_path,
            "query_string": target.query,
            "headers": self.headers,
        }
        if self.logs_access:
            cast(dict[str, Any], self.scope)[SCOPE_KEY] = Claim()
        error = None
        if self.hosts is not None and self.host is not None:
            error = self.hosts.check(self.host)
        return self.app if error is None else _refuse_host(error)

    def _start(self, exchange: Exchange, app: ASGI3Application) -> None:
        self._running = exchange
        if self._has_ended:
            exchange.probe()
        exchange.start(app)

    def _stop(self, error: PenstockError) -> None:
        """Stop reading. The request at fault gets the error, and then the connection ends."""
        exchange = self.cycle
        is_in_body = not self._reads_head and exchange is not None and exchange.more_body
        self._discards = True
        self._reads_head = False
        if exchange is not None and exchange.failure is not None and not exchange.keep_alive:
            return  # it ends the connection already
        if is_in_body and not exchange.response_started:
            exchange.fail(error, close=True)
        else:
            self._refuse(error)

    def _refuse(self, error: PenstockError) -> None:
        """Answer with an error when all earlier answers are sent."""
        self._discards = True
        self._refusal = error
        if self._running is None and not self._waiting:
            self._send_refusal()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        error, self._refusal = self._refusal, None
        REQUESTS.labels("other", str(error.status), "").inc()
        headers, body = _error_parts(error)
        lines = [b"%s: %s\r\n" % header for header in (*headers, (b"connection", b"close"))]
        self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self.linger()


class _Target(NamedTuple):
    """What a request's URL names."""

    path: str
    raw_path: bytes
    query: bytes


def _target(url: bytes) -> _Target:
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return _Target(urllib.parse.unquote(path) if "%" in path else path, parsed.path, parsed.query or b"")


_known_target = lru_cache(MAX_KNOWN_URLS)(_target)


def _error_parts(error: PenstockError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error that no route answers."""
    body = msgspec.json.encode(OPENAI_ERRORS.body(error))
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    if (retry_s := getattr(error, "retry_after_s", None)) is not None:
        headers.append((b"retry-after", b"%d" % retry_s))
    return headers, body


def _refuse_host(error: UnknownHost) -> ASGI3Application:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        REQUESTS.labels("other", str(error.status), "").inc()
        headers, body = _error_parts(error)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return refuse
