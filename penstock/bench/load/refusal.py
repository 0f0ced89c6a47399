"""A server's refusal in one line: the status and what the body says about it, whatever the dialect."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

_LONGEST = 300


def refusal(status: int, body: bytes) -> str:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "unknown status"
    said = _said(body)
    return f"HTTP {status} {reason}" + (f": {said}" if said else "")


def _said(body: bytes) -> str:
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body[:_LONGEST].decode(errors="replace").split())
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return str(value)[:_LONGEST]
