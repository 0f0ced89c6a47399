"""`EngineHandle`: the interface to an engine for servers, offline engines, commands and benchmarks.

`offline.local` implements it for an engine in this process, `wire.client` for one in another process, and
`wire.group` for several engines of one model. This module imports neither the engine nor sockets nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.types import Comparison, GeneratedTokens, PooledOutput, Request

Unsubscribe = Callable[[], None]  # stop listening; sequences that have not finished are cancelled


class StreamListener(Protocol):
    """Receives the tokens of one generation request, on the thread of the event loop that subscribed."""

    @property
    def finished(self) -> bool:
        """Whether every sequence has finished, or the request has failed."""

    def on_token(self, row: int, token_id: int) -> None:
        """Receive one more token of an unfinished sequence. The most frequent call."""

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        """Receive tokens that come with more than ids, such as log probabilities or a finish reason."""

    def on_error(self, error: PenstockError) -> None:
        """Receive the error of a failed request. It is the last call."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_requests: int  # submitted and not answered yet


class EngineHandle(Protocol):
    """Call all methods except `close` on an event loop's thread. Errors are `PenstockError`."""

    async def run(self, request: Request) -> PooledOutput:
        """Run a pooling request. Cancelling the caller's task cancels the request."""

    async def compare(self, comparison: Comparison) -> PooledOutput:
        """Score the given vectors. Cancelling the caller's task drops the result."""

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        """Generate, and call the listener as tokens arrive.

        Always unsubscribe, even after the request has finished. Raises at once if the engine is unavailable.
        """

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""

    @property
    def unavailable_reason(self) -> str:
        """Why requests cannot be served, as a message for the user; empty when ready."""

    @property
    def revision(self) -> str:
        """The revision of the loaded model. Equal revisions give equal results. If it is empty (unknown),
        results must not be cached."""
        return ""

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The resolved settings of the engine; empty if unknown."""
        return {}

    def start(self) -> None:
        """Connect to the engine, if it is in another process. Called once, on the event loop."""
        return

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Release the engine. A local engine finishes all submitted requests first, so this may block."""
