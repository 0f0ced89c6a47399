"""Encodes vectors as numbers, base64 or bytes, without a Python float per value.

The rows of a large answer become `LargeRow`s. They are encoded piece by piece as they are sent, so that other
clients wait for at most one piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import orjson

from penstock.types import Array, OutputDtype

try:  # pybase64 is several times faster than the standard library
    from pybase64 import b64encode
except ImportError:
    from base64 import b64encode

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]
Endianness = Literal["native", "little", "big"]

MIN_LARGE_BYTES = 1 << 18  # answers with at least this many bytes of values are encoded as they are sent
_PIECE_BYTES = 3 << 17  # bytes per piece of base64: half a MiB of text, a multiple of 3 to avoid padding
_PIECE_NUMBERS = 1 << 13  # values per piece of JSON numbers, which are much slower to encode


class LargeRow:
    """A row of a large answer that is encoded when it is sent.

    It is not a dataclass, because the JSON encoder would encode a dataclass itself.
    """

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
        """Total bytes of all pieces; None if unknown before encoding."""
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
        raw = _in_byte_order(self.values, self.endianness).data.cast("B")
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
            encoded = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            yield b"," + encoded if at else encoded
        yield b"]"


def encode_rows(
    rows: Sequence[Array], encoding: EncodingFormat, dtype: OutputDtype, endianness: Endianness = "native"
) -> list[Any]:
    """Encode rows as arrays of numbers or as base64; the rows of a large answer as `LargeRow`s."""
    if sum([row.nbytes for row in rows]) >= MIN_LARGE_BYTES:
        return [LargeRow(row, encoding, dtype, endianness) for row in rows]
    if encoding == "base64":
        return [_base64(row, endianness) for row in rows]
    return [_numbers(row, dtype) for row in rows]


def as_bytes(values: Array, endianness: Endianness = "native") -> bytes:
    return _in_byte_order(values, endianness).tobytes()


def _numbers(values: Array, dtype: OutputDtype) -> Array:
    """Widen half precision to fp32; keep integers."""
    if dtype is OutputDtype.BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif dtype is OutputDtype.FLOAT16:
        values = values.astype(np.float32)
    return np.ascontiguousarray(values)


def _base64(values: Array, endianness: Endianness) -> str:
    return str(b64encode(_in_byte_order(values, endianness).data), "ascii")


def _in_byte_order(values: Array, endianness: Endianness) -> Array:
    order = sys.byteorder if endianness == "native" else endianness
    values = np.ascontiguousarray(values)
    return values if order == "little" else values.byteswap()
