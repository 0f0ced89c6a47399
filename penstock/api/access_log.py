"""The access log: one line per request, among the other log lines of the server.

Lines contain no keys, and no inputs unless --log-inputs is set.
"""

from __future__ import annotations

import logging
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

if TYPE_CHECKING:
    from penstock.api.call import Call

log = logging.getLogger("penstock.access")
SCOPE_KEY = "penstock.access"
MAX_BODY_CHARS = 1000  # shown of a body with --log-inputs


class Claim:
    """Marks a request that a route logs, so that the connection does not. Copies of a scope share it."""

    __slots__ = ("is_claimed",)

    def __init__(self) -> None:
        self.is_claimed = False


class AccessLog:
    """Logs the requests that reach a route."""

    def begin(self, scope: Scope) -> None:
        if (claim := scope.get(SCOPE_KEY)) is not None:
            claim.is_claimed = True

    def end(self, call: Call, scope: Scope) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        fields: dict[str, Any] = {"ms": round((time.monotonic() - call.began_s) * 1000, 3)}
        for name, value in (
            ("model", call.model_name),
            ("adapter", call.adapter_name),
            ("rows", call.num_rows),
            ("tokens", call.num_tokens),
            ("generated_tokens", call.num_generated),
            ("error", call.error_code),
            ("key", "" if call.key is None else call.key.name),
            ("body", call.shown_body),
        ):
            if value:
                fields[name] = value
        _write(scope, call.status, {**fields, **call.log_fields()})


def log_unrouted(scope: Scope, status: int) -> None:
    """Log a request that reaches no route, such as one whose `Host` header is refused."""
    _write(scope, status, {})


def _write(scope: Scope, status: int, fields: dict[str, Any]) -> None:
    """Write a log line, without the query string, which may contain secrets."""
    method, path = scope["method"], urllib.parse.quote(scope["path"])
    if client := scope.get("client"):
        fields["address"] = ":".join(map(str, client))
    request = {"method": method, "path": path, "status": status}
    log.info("%s %s %d", method, path, status, extra={"fields": fields, "json_fields": request})


def shown_body(raw: bytes | bytearray) -> str:
    """The beginning of a body, for --log-inputs."""
    return bytes(raw[: 4 * MAX_BODY_CHARS]).decode("utf-8", "replace")[:MAX_BODY_CHARS]
