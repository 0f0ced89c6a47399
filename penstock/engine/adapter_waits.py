"""Requests whose LoRA adapters are being read from disk. Each joins the engine's queues once its adapters are
in host memory. Meanwhile neither the engine's thread nor any other request waits for the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from penstock.errors import DeadlineExceeded, EngineError, PenstockError, QueueFull
from penstock.types import Request

MAX_WAITING = 4096  # requests


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    request: Request
    reads: Sequence[Future[Any]]

    @property
    def is_done(self) -> bool:
        return all(read.done() for read in self.reads)

    @property
    def error(self) -> PenstockError | None:
        """Why an adapter could not be read; None if all were read."""
        found = next((error for read in self.reads if (error := _error(read)) is not None), None)
        if found is None or isinstance(found, PenstockError):
            return found
        return EngineError(f"an adapter cannot be read: {type(found).__name__}: {found}")


def _error(read: Future[Any]) -> BaseException | None:
    return EngineError("the engine is closing") if read.cancelled() else read.exception()


class AdapterWaits:
    """hold → ready. All methods are called on the engine's thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def hold(self, request: Request, reads: Sequence[Future[Any]], wake: Callable[[], None]) -> None:
        """Hold a request until all its adapters are read. `wake` is called, on any thread, as reads end."""
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull(f"{len(self._waiting)} requests wait for their adapters; try again shortly")
        self._waiting[request.id] = _Waiting(request, reads)
        for read in reads:
            read.add_done_callback(lambda _: wake())

    def ready(self) -> list[tuple[Request, PenstockError | None]]:
        """Remove and return the requests whose reads have ended, each with the error if a read failed."""
        done = [waiting for waiting in self._waiting.values() if waiting.is_done]
        for waiting in done:
            del self._waiting[waiting.request.id]
        return [(waiting.request, waiting.error) for waiting in done]

    def expire(self, now_s: float) -> list[tuple[Request, PenstockError]]:
        """Remove and return the requests whose deadline has passed, each with its error."""
        late = [
            request
            for request in self.requests()
            if request.deadline_s is not None and request.deadline_s <= now_s
        ]
        for request in late:
            del self._waiting[request.id]
        return [
            (request, DeadlineExceeded(f"not finished {now_s - request.arrival_s:.3f} s after arrival"))
            for request in late
        ]

    def next_deadline_s(self) -> float | None:
        deadlines = (request.deadline_s for request in self.requests())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def cancel(self, request_id: str) -> bool:
        """Drop a request. Returns whether it was waiting here."""
        return self._waiting.pop(request_id, None) is not None

    def requests(self) -> list[Request]:
        return [waiting.request for waiting in self._waiting.values()]

    def clear(self) -> list[str]:
        """Drop all requests and return their ids."""
        ids = list(self._waiting)
        self._waiting.clear()
        return ids
