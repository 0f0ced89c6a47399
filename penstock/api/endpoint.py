"""What every route does with a request: admit, read, decode, run, reply. Errors become statuses here.

A dialect is a set of routes and the shape of its error body; everything else is shared.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from penstock.api.body import PIECE_BYTES, sized
from penstock.api.body import Body as ReplyBody
from penstock.api.metrics import CONNECTION_LIMITS, ApiMetrics
from penstock.api.nesting import check_nesting
from penstock.api.state import ServerState
from penstock.errors import (
    MAX_MESSAGE_CHARS,
    BadValue,
    BodyTooLarge,
    Cancelled,
    MethodNotAllowed,
    PenstockError,
    Unauthorized,
    UnsupportedEncoding,
    shortened,
)

log = logging.getLogger("penstock.api")
Answered = TypeVar("Answered")
JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
MAX_REQUEST_ID = 256  # characters
_MAX_DIGITS = 18  # of a declared size; longer ones are too large in any case
_UNDECODABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


ErrorShape = Callable[[PenstockError], dict[str, Any]]


@dataclass(slots=True)
class Reply:
    body: ReplyBody
    content_type: bytes = JSON
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Streamed:
    """A reply whose body is sent in pieces. The first piece exists already, so earlier failures have a
    status."""

    first: bytes
    rest: AsyncGenerator[bytes, None]
    content_type: bytes = EVENTS
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


async def streamed(pieces: AsyncGenerator[bytes, None]) -> Streamed:
    """Wait for the first piece; an error before it fails the whole reply."""
    return Streamed(await anext(pieces), pieces)


@dataclass(slots=True)
class Call:
    """One HTTP request in a handler, and where its time went."""

    state: ServerState
    metrics: ApiMetrics
    began_s: float
    body_bytes: int = 0
    request_id: str | None = None
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    device_s: float = 0.0
    encode_s: float = 0.0
    error_shape: ErrorShape | None = None  # of the dialect that the body turned out to be

    def headers(self) -> list[tuple[bytes, bytes]]:
        total_s = time.monotonic() - self.began_s
        out = [
            (b"x-tokenize-ms", b"%.3f" % (self.tokenize_s * 1000)),
            (b"x-queue-ms", b"%.3f" % (self.queue_s * 1000)),
            (b"x-device-ms", b"%.3f" % (self.device_s * 1000)),
            (b"x-total-ms", b"%.3f" % (total_s * 1000)),
        ]
        if self.request_id is not None:
            out.append((b"x-request-id", self.request_id.encode("latin-1", "replace")))
        return out


def openai_error(error: PenstockError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


Handler = Callable[..., Awaitable[Reply | Streamed]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Another kind of body on the same route, recognised by a field that only it has."""

    marker_field: str
    body: type[msgspec.Struct]
    handler: Handler
    error_shape: ErrorShape

    def claims(self, raw: bytes | bytearray) -> bool:
        try:
            return self.marker_field in msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except _UNDECODABLE:
            return False


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One row of the table of routes."""

    path: str
    body: type[msgspec.Struct] | None  # None: GET
    handler: Handler
    group: str
    open_to_all: bool = False  # needs no API key
    error_shape: ErrorShape = openai_error
    other: Dialect | None = None  # a second kind of body on the same path
    methods: tuple[str, ...] | None = None  # None: POST with a body, GET and HEAD without

    @property
    def counts_as_request(self) -> bool:
        """Whether it counts towards the requests in flight."""
        return self.body is not None


class Endpoint:
    """An ASGI application for one route."""

    def __init__(self, state: ServerState, metrics: ApiMetrics, route: RouteSpec) -> None:
        self.state = state
        self.metrics = metrics
        self.path = route.path
        self.handler = route.handler
        self.error_shape = route.error_shape
        self.open_to_all = route.open_to_all
        self.keys = tuple(key.encode() for key in state.config.accepted_keys)
        self.decoder = None if route.body is None else msgspec.json.Decoder(route.body)
        self.other = route.other
        self.other_decoder = None if route.other is None else msgspec.json.Decoder(route.other.body)
        self.counts_as_request = route.counts_as_request
        self.methods = route.methods or (("GET", "HEAD") if route.body is None else ("POST",))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self.state, self.metrics, time.monotonic())
        try:
            self._check(scope)
            reply = await (
                self._admitted(call, scope, receive, send) if self.counts_as_request else self.handler(call)
            )
            if isinstance(reply, Reply):
                reply.headers += call.headers()
        except PenstockError as error:
            reply = self._error(error, call)
        except Exception:
            log.exception("%s failed", self.path)
            reply = self._error(PenstockError("internal error; the server's log has the details"), call)
        if isinstance(reply, Reply):
            await self._send(call, reply, send, head_only=scope["method"] == "HEAD")
        else:
            self._count(call, reply.status)

    def _count(self, call: Call, status: int) -> None:
        self.metrics.request(self.path, status, time.monotonic() - call.began_s)

    async def _send(self, call: Call, reply: Reply, send: Send, head_only: bool) -> None:
        body = reply.body
        if not isinstance(body, bytes) or len(body) > PIECE_BYTES:
            await self._send_large(call, reply, send, head_only)
            return
        self._count(call, reply.status)
        if reply.status != Cancelled.status:
            await send(_start(reply, len(body)))
            await send({"type": "http.response.body", "body": b"" if head_only else body})

    async def _send_large(self, call: Call, reply: Reply, send: Send, head_only: bool) -> None:
        """Send piece by piece, no faster than the client reads. The server holds the answer meanwhile."""
        size, pieces = await sized(reply.body)
        buffered = self.state.buffered
        if buffered.held + size > buffered.limit:
            CONNECTION_LIMITS.labels("buffered_bytes").inc()
            await self._send(call, self._error(buffered.full(), call), send, head_only)
            return
        self._count(call, reply.status)
        buffered.held += size
        try:
            await send(_start(reply, size))
            for piece in () if head_only else pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(
                    0
                )  # lets other requests run, even if the client reads as fast as we write
            await send({"type": "http.response.body", "body": b""})
        finally:
            buffered.held -= size

    def _check(self, scope: Scope) -> None:
        if scope["method"] not in self.methods:
            raise MethodNotAllowed(f"{self.path} takes {' or '.join(self.methods)}, not {scope['method']}")
        if not self.open_to_all:
            check_key(scope, self.keys)

    async def _admitted(self, call: Call, scope: Scope, receive: Receive, send: Send) -> Reply | Streamed:
        """The reply. A streamed one has been sent when this returns: it counts as in flight until then."""
        self.state.check_room()  # before the body, which nobody has to send in vain
        raw = await self._read(scope, receive)
        call.body_bytes = len(raw)
        self.state.admit()
        try:
            if self.decoder is None:
                return await unless_gone(self.handler(call), receive)
            if self.other is not None and self.other_decoder is not None and self.other.claims(raw):
                call.error_shape = self.other.error_shape
                work = self.other.handler(call, _decode(self.other_decoder, raw))
            else:
                work = self.handler(call, _decode(self.decoder, raw))
            reply = await unless_gone(work, receive)
            if isinstance(reply, Streamed):
                reply.headers += call.headers()
                await self._stream(call, reply, receive, send)
            return reply
        finally:
            self.state.release()

    async def _stream(self, call: Call, reply: Streamed, receive: Receive, send: Send) -> None:
        """Send piece by piece, no faster than the client reads. A disconnect cancels the work."""
        plain = [(b"content-type", reply.content_type), (b"cache-control", b"no-cache")]
        headers = [*plain, (b"x-accel-buffering", b"no"), *reply.headers]  # proxies must not collect pieces
        pump = asyncio.ensure_future(self._pump(call, reply, headers, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                error = gone.result()
                reply.status = error.status
                if isinstance(error, Cancelled):
                    self.metrics.refused(error)
                else:
                    pump.cancel()
                    await asyncio.gather(pump, return_exceptions=True)
                    await self._end_stream(self._event(error, call), send)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            await reply.rest.aclose()

    async def _pump(
        self, call: Call, reply: Streamed, headers: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.first, "more_body": True})
        last = b""
        try:
            async for piece in reply.rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except PenstockError as error:
            reply.status = error.status
            last = self._event(error, call)
        except OSError:  # the client has disconnected, which the watcher reports
            reply.status = Cancelled.status
            return
        except Exception:
            log.exception("%s failed", self.path)
            reply.status = PenstockError.status
            last = self._event(PenstockError("internal error; the server's log has the details"), call)
        await self._end_stream(last, send)

    @staticmethod
    async def _end_stream(last: bytes, send: Send) -> None:
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, error: PenstockError, call: Call) -> bytes:
        """An error after the status was sent: the event before the last."""
        self.metrics.refused(error)
        shape = call.error_shape or self.error_shape
        return b"data: " + msgspec.json.encode(shape(error)) + b"\n\ndata: [DONE]\n\n"

    async def _read(self, scope: Scope, receive: Receive) -> bytes | bytearray:
        limit = self.state.config.max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length":
                if value.isdigit() and (len(value) > _MAX_DIGITS or int(value) > limit):
                    raise BodyTooLarge(f"the body has {value[:24].decode()} bytes; the limit is {limit}")
            elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedEncoding(
                    f"Content-Encoding is {value.decode('latin-1')[:100]!r}; send the body uncompressed"
                )
        body: bytes | bytearray = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client disconnected")
            piece = message.get("body", b"")
            if not body:
                body = piece
            elif isinstance(body, bytearray):
                body += piece
            else:
                body = bytearray(body)
                body += piece
            if len(body) > limit:
                raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes")
            if not message.get("more_body", False):
                return body

    def _error(self, error: PenstockError, call: Call) -> Reply:
        headers = call.headers()
        if (retry_s := getattr(error, "retry_after_s", None)) is not None:
            headers.append((b"retry-after", str(retry_s).encode()))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", ", ".join(self.methods).encode()))
        self.metrics.refused(error)
        shape = call.error_shape or self.error_shape
        return Reply(msgspec.json.encode(shape(error)), JSON, error.status, headers)


def _decode(decoder: msgspec.json.Decoder[Any], raw: bytes | bytearray) -> Any:
    check_nesting(raw)
    try:
        body = decoder.decode(raw)
    except msgspec.ValidationError as error:
        message, param = explain(str(error))
        raise BadValue(message, param=param) from None
    except _UNDECODABLE as error:
        raise BadValue(f"the body is not valid JSON: {error}") from None
    if (request_id := getattr(body, "request_id", None)) is not None:
        check_request_id(request_id)
    return body


def check_request_id(request_id: str) -> None:
    """Refuse what cannot be sent back in a header."""
    if len(request_id) > MAX_REQUEST_ID or not request_id.isprintable():
        raise BadValue(
            f"request_id may have up to {MAX_REQUEST_ID} characters, all of them printable",
            param="request_id",
        )


_UNKNOWN = re.compile(r"unknown field `(.*?)`")
_MISSING = re.compile(r"missing required field `(.*?)`")


def explain(text: str) -> tuple[str, str | None]:
    """The decoder's message as (message, field)."""
    text = shortened(text, MAX_MESSAGE_CHARS)  # it repeats values
    before, found_place, place = text.rpartition(" - at `$")  # the last one: a value may contain these words
    message = before if found_place else text
    field_name = place.removesuffix("`").removeprefix(".") if found_place else ""
    for pattern in (_UNKNOWN, _MISSING):
        if found := pattern.search(text):
            field_name = f"{field_name}.{found.group(1)}".strip(".")
    if not field_name:
        return message, None
    name = re.split(r"[\[.]", field_name)[0]
    return (message if f"`{name}`" in message else f"{field_name}: {message}"), name


