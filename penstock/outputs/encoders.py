"""Vectors as clients want them: numbers, base64 or bytes, never one Python float at a time."""

from __future__ import annotations

import binascii
import sys
from typing import Any, Literal

import numpy as np

from penstock.core import Array, OutputDtype

EncodingFormat = Literal["float", "base64", "bytes"]
Endianness = Literal["native", "little", "big"]


def as_numbers(values: Array, dtype: OutputDtype) -> list[Any]:
    """Rows that the JSON encoder writes directly. Half precision is widened; integers stay integers."""
    if dtype is OutputDtype.BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif dtype is OutputDtype.FLOAT16:
        values = values.astype(np.float32)
    return list(np.ascontiguousarray(values))


def as_base64(values: Array, endianness: Endianness = "native") -> list[str]:
    return [binascii.b2a_base64(row, newline=False).decode("ascii") for row in _ordered(values, endianness)]


def as_bytes(values: Array, endianness: Endianness = "native") -> bytes:
    return _ordered(values, endianness).tobytes()


def _ordered(values: Array, endianness: Endianness) -> Array:
    wanted = sys.byteorder if endianness == "native" else endianness
    values = np.ascontiguousarray(values)
    return values if wanted == "little" else values.byteswap()
