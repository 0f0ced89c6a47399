"""The waiting queue: requests in the order in which they run.

The order of a client's requests never has to be recomputed. A priority level is worth a fixed head start in
seconds, so the rank of a request is `arrival + priority × head start`. Requests of one priority run first
come, first served. A request that arrives later than the head start cannot overtake, so no request starves.
Clients take turns by the tokens that run for them (`FairQueue`).

Small requests, which fit into one step, and large ones wait in two lines of their own. The scheduler lets
both have a share of each step, so that a single row does not wait for the thousands of an earlier request.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.backlog import small_share
from penstock.scheduler.fair_queue import ClientQueue, FairQueue
from penstock.scheduler.start_deadlines import StartDeadlines
from penstock.types import ONE_ROW, CachedVectors, Ints, Request

_QUERY_FIRST: Ints = np.arange(2, dtype=np.int32)  # the order of one query and one document
_QUERY_FIRST.flags.writeable = False
HEAD_START_S = 1.0  # what one level of priority is worth
UNBOUNDED = 2**62

Rank = tuple[float, int]  # arrival plus head start, then order of arrival


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that runs over several steps; its keys and values so far are in `blocks`."""

    row: int
    length: int
    num_done: int  # tokens that have run or that a cached prefix covers
    blocks: list[int]
    prefix_keys: list[bytes]  # of its full blocks, where prefixes are cached


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request with rows still to run. `order` lists its rows by length; `cursor` is the next one."""

    request: Request
    order: Ints  # [rows], row numbers, longest first
    cumulative: Ints  # [rows], tokens of rows order[0..i]
    rank: Rank
    client: ClientQueue[QueuedRequest]
    is_large: bool = False
    has_started: bool = False  # some of its rows have been scheduled
    cursor: int = 0
    open: list[OpenRow] = field(default_factory=list)
    cached: CachedVectors | None = (
        None  # of a request with pairs, once its queries have room in the vector cache
    )
    cached_documents: Ints | None = None  # documents that only have to be scored, until they are
    patches: Ints | None = None  # [rows], of a request with images, once it is asked for
    next_length: int = field(init=False)  # tokens of the next row; 0: no row is left to open
    adapters: frozenset[int] | None = field(init=False)  # that its rows have; None: none
    is_one_text: bool = field(init=False)  # one row, which reads no image and is paired with no other

    def __post_init__(self) -> None:
        request = self.request
        ids = request.adapters
        self.adapters = None if ids is None else frozenset(ids.tolist()) - {-1} or None
        self.is_one_text = request.num_rows == 1 and request.pairs is None and request.images is None
        if self.is_one_text and len(self.order):
            self.next_length = request.num_tokens
        else:
            self._update_next_length()

    def _update_next_length(self) -> None:
        """Every step asks each waiting request for this number, so it is kept."""
        at = self.cursor
        self.next_length = int(self.request.lengths[self.order[at]]) if at < len(self.order) else 0

    @property
    def num_rows_left(self) -> int:
        left = len(self.order) - self.cursor
        if self.is_one_text and not self.open:
            return left
        left += len(self.open)
        return left if self.cached_documents is None else left + len(self.cached_documents)

    @property
    def num_unopened(self) -> int:
        return len(self.order) - self.cursor

    @property
    def num_tokens_left(self) -> int:
        left = int(self.cumulative[-1]) - self.num_tokens_taken if len(self.cumulative) else 0
        return left + sum(row.length - row.num_done for row in self.open)

    @property
    def num_tokens_taken(self) -> int:
        return int(self.cumulative[self.cursor - 1]) if self.cursor else 0

    @property
    def documents_blocked(self) -> bool:
        """Whether the next row is a document that must wait for a query that is still open."""
        queries = self.request.num_queries
        if not queries or not any(row.row < queries for row in self.open):
            return False
        return self.cursor >= len(self.order) or int(self.order[self.cursor]) >= queries

    def use_cached_vectors(self, cached: CachedVectors) -> tuple[int, int]:
        """Drop the rows whose vectors are cached; returns their tokens, and how many of them are queries."""
        self.cached = cached
        if not cached.ready.any():
            return 0, 0
        lengths, queries = self.request.lengths, self.request.num_queries
        documents = np.flatnonzero(cached.ready[queries:]).astype(np.int32) + queries
        self.cached_documents = documents if len(documents) else None
        self.order = self.order[~cached.ready[self.order]]
        self.cumulative = np.cumsum(lengths[self.order], dtype=np.int32)
        self._update_next_length()
        return int(lengths[cached.ready].sum()), int(cached.ready[:queries].sum())

    def take_cached_documents(self) -> Ints | None:
        """The documents that only have to be scored, once all queries are scheduled."""
        queries = self.request.num_queries
        query_waits = self.num_unopened and int(self.order[self.cursor]) < queries
        if self.cached_documents is None or query_waits or any(row.row < queries for row in self.open):
            return None
        documents, self.cached_documents = self.cached_documents, None
        return documents

    def requeue(self, rows: Ints, cached_documents: Ints | None = None) -> None:
        """Run rows that were taken once more, from their first token."""
        left = np.concatenate([self.order[self.cursor :], rows])
        self.order = left[_longest_first(self.request, left)]
        self.cumulative = np.cumsum(self.request.lengths[self.order], dtype=np.int32)
        self.cursor = 0
        self._update_next_length()
        if cached_documents is not None:
            before = self.cached_documents
            self.cached_documents = (
                cached_documents if before is None else np.concatenate([before, cached_documents])
            )

    def close_rows(self, rows: Ints | None = None) -> list[OpenRow]:
        """Close these open rows, or all; the caller frees their blocks."""
        closed = [row for row in self.open if rows is None or row.row in rows]
        self.open = [row for row in self.open if row not in closed]
        return closed

    def rows_within(self, max_patches: int, *, or_one: bool) -> int:
        """How many of the next rows have images of at most so many patches; with `or_one` one at least."""
        totals = np.cumsum(self._patches_of_rows[self.order[self.cursor :]])
        return max(int(or_one), int(np.searchsorted(totals, max_patches, side="right")))

    def num_patches(self, rows: Ints) -> int:
        return int(self._patches_of_rows[rows].sum())

    @property
    def _patches_of_rows(self) -> Ints:
        if self.patches is None:
            self.patches = self.request.patches_of_rows
        return self.patches

    def take_only_row(self) -> Ints:
        """The row of a request with one text, which has not been taken before."""
        self.cursor, self.next_length = 1, 0
        return self.order

    def take(self, max_tokens: int, max_rows: int) -> Ints:
        """The next rows within these limits, as row numbers of the request."""
        if len(self.order) == 1:  # most requests have one row
            if self.cursor or max_rows < 1 or self.cumulative[0] > max_tokens:
                return self.order[1:]
            return self.take_only_row()
        fits = int(np.searchsorted(self.cumulative, self.num_tokens_taken + max_tokens, side="right"))
        stop = min(fits, self.cursor + max_rows)
        taken = self.order[self.cursor : max(stop, self.cursor)]
        self.cursor += len(taken)
        self._update_next_length()
        return taken


_NO_CLIENT = ClientQueue[QueuedRequest]("")  # of a request that does not wait in line


def _longest_first(request: Request, rows: Ints) -> Ints:
    """An order of rows: the longest first, but queries before the documents that need them."""
    lengths = request.lengths[rows]
    if request.pairs is None:
        return np.argsort(-lengths, kind="stable").astype(np.int32)
    return np.lexsort((-lengths, rows >= request.num_queries)).astype(np.int32)


def _has_rows_left(queued: QueuedRequest) -> int:
    return queued.next_length or queued.num_rows_left


class WaitingQueue:
    """Requests in the order in which they run, with look-up by id and by deadline."""

    def __init__(self, max_small_tokens: int = UNBOUNDED, max_small_rows: int = UNBOUNDED) -> None:
        """Requests with more tokens or rows than these are large."""
        self._max_small_tokens = max_small_tokens
        self._max_small_rows = max_small_rows
        self._small = FairQueue[QueuedRequest]()
        self._large = FairQueue[QueuedRequest]()
        self._by_id: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # a heap that may name requests that have left
        self._start_by = StartDeadlines(self._waits_to_start)
        self._count = itertools.count()
        self.num_tokens = 0
        self.num_rows = 0
        self.num_large_tokens = 0
        self.num_large_rows = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """By rank, whatever the client and the kind."""
        return iter(sorted(self._by_id.values(), key=lambda queued: queued.rank))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def is_mixed(self) -> bool:
        """Whether small and large requests wait."""
        return bool(self._small and self._large)

    @property
    def has_large(self) -> bool:
        return bool(self._large)

    def of_kind(self, *, large: bool) -> Iterator[QueuedRequest]:
        """The small or the large requests, in the order in which they should run."""
        return self._line(large).walk()

    def first(self, *, large: bool) -> QueuedRequest:
        return self._line(large).first()

    def _line(self, large: bool) -> FairQueue[QueuedRequest]:
        return self._large if large else self._small

    def is_far_behind(self, queued: QueuedRequest, num_tokens: int) -> bool:
        """Whether the client of a request has run less than its share by so many tokens."""
        behind = self._line(queued.is_large).virtual_time - queued.client.virtual_time
        return behind * queued.client.weight > num_tokens

    def set_head_start(self, num_tokens: float) -> None:
        """Set what one level of priority is worth against other clients, in tokens of the device."""
        self._small.head_start_tokens = self._large.head_start_tokens = num_tokens

    @property
    def small_share(self) -> float:
        """The share of a step that small requests have while both kinds wait: by the clients that wait."""
        return small_share(self._small.weight, self._large.weight)

    @property
    def num_clients(self) -> int:
        """Clients that wait; one with requests of both kinds counts twice."""
        return self._small.num_clients + self._large.num_clients

    def weight(self, *, large: bool) -> float:
        """The weights of all clients whose requests of a kind wait."""
        return self._line(large).weight

    def num_tokens_of(self, client: str, *, large: bool | None = None) -> int:
        """The tokens of a client's requests that wait, of a kind or of both."""
        if large is None:
            return self._small.num_tokens_of(client) + self._large.num_tokens_of(client)
        return self._line(large).num_tokens_of(client)

    def is_large(self, request: Request) -> bool:
        return request.num_tokens > self._max_small_tokens or request.num_rows > self._max_small_rows

    def next_rank(self, request: Request) -> Rank:
        """The rank of a request that arrives now."""
        return request.arrival_s + request.priority * HEAD_START_S, next(self._count)

    def add(self, request: Request, start_by_s: float | None = None) -> None:
        """Queue a request. `remove_overdue` gives it up if nothing of it has run at `start_by_s`."""
        rank = self.next_rank(request)
        num_tokens, num_rows = request.num_tokens, request.num_rows
        if num_rows == 1:
            order, cumulative = ONE_ROW, request.lengths
        elif num_rows == 2 and request.num_queries == 1:
            order, cumulative = _QUERY_FIRST, np.add.accumulate(request.lengths, dtype=np.int32)
        else:
            order = _longest_first(request, np.arange(num_rows, dtype=np.int32))
            cumulative = np.cumsum(request.lengths[order], dtype=np.int32)
        is_large = self.is_large(request)
        queued = QueuedRequest(request, order, cumulative, rank, _NO_CLIENT, is_large)
        queued.client = (self._large if is_large else self._small).add(rank, queued, num_tokens)
        self._by_id[request.id] = queued
        self.account(queued, -num_tokens, -num_rows)
        if request.deadline_s is not None:
            self._drop_stale_deadlines()
            heapq.heappush(self._deadlines, (request.deadline_s, rank[1], request.id))
        if start_by_s is not None:
            self._start_by.add(start_by_s, queued)

    def account(self, queued: QueuedRequest, tokens: int, rows: int) -> None:
        """Subtract tokens and rows that left the queue to run; negative numbers come back to it."""
        self.num_tokens -= tokens
        self.num_rows -= rows
        queued.client.num_tokens -= tokens
        if queued.is_large:
            self.num_large_tokens -= tokens
            self.num_large_rows -= rows

    def account_run(self, queued: QueuedRequest, tokens: int, rows: int) -> None:
        """Subtract tokens and rows that run now, and count the tokens for the client of the request."""
        client, line = queued.client, self._small
        self.num_tokens -= tokens
        self.num_rows -= rows
        client.num_tokens -= tokens
        if queued.is_large:
            line = self._large
            self.num_large_tokens -= tokens
            self.num_large_rows -= rows
        line.charge(client, tokens)

    def settle(self, num_visited: int, *, large: bool = False) -> None:
        """After a walk over `num_visited` requests of a kind: remove those that have no rows left, and let
        the clients take turns."""
        for queued in self._line(large).settle(num_visited, _has_rows_left):
            del self._by_id[queued.request.id]

    def find(self, request_id: str) -> QueuedRequest | None:
        return self._by_id.get(request_id)

    def remove(self, request_id: str) -> QueuedRequest | None:
        queued = self._by_id.pop(request_id, None)
        if queued is None:
            return None
        self.account(queued, queued.num_tokens_left, queued.num_rows_left)
        self._line(queued.is_large).remove(queued.client, queued.rank)
        return queued

    def remove_expired(self, now_s: float) -> list[QueuedRequest]:
        """Remove and return the requests whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heapq.heappop(self._deadlines)
            if self._is_current(entry) and (queued := self.remove(entry[2])) is not None:
                expired.append(queued)
        return expired

    def remove_overdue(self, now_s: float) -> list[QueuedRequest]:
        """Remove and return the requests that should have started by now."""
        overdue = self._start_by.pop_overdue(now_s)
        for queued in overdue:
            self.remove(queued.request.id)
        return overdue

    def next_deadline_s(self) -> float | None:
        """When `remove_expired` or `remove_overdue` has something to remove, unless it runs before."""
        while self._deadlines and not self._is_current(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        start_by_s = self._start_by.next_s()
        if not self._deadlines:
            return start_by_s
        return self._deadlines[0][0] if start_by_s is None else min(start_by_s, self._deadlines[0][0])

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        """Whether a deadline belongs to a waiting request, and not to an earlier one of the same id."""
        queued = self._by_id.get(entry[2])
        return queued is not None and queued.rank[1] == entry[1]

    def _waits_to_start(self, queued: QueuedRequest) -> bool:
        return not queued.has_started and self._by_id.get(queued.request.id) is queued

    def _drop_stale_deadlines(self) -> None:
        """Keep the heap in proportion to the queue; most requests leave long before their deadline."""
        if len(self._deadlines) > 64 + 2 * len(self._by_id):
            self._deadlines = [entry for entry in self._deadlines if self._is_current(entry)]
            heapq.heapify(self._deadlines)
