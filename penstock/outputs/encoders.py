"""Vectors as clients want them: numbers, base64 or bytes, never one Python float at a time."""

from __future__ import annotations

import binascii
import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from penstock.core import Array, OutputDtype

EncodingFormat = Literal["float", "base64", "bytes"]
Endianness = Literal["native", "little", "big"]


def encode_rows(
    rows: Sequence[Array], encoding: EncodingFormat, dtype: OutputDtype, endianness: Endianness = "native"
) -> list[Any]:
    """Rows that the JSON encoder writes directly: arrays of numbers, or base64 of their bytes."""
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
    return binascii.b2a_base64(_ordered(values, endianness).data, newline=False).decode("ascii")


def _ordered(values: Array, endianness: Endianness) -> Array:
    wanted = sys.byteorder if endianness == "native" else endianness
    values = np.ascontiguousarray(values)
    return values if wanted == "little" else values.byteswap()
