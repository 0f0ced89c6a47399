"""What comes back of a request piece by piece: from the engine's thread or message to a caller's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

import numpy as np

from penstock.core import Answer, Continued, Generated, Request
from penstock.engine.core import Failure
from penstock.errors import PenstockError

Parts = list[Generated]
Receive = Callable[[Parts | PenstockError], None]  # an error is the last that comes


class Listener(Protocol):
    """Who is told what comes of a request, on the thread of its loop."""

    @property
    def over(self) -> bool:
        """Whether every row has ended, or the request has failed."""

    def token(self, row: int, number: int) -> None:
        """One further token of a row that goes on."""

    def receive(self, parts: Parts | PenstockError) -> None: ...


Leave = Callable[[], None]  # nobody listens any more: what is left of the request is cancelled


def by_request(outcomes: Iterable[Answer | Continued | Generated | Failure]) -> dict[str, Parts]:
    """The parts among some outcomes, by request, in order."""
    found: dict[str, Parts] = {}
    for outcome in outcomes:
        for part in outcome.parts() if isinstance(outcome, Continued) else (outcome,):
            if isinstance(part, Generated):
                found.setdefault(part.id, []).append(part)
    return found


class Stream:
    """Parts of one request for one task: a `Listener` that is read from."""

    def __init__(self, request: Request) -> None:
        self._id = request.id
        self._queue: asyncio.Queue[Parts | PenstockError] = asyncio.Queue()
        self._left = request.num_rows

    @property
    def over(self) -> bool:
        return self._left == 0

    def token(self, row: int, number: int) -> None:
        self.receive([Generated(self._id, row, np.array([number], dtype=np.int32))])

    def receive(self, parts: Parts | PenstockError) -> None:
        self._queue.put_nowait(parts)

    async def parts(self) -> AsyncIterator[Parts]:
        """All parts that are there, whenever some are, until every row has ended."""
        while self._left:
            found = await self._queue.get()
            while isinstance(found, list) and not self._queue.empty():
                more = self._queue.get_nowait()
                if isinstance(more, PenstockError):
                    self._queue.put_nowait(more)
                    break
                found = found + more
            if isinstance(found, PenstockError):
                self._left = 0
                raise found
            self._left -= sum(part.finish is not None for part in found)
            yield found
