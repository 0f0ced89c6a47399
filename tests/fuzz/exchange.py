"""Sends one request on its own connection and judges the outcome."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httptools

from tests.fuzz.cases import Case

MAX_REPLY_S = 60.0  # slower replies count as hangs
SLOW_S = 1.0  # slower replies are listed, since they may have delayed others
MAX_ERROR_BYTES = 16_384  # longer errors echo what the client sent


@dataclass(frozen=True, slots=True)
class Outcome:
    """The status of a reply, and in `fault` the promise that it broke, if any."""

    status: int | None
    fault: Literal["5xx", "closed", "hang", "echo", "not JSON", "schema"] | None = None
    detail: str = ""
    seconds: float = field(default=0.0, compare=False)


class _Reply:
    """Collects the final reply of a connection. Informational replies are skipped."""

    def __init__(self, is_head: bool) -> None:
        self.is_complete = False
        self.status = 0
        self.body = bytearray()
        self.headers: dict[bytes, bytes] = {}
        self._is_head = is_head
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_complete:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.is_complete:  # this is the reply to a pipelined request
            return
        self.status = self.parser.get_status_code()
        self.is_complete = self._is_head and self.status >= 200

    def on_body(self, piece: bytes) -> None:
        if not self.is_complete:
            self.body += piece

    def on_message_complete(self) -> None:
        self.is_complete = self.is_complete or self.status >= 200

    @property
    def ends_with_the_connection(self) -> bool:
        return not {b"content-length", b"transfer-encoding"} & set(self.headers) and self.status >= 200


async def exchange(port: int, case: Case, max_reply_s: float = MAX_REPLY_S) -> Outcome:
    """Send the case and judge its reply."""
    began_s = time.monotonic()
    outcome = await _exchange(port, case, max_reply_s)
    return replace(outcome, seconds=time.monotonic() - began_s)


async def _exchange(port: int, case: Case, max_reply_s: float) -> Outcome:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reply = _Reply(case.method == "HEAD")
    try:
        writer.write(case.raw)
        if not case.is_complete:
            await asyncio.wait_for(writer.drain(), max_reply_s)
            return Outcome(None)
        await asyncio.wait_for(_read(reader, reply), max_reply_s)
    except TimeoutError:
        return Outcome(None, "hang", f"no reply after {max_reply_s:.0f} s")
    except OSError as error:
        if not reply.is_complete:
            return Outcome(None, "closed", str(error))
    except httptools.HttpParserError as error:  # bytes after the reply belong to pipelined requests
        if not reply.is_complete:
            return Outcome(None, "not JSON", f"the reply is not HTTP: {error}")
    finally:
        writer.close()
    return (
        judge(reply.status, bytes(reply.body), reply.headers)
        if reply.is_complete
        else Outcome(None, "closed")
    )


async def _read(reader: asyncio.StreamReader, reply: _Reply) -> None:
    while not reply.is_complete:
        piece = await reader.read(1 << 16)
        if not piece:
            reply.is_complete = reply.ends_with_the_connection
            return
        try:
            reply.parser.feed_data(piece)
        except httptools.HttpParserError:
            if not reply.is_complete:
                raise


def judge(status: int, body: bytes, headers: dict[bytes, bytes]) -> Outcome:
    """Judge a reply by the promises."""
    shown = body[:300].decode("latin-1")
    if status >= 500:
        return Outcome(status, "5xx", shown)
    if status >= 400 and len(body) > MAX_ERROR_BYTES:
        return Outcome(status, "echo", f"an error of {len(body)} bytes: {shown}")
    if body and headers.get(b"content-type", b"").startswith(b"application/json"):
        try:
            json.loads(body, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return Outcome(status, "not JSON", f"{error}: {shown}")
    return Outcome(status)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
