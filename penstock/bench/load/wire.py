"""One HTTP/1.1 connection of the load client: writes prepared bytes, reads whole answers.

It uses only callbacks, without a task or future for each request. Of the body of an answer, only the size,
the beginning and the end are kept, for token counts and error messages. Most answers arrive in one piece with
a Content-Length; these are read without a parser.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Protocol

import httptools

from penstock.bench.load.sse import TokenStream

_KEPT_BYTES = 4096  # kept from the beginning and from the end of a body
_USAGE = re.compile(rb'"(?:prompt_tokens|input_tokens|total_tokens|prompt_eval_count)"\s*:\s*(\d+)')
_LENGTH_KNOWN = re.compile(rb"\r\n(?:content-length|transfer-encoding):", re.IGNORECASE)
_MOST_USED = b'"prompt_tokens"'  # searched first, because a plain search is many times faster than `_USAGE`
_LENGTH = b"\r\ncontent-length:"
_TOKEN_HEADERS = (b"x-compute-tokens", b"metadata")


class Owner(Protocol):
    def connected(self, connection: Connection) -> None: ...

    def answered(self, connection: Connection, now: float) -> None: ...

    def lost(self, connection: Connection, reason: str) -> None: ...


class Connection(asyncio.Protocol):
    """Reads token counts from the end of the body, or from its beginning if the end has none."""

    reads_whole_answers = True  # read answers that arrive in one piece without the parser

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.transport: asyncio.WriteTransport | None = None
        self.parser: Any = None
        self.served = 0  # answers on this connection so far
        self.begin(-1, 0.0, 0.0)
        self.busy = False

    def begin(self, index: int, due: float, start: float) -> None:
        """Start a request. The caller writes its bytes at once, or when a new connection is established."""
        self.busy = True
        self.index, self.due, self.start = index, due, start
        self.first_byte = 0.0
        self.sent = 0  # bytes of the request that were sent before the connection was established
        self.body_bytes = 0
        self.is_whole = False  # the answer arrived in one piece and was read without the parser
        self.opening = self.head = self.tail = b""

    def write(self, request: bytes) -> None:
        assert self.transport is not None
        self.transport.write(request)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    @property
    def status(self) -> int:
        return 200 if self.is_whole else int(self.parser.get_status_code())

    @property
    def reusable(self) -> bool:
        return self.is_whole or bool(self.parser.should_keep_alive())

    def tokens(self) -> tuple[int, int]:
        """(input, output) tokens counted by the server; −1 if unknown."""
        tail = self.tail
        begin = max(0, len(tail) - _KEPT_BYTES)
        at = tail.rfind(_MOST_USED, begin)
        found = _USAGE.search(tail, begin if at < 0 else at) or _USAGE.search(self.head)
        return (int(found[1]) if found else -1), 0

    def fault(self) -> str | None:
        """Why a response with status 200 counts as a failure; None if it does not."""
        return None if self.body_bytes else "the answer is empty"

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.parser = httptools.HttpResponseParser(self)
        self.owner.connected(self)

    def data_received(self, data: bytes) -> None:
        if not self.first_byte:
            self.first_byte = time.monotonic()
            self.opening = data
            if self.reads_whole_answers and (body := whole_body(data)) is not None:
                self.is_whole = True
                self.on_body(body)
                self.on_message_complete()
                return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.owner.lost(self, f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.busy and self.first_byte and error is None and not _LENGTH_KNOWN.search(self.opening):
            self.on_message_complete()  # a response without a length ends when the server closes
        self.transport = self.parser = None  # breaks the reference cycle with the parser
        self.owner.lost(self, _why(error, self.first_byte > 0))

    # Callbacks of httptools, called while an answer is parsed

    def on_body(self, chunk: bytes) -> None:
        self.body_bytes += len(chunk)
        if len(self.head) < _KEPT_BYTES:
            self.head += chunk
        self.tail = chunk if len(chunk) >= _KEPT_BYTES else self.tail[-_KEPT_BYTES:] + chunk

    def on_message_complete(self) -> None:
        if self.busy:
            self.owner.answered(self, time.monotonic())


class HeaderConnection(Connection):
    """Reads token counts from a header: TEI's `x-compute-tokens`, or `metadata` of a binary response."""

    reads_whole_answers = False

    def begin(self, index: int, due: float, start: float) -> None:
        super().begin(index, due, start)
        self.counted = -1

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _TOKEN_HEADERS:
            found = re.fullmatch(rb"\s*(\d+)\s*", value) or _USAGE.search(value)
            self.counted = int(found[1]) if found else -1

    def tokens(self) -> tuple[int, int]:
        return (self.counted, 0) if self.counted >= 0 else super().tokens()


class StreamConnection(Connection):
    """A stream of tokens."""

    reads_whole_answers = False

    def begin(self, index: int, due: float, start: float) -> None:
        super().begin(index, due, start)
        self.stream = TokenStream()

    def on_body(self, chunk: bytes) -> None:
        self.body_bytes += len(chunk)
        if len(self.head) < _KEPT_BYTES:
            self.head += chunk
        self.stream.feed(chunk, time.monotonic())

    def tokens(self) -> tuple[int, int]:
        return self.stream.input_tokens, self.stream.tokens

    def fault(self) -> str | None:
        if self.stream.error:
            return f"the stream carried an error: {self.stream.error}"
        return None if self.stream.first_token else "the stream carried no token"


CONNECTIONS: dict[str, type[Connection]] = {
    "body": Connection,
    "header": HeaderConnection,
    "stream": StreamConnection,
}


def whole_body(data: bytes) -> bytes | None:
    """The body of a complete answer with status 200 that leaves the connection open. None for other answers,
    which the parser has to read."""
    end = data.find(b"\r\n\r\n") + 2
    head = data[:end].lower()
    at = head.find(_LENGTH)
    if at < 0 or not head.startswith(b"http/1.1 200 "):
        return None
    # These headers may close the connection or change the framing.
    if b"\r\nconnection:" in head or b"\r\ntransfer-encoding:" in head:
        return None
    at += len(_LENGTH)
    length = head[at : head.find(b"\r\n", at)].strip()
    if not length.isdigit() or int(length) != len(data) - end - 2:
        return None
    return data[end + 2 :]


def _why(error: Exception | None, begun: bool) -> str:
    what = "in the middle of an answer" if begun else "before it answered"
    return f"the server closed the connection {what}" + (f" ({error})" if error else "")
