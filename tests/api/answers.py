"""Check that an answer has the type that its route declares."""

from __future__ import annotations

from typing import Any

import msgspec


def checked(response: Any, kind: Any) -> Any:
    """Return the JSON of a successful answer, which must have exactly the fields of its declared type."""
    assert response.status_code == 200, response.text
    decoded = msgspec.json.decode(response.content, type=kind)
    assert msgspec.to_builtins(decoded) == response.json()
    return response.json()
