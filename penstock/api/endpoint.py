"""Handles a request of any route: admit, read, decode, run, reply. Errors become statuses here.

A dialect is a set of routes and the shape of its error body; everything else is shared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.api.access_log import shown_body
from penstock.api.body import PIECE_BYTES, sized
from penstock.api.call import JSON, Call, Reply, Streamed
from penstock.api.decoding import RouteDecoder
from penstock.api.default_model import use_of
from penstock.api.direct import DirectExchange, offered
from penstock.api.metrics import CONNECTION_LIMITS, ApiMetrics
from penstock.api.result_cache import cache_control_of
from penstock.api.routes import RouteSpec, Variant
from penstock.api.state import ServerState
from penstock.api.uploads import BodyStream
from penstock.errors import (
    BadValue,
    BodyTooLarge,
    Cancelled,
    KeyLimitReached,
    MethodNotAllowed,
    PenstockError,
    Unauthorized,
    UnsupportedEncoding,
)

log = logging.getLogger("penstock.api")
Answered = TypeVar("Answered")
MAX_REQUEST_ID = 256  # characters
RETRIED_STATUSES = (429, 503)  # of temporary errors
_THIS_MACHINE = ("127.0.0.1", "::1")  # addresses that do not identify a client
_LINES = b"content-type: %b\r\ncontent-length: %d\r\n"  # the first headers of an answer
_READ_HEADERS = frozenset((b"x-request-id", b"content-length", b"cache-control", b"content-encoding"))
_MAX_DIGITS = 18  # longer declared sizes are too large in any case


class Endpoint:
    """An ASGI application for one route. `allowed` are the methods of all routes of its path."""

    def __init__(self, state: ServerState, metrics: ApiMetrics, route: RouteSpec) -> None:
        self.state = state
        self.metrics = metrics
        self.observer = state.observer
        self.path = route.path
        self.handler = route.handler
        self.errors = route.errors
        self.keys = state.keys
        self.needs_key = route.admin or (state.config.needs_key and not route.open_to_all)
        self.route = route
        self.use = use_of(route.path)
        self.counts_as_request = route.counts_as_request
        self.methods = self.allowed = route.all_methods
        self.prefix, self.suffix = route.prefix, route.suffix
        self.responds_directly = not state.config.allowed_origins  # otherwise middleware adds headers

    @cached_property
    def decoder(self) -> RouteDecoder | None:
        """Built at the first request, for a fast start: few servers see requests to all routes."""
        route = self.route
        if route.body is None:
            return None
        return RouteDecoder(route.body, route.variants, strict_fields=self.state.config.strict_fields)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply: Reply | Streamed
        call = Call(self.state, self.metrics, time.monotonic())
        if self.observer is not None:
            self.observer.begin(call, scope, self.route)
        call.use = self.use
        if self.prefix is not None:
            call.path_value = (
                scope["path"].rstrip("/").removeprefix(self.prefix).removesuffix(self.suffix).rstrip("/")
            )
        try:
            if scope["method"] not in self.methods:
                reply = self._other_method(scope["method"])
            else:
                if self.needs_key:
                    call.key = self.keys.check(scope, needs_admin=self.route.admin)
                if self.counts_as_request:
                    reply = await self._admitted(call, scope, receive, send)
                else:
                    reply = await self._plain(call, scope, receive, send)
            if isinstance(reply, Reply):
                reply.headers += call.rare_headers()
        except PenstockError as error:
            reply = self._error(error, call)
        except Exception:
            log.exception("%s failed", self.path, extra={"fields": call.log_fields()})
            reply = self._error(PenstockError("internal error; the server's log has the details"), call)
        if not isinstance(reply, Reply):
            self._count(call, reply.status)
        elif not self._respond(call, reply, scope):
            await self._send(call, reply, send, head_only=scope["method"] == "HEAD")
        if self.observer is not None:
            self.observer.end(call, scope)

    def _count(self, call: Call, status: int) -> None:
        call.status = status
        self.metrics.request(self.path, status, call.model_name, time.monotonic() - call.began_s)
        if call.key is not None:
            self.metrics.key_request(call.key.name)

    def _respond(self, call: Call, reply: Reply, scope: Scope) -> bool:
        """Send a small answer through the connection at once. False: it takes ASGI messages."""
        direct, body = offered(scope), reply.body
        if direct is None or not self.responds_directly:
            return False
        if not isinstance(body, bytes) or len(body) > PIECE_BYTES:
            return False
        if reply.status == Cancelled.status:
            self._count(call, reply.status)
            return True
        lines = _LINES % (reply.content_type, len(body)) + call.time_lines()
        head_only = scope["method"] == "HEAD"
        if direct.respond(reply.status, lines, reply.headers, body, head_only=head_only):
            self._count(call, reply.status)
            return True
        return False

    async def _send(self, call: Call, reply: Reply, send: Send, *, head_only: bool) -> None:
        body = reply.body
        if not isinstance(body, bytes) or len(body) > PIECE_BYTES:
            await self._send_large(call, reply, send, head_only)
            return
        self._count(call, reply.status)
        if reply.status == Cancelled.status:
            return
        headers = _headers(call, reply, len(body))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if head_only else body})

    async def _send_large(self, call: Call, reply: Reply, send: Send, head_only: bool) -> None:
        """Send piece by piece, no faster than the client reads. The server holds the answer meanwhile."""
        size, pieces = await sized(reply.body)
        buffered = self.state.buffered
        if not buffered.has_room(size, is_for_operators=self.route.is_for_operators):
            CONNECTION_LIMITS.labels("buffered_bytes").inc()
            await self._send(call, self._error(buffered.full(), call), send, head_only=head_only)
            return
        self._count(call, reply.status)
        buffered.held += size
        try:
            headers = _headers(call, reply, size)
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            for piece in () if head_only else pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(
                    0
                )  # lets other requests run, even if the client reads as fast as we write
            await send({"type": "http.response.body", "body": b""})
        finally:
            buffered.held -= size

    def _other_method(self, method: str) -> Reply:
        """The answer to OPTIONS; any other method is refused."""
        if method != "OPTIONS":
            raise MethodNotAllowed(f"{self.path} takes {' or '.join(self.allowed)}, not {method}")
        return Reply(b"", JSON, 204, [(b"allow", ", ".join((*self.allowed, "OPTIONS")).encode())])

    async def _admitted(self, call: Call, scope: Scope, receive: Receive, send: Send) -> Reply | Streamed:
        """The reply. A streamed one has been sent when this returns: it counts as in flight until then."""
        state, key, limits = self.state, call.key, None
        if key is None or not self.keys.has_several:
            client = client_of(scope)
        else:
            client = key.name
        call.client = client
        state.check_room(client)  # before the body, so that a refused client need not send it
        if key is not None and (limits := key.limits) is not None:
            limits.check()
        direct = offered(scope)
        self._check_headers(call, scope["headers"])
        if direct is None or (raw := direct.take_body()) is None:
            raw = await self._read(receive)
        call.body_bytes = len(raw)
        if self.observer is not None and self.observer.shows_bodies:
            call.shown_body = shown_body(raw)
        state.admit(client)
        if limits is not None:
            try:
                limits.enter()
            except KeyLimitReached:
                state.release(client)
                raise
        try:
            if self.decoder is None:
                return await unless_gone(self.handler(call), receive, direct)
            work = self._work(call, self.decoder, raw)
            reply: Reply | Streamed = await unless_gone(work, receive, direct)
            if isinstance(reply, Streamed):
                call.is_streamed = True
                reply.headers += call.headers()
                await self._stream(call, reply, receive, send)
            return reply
        finally:
            state.release(client)
            if limits is not None:
                limits.leave()
            if call.adapters:
                call.release_adapters()

    async def _plain(self, call: Call, scope: Scope, receive: Receive, send: Send) -> Reply | Streamed:
        """The reply of a route without a JSON body. It does not count as a request in flight."""
        call.query_string = scope["query_string"]
        reply: Reply | Streamed
        if self.route.form is None:
            reply = await self.handler(call)
        else:
            reply = await self.handler(call, BodyStream(scope, receive))
        if isinstance(reply, Streamed):
            reply.headers += call.headers()
            await self._stream(call, reply, receive, send)
        return reply

    async def answer(self, call: Call, raw: bytes) -> Reply | Streamed:
        """The reply to a body that did not arrive by HTTP, such as a line of a batch. Raises if the server is
        full or its engine is down, so that the caller tries again."""
        assert self.decoder is not None
        call.use, call.body_bytes = self.use, len(raw)
        try:
            reply: Reply | Streamed = await self._work(call, self.decoder, raw)
        except PenstockError as error:
            if error.status in RETRIED_STATUSES:
                raise
            return self._error(error, call)
        except Exception:
            log.exception("%s failed", self.path, extra={"fields": call.log_fields()})
            return self._error(PenstockError("internal error; the server's log has the details"), call)
        finally:
            call.release_adapters()
        return reply

    def _work(self, call: Call, decoder: RouteDecoder, raw: bytes | bytearray) -> Awaitable[Any]:
        """The handler's work on the body, not started yet."""
        try:
            body, variant = decoder.decode_exact(raw), None
        except msgspec.ValidationError as error:
            body, variant = self._tolerated(call, decoder, raw, error)
        except PenstockError:
            self._take_errors(call, decoder, raw)
            raise
        if call.request_id is not None:
            if hasattr(body, "request_id"):
                body.request_id = call.request_id
        elif (request_id := getattr(body, "request_id", None)) is not None:
            check_request_id(request_id)
            call.request_id = request_id
        return self.handler(call, body) if variant is None else variant.handler(call, body)

    def _tolerated(
        self, call: Call, decoder: RouteDecoder, raw: bytes | bytearray, error: msgspec.ValidationError
    ) -> tuple[Any, Variant | None]:
        """Decode a body that does not match its type exactly, with its variant if it has one."""
        try:
            decoded = decoder.decode_tolerantly(raw, error)
        except PenstockError:
            self._take_errors(call, decoder, raw)
            raise
        if decoded.ignored:
            call.ignored_fields = decoded.ignored
            self.metrics.ignored_fields(self.path, len(decoded.ignored))
        if decoded.variant is not None:
            call.errors = decoded.variant.errors
        return decoded.body, decoded.variant

    @staticmethod
    def _take_errors(call: Call, decoder: RouteDecoder, raw: bytes | bytearray) -> None:
        """Report an error of the body in the style of the variant that claims it."""
        if (claiming := decoder.variant(raw)) is not None:
            call.errors = claiming.errors

    async def _stream(self, call: Call, reply: Streamed, receive: Receive, send: Send) -> None:
        """Send piece by piece, no faster than the client reads. A disconnect cancels the work."""
        plain = [(b"content-type", reply.content_type), (b"cache-control", b"no-cache")]
        headers = [*plain, (b"x-accel-buffering", b"no"), *reply.headers]  # proxies must not buffer pieces
        pump = asyncio.ensure_future(self._pump(call, reply, headers, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
            if not pump.done():
                error = gone.result()
                reply.status = error.status
                call.error_code = error.code
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
            log.exception("%s failed", self.path, extra={"fields": call.log_fields()})
            reply.status = PenstockError.status
            last = self._event(PenstockError("internal error; the server's log has the details"), call)
        await self._end_stream(last, send)

    @staticmethod
    async def _end_stream(last: bytes, send: Send) -> None:
        if last:
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _event(self, error: PenstockError, call: Call) -> bytes:
        """The last events of a stream that fails after its status was sent."""
        call.error_code = error.code
        self.metrics.refused(error)
        errors = call.errors or self.errors
        return b"data: " + msgspec.json.encode(errors.body(error)) + b"\n\ndata: [DONE]\n\n"

    def _check_headers(self, call: Call, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Take what the headers tell about the request, or refuse it."""
        limit = self.state.config.max_body_bytes
        for name, value in headers:
            if name not in _READ_HEADERS:
                continue
            if name == b"x-request-id":
                if is_request_id(given := value.decode("latin-1").strip()):
                    call.request_id = given or None
            elif name == b"content-length":
                if value.isdigit() and (len(value) > _MAX_DIGITS or int(value) > limit):
                    raise BodyTooLarge(f"the body has {value[:24].decode()} bytes; the limit is {limit}")
            elif name == b"cache-control":
                call.cache_control = cache_control_of(value)
            elif value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedEncoding(
                    f"Content-Encoding is {value.decode('latin-1')[:100]!r}; send the body uncompressed"
                )

    async def _read(self, receive: Receive) -> bytes | bytearray:
        """The body, from ASGI messages."""
        limit = self.state.config.max_body_bytes
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
        call.error_code = error.code
        headers = call.rare_headers()
        if (retry_s := getattr(error, "retry_after_s", None)) is not None:
            headers.append((b"retry-after", str(retry_s).encode()))
        if isinstance(error, MethodNotAllowed):
            headers.append((b"allow", ", ".join(self.allowed).encode()))
        self.metrics.refused(error)
        if call.key is not None:
            self.metrics.key_refused(call.key.name, error)
        if isinstance(error, Unauthorized):
            headers.append((b"www-authenticate", b"Bearer"))
        errors = call.errors or self.errors
        return Reply(msgspec.json.encode(errors.body(error)), JSON, errors.status(error), headers)


def client_of(scope: Scope) -> str:
    """The sender of a request that no key identifies: the address of the peer, with its port if it is on this
    machine. The device is shared fairly among these names."""
    if not (peer := scope.get("client")):  # a Unix socket
        return ""
    return _name_of(peer)


@lru_cache(maxsize=4096)
def _name_of(peer: tuple[str, int]) -> str:
    host, port = peer
    return f"{host}:{port}" if host in _THIS_MACHINE else str(host)


def is_request_id(text: str) -> bool:
    """Whether a request id can be sent back in a header."""
    return len(text) <= MAX_REQUEST_ID and text.isprintable()


def check_request_id(request_id: str) -> None:
    if not is_request_id(request_id):
        raise BadValue(
            f"request_id may have up to {MAX_REQUEST_ID} characters, all of them printable",
            param="request_id",
        )


WATCH_AFTER_S = 0.005  # most requests are answered sooner and need no watcher


async def _disconnected(receive: Receive) -> PenstockError:
    """Wait until the client disconnects or the server stops; return the reason."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except PenstockError as error:
        return error
    return Cancelled("the client disconnected")


async def unless_gone(
    work: Awaitable[Answered], receive: Receive, direct: DirectExchange | None = None
) -> Answered:
    """The handler's reply. If the client disconnects or the server stops first, the handler is cancelled.
    With `direct` the connection calls back; without it a task waits for the ASGI message."""
    handling = asyncio.current_task() if direct is None else direct.task
    assert handling is not None
    if direct is None:
        return await _unless_disconnected(work, receive, handling)
    end: PenstockError | None = None

    def cancel(error: PenstockError) -> None:
        nonlocal end
        end = error
        handling.cancel()

    direct.on_end(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if end is None:
            raise
        handling.uncancel()
        raise end from None
    finally:
        direct.on_end(None)


async def _unless_disconnected(
    work: Awaitable[Answered], receive: Receive, handling: asyncio.Task[Any]
) -> Answered:
    loop = asyncio.get_running_loop()
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


def _headers(call: Call, reply: Reply, size: int) -> list[tuple[bytes, bytes]]:
    """The same headers as `_respond` sends."""
    framing = [(b"content-type", reply.content_type), (b"content-length", b"%d" % size)]
    return [*framing, *call.time_headers(), *reply.headers]
