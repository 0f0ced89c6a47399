"""What a connection offers to an endpoint beside ASGI's messages, for the requests that are most frequent.

An endpoint finds it in the scope. Other servers, and middleware between the two, need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from penstock.errors import PenstockError

_SCOPE_KEY = "penstock.exchange"
Header = tuple[bytes, bytes]
OnEnd = Callable[[PenstockError], None]


class DirectExchange(Protocol):
    """A request and its answer, as the connection holds them."""

    def respond(self, status: int, headers: Sequence[Header], body: bytes, *, head_only: bool) -> bool:
        """Send a whole answer in one write. False, and nothing is sent, if the client reads too slowly."""

    def on_end(self, callback: OnEnd | None) -> None:
        """Call back once if the client disconnects or the server gives the request up before its answer.
        None: not any more."""


def offer(scope: Any, exchange: DirectExchange) -> None:
    scope[_SCOPE_KEY] = exchange


def offered(scope: Any) -> DirectExchange | None:
    return cast(DirectExchange | None, scope.get(_SCOPE_KEY))
