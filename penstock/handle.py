"""`EngineHandle`: how servers, offline engines, commands and benchmarks use an engine.

`offline.local` implements it for an engine in this process, `wire.client` for one in another process; a group
of replicas can implement it too. Nothing here imports the engine, sockets or torch.
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
        """One further token of a sequence that continues. The most frequent call."""

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        """Tokens with anything besides their ids: log probabilities, a finish reason."""

    def on_error(self, error: PenstockError) -> None:
        """The request has failed; nothing else follows."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_requests: int  # submitted and not yet answered


class EngineHandle(Protocol):
    """All methods but `close` are called on an event loop's thread. Errors are `PenstockError`."""

    async def run(self, request: Request) -> PooledOutput:
        """The output of a pooling request. Cancelling the caller's task cancels the request."""

    async def compare(self, comparison: Comparison) -> PooledOutput:
        """Scores of given vectors. Cancelling the caller's task drops the result."""

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        """Generate; the listener is called as tokens arrive.

        Always unsubscribe, even after the request has finished. Raises at once if the engine is unavailable.
        """

    @property
    def ready(self) -> bool:
        """Whether requests can be served now."""

    @property
    def unavailable_reason(self) -> str:
        """Why requests cannot be served, in words for the user; empty when ready."""

    @property
    def revision(self) -> str:
        """The revision of the loaded model: equal ones give equal results. Empty where it is not known, and
        results must not be cached."""
        return ""

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The resolved settings of the engine; empty where they are not known."""
        return {}

    def start(self) -> None:
        """Connect to the engine, where there is something to connect to. Called once, on the event loop."""
        return

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Release the engine. A local engine finishes what was submitted; may block."""
