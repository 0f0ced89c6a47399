"""The body of a reply: bytes, or parts whose large rows are encoded while they are sent."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from penstock.outputs.encoders import LargeRow

Body = bytes | list[bytes | LargeRow]
Piece = bytes | memoryview

_PLACEHOLDER = secrets.token_hex(16)  # stands for a large row in encoded JSON; no client can guess it
_QUOTED = f'"{_PLACEHOLDER}"'.encode()
_MAX_ITEMS = 128  # longer lists are encoded item by item
PIECE_BYTES = 1 << 18  # sent at a time
_MIN_PIECE_BYTES = 1 << 16  # smaller pieces are joined


def json_body(content: Any) -> Body:
    """Encode plain values and NumPy arrays as JSON. Large rows stay separate parts, without a copy."""
    has_many_items = isinstance(content, dict) and len(content.get("data", ())) > _MAX_ITEMS
    if not has_many_items:
        try:
            return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:  # it has a large row
            pass
    large: list[LargeRow] = []

    def defer(value: Any) -> str:
        if not isinstance(value, LargeRow):
            raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")
        large.append(value)
        return _PLACEHOLDER

    if has_many_items:
        items = [orjson.Fragment(_encode(item, defer)) for item in content["data"]]
        content = {**content, "data": items}  # one by one, so that other threads can run in between
    raw = _encode(content, defer)
    if not large:
        return raw
    first, *others = raw.split(_QUOTED)
    body: list[bytes | LargeRow] = [first]
    for row, text in zip(large, others, strict=True):
        body += [row, text]
    return body


def _encode(content: Any, defer: Callable[[Any], str]) -> bytes:
    return orjson.dumps(content, defer, orjson.OPT_SERIALIZE_NUMPY)


async def sized(body: Body) -> tuple[int, Iterator[Piece]]:
    """The size of the body, and its pieces. If the size of a row is unknown, all pieces are encoded here."""
    if isinstance(body, bytes):
        return len(body), iter((body,)) if len(body) <= PIECE_BYTES else _cut(body)
    sizes = [part.size if isinstance(part, LargeRow) else len(part) for part in body]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes):
        return sum(known), _joined_pieces(body)
    pieces: list[Piece] = []
    for piece in _joined_pieces(body):
        pieces.append(piece)
        await asyncio.sleep(0)  # lets other requests run
    return sum(len(piece) for piece in pieces), iter(pieces)


def _cut(body: bytes) -> Iterator[Piece]:
    """Split an encoded body, so that it is sent no faster than the client reads."""
    whole = memoryview(body)
    return (whole[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))


def _joined_pieces(body: list[bytes | LargeRow]) -> Iterator[Piece]:
    """Join small neighbouring pieces, and pass on large ones."""
    waiting: list[Piece] = []
    size = 0
    for part in body:
        for piece in part.pieces() if isinstance(part, LargeRow) else (part,):
            if len(piece) >= _MIN_PIECE_BYTES and not waiting:
                yield piece
                continue
            waiting.append(piece)
            size += len(piece)
            if size >= _MIN_PIECE_BYTES:
                yield b"".join(waiting)
                waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
