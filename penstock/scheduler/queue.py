"""The waiting line: requests in the order in which they are to run.

The order never has to be recomputed. A priority level is worth a fixed head start in seconds, so a
request's place is `arrival + priority × head start`: first come, first served within a priority, and
no request can be overtaken by ones that arrive later than its head start, so none starves.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.types import ONE_ROW, CachedVectors, Ints, Request

_QUERY_FIRST: Ints = np.arange(2, dtype=np.int32)  # the order of one query and one document
_QUERY_FIRST.flags.writeable = False
HEAD_START_S = 1.0  # what one level of priority is worth


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that runs over several steps; its keys and values so far lie in `blocks`."""

    row: int
    length: int
    done: int  # tokens that have run, or that a cached prefix stands for
    blocks: list[int]
    keys: list[bytes]  # of its full blocks, where prefixes are kept


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request with rows still to run. `order` lists its rows by length; `cursor` is the next one."""

    request: Request
    order: Ints  # [rows], row numbers, longest first
    ends: Ints  # [rows], tokens of rows order[0..i]
    place: tuple[float, int]
    cursor: int = 0
    open: list[OpenRow] = field(default_factory=list)
    held: CachedVectors | None = None  # of a request with pairs, once it has places for its queries
    stored: Ints | None = None  # documents that need not run, until they are scored
    least: int = field(init=False)  # tokens without which nothing more of it can run, where rows are not cut

    def __post_init__(self) -> None:
        self._moved()

    def _moved(self) -> None:
        """Other rows wait. Those that cannot run yet are asked in every step for the least they need."""
        at = self.cursor
        self.least = int(self.request.lengths[self.order[at]]) if at < len(self.order) else 0

    @property
    def rows_left(self) -> int:
        left = len(self.order) - self.cursor + len(self.open)
        return left if self.stored is None else left + len(self.stored)

    @property
    def unopened(self) -> int:
        return len(self.order) - self.cursor

    @property
    def tokens_left(self) -> int:
        left = int(self.ends[-1]) - self.tokens_taken if len(self.ends) else 0
        return left + sum(row.length - row.done for row in self.open)

    @property
    def documents_wait(self) -> bool:
        """Whether a query is still open, so that the documents behind it cannot be scored yet."""
        queries = self.request.num_queries
        if not queries or not any(row.row < queries for row in self.open):
            return False
        return self.cursor >= len(self.order) or int(self.order[self.cursor]) >= queries

    def hold(self, held: CachedVectors) -> tuple[int, int]:
        """Rows whose vectors are there leave the order: how many tokens, and how many of them queries."""
        self.held = held
        if not held.ready.any():
            return 0, 0
        lengths, queries = self.request.lengths, self.request.num_queries
        documents = np.flatnonzero(held.ready[queries:]).astype(np.int32) + queries
        self.stored = documents if len(documents) else None
        self.order = self.order[~held.ready[self.order]]
        self.ends = np.cumsum(lengths[self.order], dtype=np.int32)
        self._moved()
        return int(lengths[held.ready].sum()), int(held.ready[:queries].sum())

    def take_stored(self) -> Ints | None:
        """The documents that need not run, once all queries have their place in a step."""
        queries = self.request.num_queries
        waits = self.unopened and int(self.order[self.cursor]) < queries
        if self.stored is None or waits or any(row.row < queries for row in self.open):
            return None
        stored, self.stored = self.stored, None
        return stored

    def put_back(self, rows: Ints, stored: Ints | None = None) -> None:
        """Rows that were taken are to run once more, from their beginning."""
        left = np.concatenate([self.order[self.cursor :], rows])
        self.order = left[_long_first(self.request, left)]
        self.ends = np.cumsum(self.request.lengths[self.order], dtype=np.int32)
        self.cursor = 0
        self._moved()
        if stored is not None:
            self.stored = stored if self.stored is None else np.concatenate([self.stored, stored])

    def close(self, rows: Ints | None = None) -> list[OpenRow]:
        """Open rows, these or all, are open no more; whoever calls gives back what they hold."""
        closed = [row for row in self.open if rows is None or row.row in rows]
        self.open = [row for row in self.open if row not in closed]
        return closed

    @property
    def tokens_taken(self) -> int:
        return int(self.ends[self.cursor - 1]) if self.cursor else 0

    def take(self, max_tokens: int, max_rows: int) -> Ints:
        """Up to so many further rows, as row numbers of the request."""
        if len(self.order) == 1:  # most requests have one row
            if self.cursor or max_rows < 1 or self.ends[0] > max_tokens:
                return self.order[1:]
            self.cursor, self.least = 1, 0
            return self.order
        fits = int(np.searchsorted(self.ends, self.tokens_taken + max_tokens, side="right"))
        stop = min(fits, self.cursor + max_rows)
        taken = self.order[self.cursor : max(stop, self.cursor)]
        self.cursor += len(taken)
        self._moved()
        return taken


def _long_first(request: Request, rows: Ints) -> Ints:
    """An order of rows: long ones first, but queries before the documents that need them."""
    lengths = request.lengths[rows]
    if request.pairs is None:
        return np.argsort(-lengths, kind="stable").astype(np.int32)
    return np.lexsort((-lengths, rows >= request.num_queries)).astype(np.int32)


class WaitingQueue:
    """Requests by place, with look-up by id and by deadline."""

    def __init__(self) -> None:
        self._line: list[tuple[tuple[float, int], QueuedRequest]] = []
        self._by_id: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # may name requests that have left
        self._count = itertools.count()
        self.tokens = 0
        self.rows = 0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return (waiting for _, waiting in self._line)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def place(self, request: Request) -> tuple[float, int]:
        """Where a request that comes now stands."""
        return request.arrival_s + request.priority * HEAD_START_S, next(self._count)

    def join(self, request: Request) -> None:
        place = self.place(request)
        if request.num_rows == 1:
            order, ends = ONE_ROW, request.lengths
        elif request.num_rows == 2 and request.num_queries == 1:
            order, ends = _QUERY_FIRST, np.add.accumulate(request.lengths, dtype=np.int32)
        else:
            order = _long_first(request, np.arange(request.num_rows, dtype=np.int32))
            ends = np.cumsum(request.lengths[order], dtype=np.int32)
        waiting = QueuedRequest(request, order, ends, place)
        if not self._line or place > self._line[-1][0]:
            self._line.append((place, waiting))
        else:
            bisect.insort(self._line, (place, waiting), key=lambda entry: entry[0])
        self._by_id[request.id] = waiting
        self.took(-request.num_tokens, -request.num_rows)
        if request.deadline_s is not None:
            self._forget_stale_deadlines()
            heapq.heappush(self._deadlines, (request.deadline_s, place[1], request.id))

    def took(self, tokens: int, rows: int) -> None:
        """Account for rows that left the line to run, or, less than nothing, that come to it."""
        self.tokens -= tokens
        self.rows -= rows

    def sweep(self, visited: int | None = None) -> None:
        """Let go of the requests that have no rows left, among the first `visited` or all of the line."""
        asked = self._line[:visited]
        stay = [entry for entry in asked if entry[1].least or entry[1].rows_left]
        if len(stay) == len(asked):
            return
        for _, waiting in asked:
            if not waiting.least and not waiting.rows_left:
                del self._by_id[waiting.request.id]
        self._line[:visited] = stay

    def find(self, request_id: str) -> QueuedRequest | None:
        return self._by_id.get(request_id)

    def remove(self, request_id: str) -> QueuedRequest | None:
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        self.took(waiting.tokens_left, waiting.rows_left)
        index = bisect.bisect_left(self._line, waiting.place, key=lambda entry: entry[0])
        del self._line[index]
        return waiting

    def expired(self, now_s: float) -> list[QueuedRequest]:
        """Remove and return the requests whose deadline has passed."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)
            if self._waits(entry) and (waiting := self.remove(entry[2])) is not None:
                gone.append(waiting)
        return gone

    def next_deadline_s(self) -> float | None:
        while self._deadlines and not self._waits(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _waits(self, entry: tuple[float, int, str]) -> bool:
        """Whether a deadline is still that of a waiting request, and not of an earlier one of its id."""
        waiting = self._by_id.get(entry[2])
        return waiting is not None and waiting.place[1] == entry[1]

    def _forget_stale_deadlines(self) -> None:
        """Keep the heap in proportion to the line; most requests leave long before their deadline."""
        if len(self._deadlines) > 64 + 2 * len(self._by_id):
            self._deadlines = [entry for entry in self._deadlines if self._waits(entry)]
            heapq.heapify(self._deadlines)
