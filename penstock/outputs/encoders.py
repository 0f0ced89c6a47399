"""Vectors as clients want them: numbers, base64 or bytes, never one Python float at a time.

Large answers are not encoded at once: their rows become `LargeRow`s, which are encoded piece by piece while
they are sent, so that nobody else waits for longer than one piece takes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import orjson

from penstock.types import Array, OutputDtype

try:  # several times as fast as the standard library's, at the speed of memory
    from pybase64 import b64encode
except ImportError:
    from base64 import b64encode

EncodingFormat = Literal["float", "base64", "bytes"]
Endianness = Literal["native", "little", "big"]

LARGE = 1 << 18  # bytes of an answer's values from which on it is encoded while it is sent
_PIECE_BYTES = 3 << 17  # of values, of one piece of base64: half a MiB of text, without padding inside
_PIECE_NUMBERS = 1 << 13  # of one piece of JSON numbers, which take much longer to write


class LargeRow:
    """A row of a large answer, to be encoded when its turn comes. (Not a data class: those the JSON encoder
    writes by itself.)"""

    __slots__ = ("dtype", "encoding", "endianness", "values")

    def __init__(
        self, values: Array, encoding: EncodingFormat, dtype: OutputDtype, endianness: Endianness = "native"
    ) -> None:
        self.values = values
        self.encoding = encoding
        self.dtype = dtype
        self.endianness = endianness

    @property
    def size(self) -> int | None:
        """Bytes of all pieces; None where only encoding can tell."""
        if self.encoding == "float":
            return None
        size = self.values.nbytes
        return size if self.encoding == "bytes" else 2 + (size + 2) // 3 * 4

    def pieces(self) -> Iterator[bytes | memoryview]:
        if self.encoding == "float":
            yield from self._numbers()
            return
        if not self.values.size:
            yield b"" if self.encoding == "bytes" else b'""'
            return
        raw = _ordered(self.values, self.endianness).data.cast("B")
        parts = (raw[at : at + _PIECE_BYTES] for at in range(0, len(raw), _PIECE_BYTES))
        if self.encoding == "bytes":
            yield from parts
            return
        yield b'"'
        for part in parts:
            yield b64encode(part)
        yield b'"'

    def _numbers(self) -> Iterator[bytes]:
        rows = max(1, _PIECE_NUMBERS // max(1, self.values[:1].size))
        yield b"["
        for at in range(0, len(self.values), rows):
            part = _numbers(self.values[at : at + rows], self.dtype)
            written = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            yield b"," + written if at else written
        yield b"]"


def encode_rows(
    rows: Sequence[Array], encoding: EncodingFormat, dtype: OutputDtype, endianness: Endianness = "native"
) -> list[Any]:
    """Rows as they stand in an answer: arrays of numbers, base64 of their bytes, or either later on."""
    if sum(row.nbytes for row in rows) >= LARGE:
        return [LargeRow(row, encoding, dtype, endianness) for row in rows]
    if encoding == "base64":
        return [_base64(row, endianness) for row in rows]
    return [_numbers(row, dtype) for row in rows]


def as_bytes(values: Array, endianness: Endianness = "native") -> bytes:
    return _ordered(values, endianness).tobytes()


def _numbers(values: Array, dtype: OutputDtype) -> Array:
    """Half precision is widened; integers stay integers."""
    if dtype is OutputDtype.BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif dtype is OutputDtype.FLOAT16:
        values = values.astype(np.float32)
    return np.ascontiguousarray(values)


def _base64(values: Array, endianness: Endianness) -> str:
    return str(b64encode(_ordered(values, endianness).data), "ascii")


def _ordered(values: Array, endianness: Endianness) -> Array:
    wanted = sys.byteorder if endianness == "native" else endianness
    values = np.ascontiguousarray(values)
    return values if wanted == "little" else values.byteswap()
