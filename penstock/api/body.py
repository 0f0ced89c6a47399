"""The body of a reply: bytes, or parts of which the large ones are encoded while they are sent."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

import orjson

from penstock.outputs.encoders import LargeRow

Body = bytes | list[bytes | LargeRow]
Piece = bytes | memoryview

_MARK = secrets.token_hex(16)  # stands for a large row until the rest is written; no client can guess it
_QUOTED = f'"{_MARK}"'.encode()
_SEND_FROM = 1 << 16  # small pieces leave together


def json_body(content: Any) -> Body:
    """JSON of plain values, NumPy arrays and large rows; what is large is not copied into it."""
    large: list[LargeRow] = []

    def later(value: Any) -> str:
        if not isinstance(value, LargeRow):
            raise TypeError(f"{type(value).__name__} has no form in JSON")
        large.append(value)
        return _MARK

    raw = orjson.dumps(content, later, orjson.OPT_SERIALIZE_NUMPY)
    if not large:
        return raw
    first, *others = raw.split(_QUOTED)
    body: list[bytes | LargeRow] = [first]
    for row, text in zip(large, others, strict=True):
        body += [row, text]
    return body


async def sized(body: list[bytes | LargeRow]) -> tuple[int, Iterator[Piece]]:
    """How many bytes there will be, and the pieces. Where only encoding can tell, it is done here."""
    sizes = [part.size if isinstance(part, LargeRow) else len(part) for part in body]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        return sum(known), _together(body)
    pieces: list[Piece] = []
    for piece in _together(body):
        pieces.append(piece)
        await asyncio.sleep(0)  # others take their turn
    return sum(len(piece) for piece in pieces), iter(pieces)


def _together(body: list[bytes | LargeRow]) -> Iterator[Piece]:
    """Small neighbours joined, large pieces as they are."""
    waiting: list[Piece] = []
    size = 0
    for part in body:
        for piece in part.pieces() if isinstance(part, LargeRow) else (part,):
            if len(piece) >= _SEND_FROM and not waiting:
                yield piece
                continue
            waiting.append(piece)
            size += len(piece)
            if size >= _SEND_FROM:
                yield b"".join(waiting)
                waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
