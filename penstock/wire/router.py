"""What comes back of a request piece by piece: from the engine's thread or message to a caller's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import numpy as np

from penstock.errors import PenstockError
from penstock.types import DecodedTokens, GeneratedTokens, Ints, Request, SequenceIds

Parts = list[GeneratedTokens]
Receive = Callable[[Parts | PenstockError], None]  # an error is the last that comes
Told = list[DecodedTokens | GeneratedTokens]
Hear = Callable[[Told | PenstockError], None]
Share = tuple[SequenceIds, Ints]  # some of the rows that go on, and their places among all


class Listener(Protocol):
    """Who is told what comes of a request, on the thread of its loop."""

    @property
    def over(self) -> bool:
        """Whether every row has ended, or the request has failed."""

    def token(self, row: int, number: int) -> None:
        """One further token of a row that goes on."""

    def receive(self, parts: Parts | PenstockError) -> None: ...


Leave = Callable[[], None]  # nobody listens any more: what is left of the request is cancelled


def parts_of(told: Told) -> Parts:
    """The same, row by row."""
    out: Parts = []
    for some in told:
        out += some.parts() if isinstance(some, DecodedTokens) else [some]
    return out


class Division:
    """Who is to hear of which rows that go on; kept, since most steps have the same rows."""

    def __init__(self) -> None:
        self._rows: SequenceIds = ()
        self._shares: dict[Any, Share] = {}

    def of(self, rows: SequenceIds, hears: Mapping[str, Any]) -> dict[Any, Share]:
        """By who hears of each request; rows that nobody hears of are left out."""
        if self._rows is not rows:
            places: dict[Any, list[int]] = {}
            for place, (request_id, _) in enumerate(rows):
                if (who := hears.get(request_id)) is not None:
                    places.setdefault(who, []).append(place)
            self._shares = {
                who: (tuple(rows[i] for i in own), np.array(own, dtype=np.int32))
                for who, own in places.items()
            }
            self._rows = rows
        return self._shares


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
        self.receive([GeneratedTokens(self._id, row, np.array([number], dtype=np.int32))])

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
