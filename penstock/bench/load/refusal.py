"""An error response in one line: the status, and the message in the body of any API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

_MAX_CHARS = 300


def refusal(status: int, body: bytes) -> str:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "unknown status"
    message = _error_text(body)
    return f"HTTP {status} {reason}" + (f": {message}" if message else "")


def _error_text(body: bytes) -> str:
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return " ".join(body[:_MAX_CHARS].decode(errors="replace").split())
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return str(value)[:_MAX_CHARS]