def check_key(scope: Scope, keys: tuple[bytes, ...]) -> None:
    """Refuse a request without one of `keys`. How long this takes tells nothing about the keys."""
    if not keys:
        return
    for name, value in scope["headers"]:
        if name == b"authorization" and _is_any(value, [b"Bearer " + key for key in keys]):
            return
        if name == b"x-api-key" and _is_any(value, keys):
            return
    raise Unauthorized("a valid API key is required; send `Authorization: Bearer KEY`")


def _is_any(given: bytes, keys: Sequence[bytes]) -> bool:
    return sum(hmac.compare_digest(given, key) for key in keys) > 0  # every key is compared


WATCH_AFTER_S = 0.005  # most requests are answered sooner and need no watcher


async def _disconnected(receive: Receive) -> PenstockError:
    """Wait for the end of a request that is not over; return its reason."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except PenstockError as error:
        return error
    return Cancelled("the client disconnected")


async def unless_gone(work: Awaitable[Answered], receive: Receive) -> Answered:
    """The handler's reply. If the client disconnects or the server stops first, the handler is cancelled."""
    loop, handling = asyncio.get_running_loop(), asyncio.current_task()
    assert handling is not None
    watcher: asyncio.Task[None] | None = None
    end: PenstockError | None = None

    async def watch() -> None:
        nonlocal end
        end = await _disconnected(receive)
        handling.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    timer = loop.call_later(WATCH_AFTER_S, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if end is None:
            raise
        handling.uncancel()
        raise end from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()


def _start(reply: Reply, size: int) -> Message:
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", b"%d" % size),
        *reply.headers,
    ]
    return {"type": "http.response.start", "status": reply.status, "headers": headers}
