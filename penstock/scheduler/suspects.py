"""Isolation of generation requests whose step failed, until the poisoned one is found."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

MayRun = Callable[[str], bool]  # whether a request may be in the next step


class SuspectRequests:
    """Requests of failed steps. Each runs alone until one of its steps succeeds, which clears the request, or
    fails, which fails the request."""

    def __init__(self) -> None:
        self._ids: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, request_ids: Iterable[str]) -> None:
        self._ids += [request_id for request_id in request_ids if request_id not in self._ids]

    def discard(self, request_id: str) -> None:
        self._ids = [suspect for suspect in self._ids if suspect != request_id]

    def clear(self, request_ids: Container[str]) -> None:
        """Clear these requests, because a step of them has succeeded."""
        self._ids = [suspect for suspect in self._ids if suspect not in request_ids]

    def only_first(self) -> MayRun:
        """Let only the first suspect run."""
        first = self._ids[0]
        return lambda request_id: request_id == first

    def none(self) -> MayRun:
        """Let all requests run except the suspects."""
        suspects = set(self._ids)
        return lambda request_id: request_id not in suspects
