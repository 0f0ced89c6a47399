"""The body of an upload, read in pieces, because it may be far larger than other bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.types import Receive, Scope

from penstock.errors import BodyTooLarge, Cancelled, UnsupportedEncoding

STREAM_BODY = "penstock.stream_body"  # key in a scope: a function that has the body delivered in pieces
_MAX_DIGITS = 18


class BodyStream:
    """The body of a request that is read in pieces."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        if (announce := scope.get(STREAM_BODY)) is not None:
            announce()  # before the first await, because the body is arriving

    def header(self, name: bytes) -> bytes:
        """The last value of a header; empty if there is none."""
        return next((value for key, value in reversed(self._scope["headers"]) if key == name), b"")

    async def pieces(self, max_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body. Raises `BodyTooLarge` as soon as it is known to exceed `max_bytes`."""
        encoding = self.header(b"content-encoding").strip().lower()
        if encoding not in (b"", b"identity"):
            raise UnsupportedEncoding(
                f"Content-Encoding is {encoding.decode('latin-1')[:100]!r}; send the body uncompressed"
            )
        declared = self.header(b"content-length")
        if declared.isdigit() and (len(declared) > _MAX_DIGITS or int(declared) > max_bytes):
            raise BodyTooLarge(f"the body has {declared[:24].decode()} bytes; the limit is {max_bytes}")
        received, has_more = 0, True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client disconnected")
            piece, has_more = message.get("body", b""), message.get("more_body", False)
            received += len(piece)
            if received > max_bytes:
                raise BodyTooLarge(f"the body exceeds the limit of {max_bytes} bytes")
            yield bytes(piece)
