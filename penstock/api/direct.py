"""A fast path between a connection and an endpoint, in place of ASGI messages, for the most frequent
requests.

The connection puts it into the ASGI scope. Without it, as in other servers, endpoints use ASGI messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from penstock.errors import PenstockError

_SCOPE_KEY = "penstock.exchange"
Header = tuple[bytes, bytes]
OnEnd = Callable[[PenstockError], None]


class DirectExchange(Protocol):
    """A request and its answer, as the connection holds them."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The task that runs the application for this request."""

    def respond(
        self, status: int, lines: bytes, headers: Sequence[Header], body: bytes, *, head_only: bool
    ) -> bool:
        """Send a whole answer in one write. `lines` are headers as they are sent, which have nothing of the
        client's in them. Returns False and sends nothing if the answer needs ASGI messages, such as when the
        client reads too slowly."""

    def take_body(self) -> bytes | bytearray | None:
        """The whole body, if it has arrived. None: it has to be awaited by ASGI messages."""

    def on_end(self, callback: OnEnd | None) -> None:
        """Call back once if the client disconnects, or the server abandons the request, before its answer.
        None removes the callback."""


def offer(scope: Any, exchange: DirectExchange) -> None:
    scope[_SCOPE_KEY] = exchange


def withdraw(scope: Any) -> None:
    """Part the exchange of an answered request from its scope. They refer to each other, so both would stay
    until the garbage collector runs."""
    scope.pop(_SCOPE_KEY, None)


def offered(scope: Any) -> DirectExchange | None:
    return cast(DirectExchange | None, scope.get(_SCOPE_KEY))
