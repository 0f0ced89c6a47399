"""A limit for the nesting of JSON, checked without decoding it.

The decoder, the encoders and all code that walks a schema are recursive. Each body is checked
once, before it is decoded.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import BadValue

MAX_NESTING = 128
_CHUNK_BYTES = 1 << 20
_BRACKETS = b'"[]{}'
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1


def check_nesting(raw: bytes | bytearray) -> None:
    """Refuse JSON that is nested more deeply than `MAX_NESTING`."""
    if raw.count(b"[") + raw.count(b"{") > MAX_NESTING and _is_deeper(raw, MAX_NESTING):
        raise BadValue(f"the body is not valid: JSON may be nested {MAX_NESTING} levels deep, not deeper")


def _is_deeper(raw: bytes | bytearray, limit: int) -> bool:
    """Whether brackets outside strings are nested more than `limit` deep anywhere."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # leaves only quotes that begin or end strings
    marks = bytes(raw).translate(None, _OTHERS)
    brackets = b"".join(marks.split(b'"')[::2])
    depth = 0
    for at in range(0, len(brackets), _CHUNK_BYTES):
        steps = _STEPS[np.frombuffer(brackets, np.uint8, min(_CHUNK_BYTES, len(brackets) - at), at)]
        depths = depth + np.cumsum(steps, dtype=np.int32)
        if depths.max() > limit:
            return True
        depth = int(depths[-1])
    return False
