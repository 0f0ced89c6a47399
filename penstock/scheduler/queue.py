"""The waiting queue: requests in the order in which they run.

The order of a client's requests never has to be recomputed. A priority level is worth a fixed head start in
seconds, so the rank of a request is `arrival + priority × head start`. Requests of one priority run first
come, first served. A request that arrives later than the head start cannot overtake, so no request starves.
Across clients, `FairQueue` orders requests by the tokens that have run for each client.

Small requests, which fit into one step, and large ones wait in separate queues. The scheduler gives each kind
a share of every step. So a single row does not wait for the thousands of rows of an earlier request.
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

_QUERY_FIRST: Ints = np.arange(2, dtype=np.int32)  # the row order of one query and one document
_QUERY_FIRST.flags.writeable = False
HEAD_START_S = 1.0  # per level of priority
UNBOUNDED = 2**62

Rank = tuple[float, int]  # arrival plus head start, then order of arrival


@dataclass(slots=True, eq=False)
class OpenRow:
    """A row that runs over several steps. `blocks` hold the keys and values of its tokens that have run."""

    row: int
    length: int
    num_done: int  # tokens that have run or are covered by a cached prefix
    blocks: list[int]
    prefix_keys: list[bytes]  # keys of the row's full blocks; empty without prefix caching


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request with rows still to run. `order` lists its rows by length; `cursor` points at the next one."""

    request: Request
    order: Ints  # [rows], row numbers, longest first; queries before documents
    cumulative: Ints  # [rows], total tokens of rows order[0..i]
    rank: Rank
    client: ClientQueue[QueuedRequest]
    is_large: bool = False
    has_started: bool = False  # some of its rows have been scheduled
    cursor: int = 0
    open: list[OpenRow] = field(default_factory=list)
    cached: CachedVectors | None = None  # set when a request with pairs has got room in the vector cache
    cached_documents: Ints | None = None  # documents with cached vectors, not yet scored
    patches: Ints | None = None  # [rows], patches of each row's images; computed on first use
    next_length: int = field(init=False)  # tokens of the next row; 0: no row is left to open
    adapters: frozenset[int] | None = field(init=False)  # adapters of its rows; None: no row has one
    is_one_text: bool = field(init=False)  # a single row, without images and without pairs

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
        """Update `next_length`. It is stored because every step reads it for each waiting request."""
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
        """Whether the next row is a document and has to wait for a query that is still open."""
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
        """Take the documents whose vectors are cached, for scoring. None until all queries are scheduled."""
        queries = self.request.num_queries
        query_waits = self.num_unopened and int(self.order[self.cursor]) < queries
        if self.cached_documents is None or query_waits or any(row.row < queries for row in self.open):
            return None
        documents, self.cached_documents = self.cached_documents, None
        return documents

    def requeue(self, rows: Ints, cached_documents: Ints | None = None) -> None:
        """Put rows back that were taken; they run again from their first token."""
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
        """Close these open rows, or all of them if None. The caller frees their blocks."""
        closed = [row for row in self.open if rows is None or row.row in rows]
        self.open = [row for row in self.open if row not in closed]
        return closed

    def rows_within(self, max_patches: int, *, or_one: bool) -> int:
        """How many of the next rows fit into `max_patches` together; with `or_one`, at least one."""
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
        """Take the row of a request with a single row that was not taken before."""
        self.cursor, self.next_length = 1, 0
        return self.order

    def take(self, max_tokens: int, max_rows: int) -> Ints:
        """Take the next rows within these limits, as row numbers of the request."""
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


_NO_CLIENT = ClientQueue[QueuedRequest]("")  # placeholder until the request is queued


def _longest_first(request: Request, rows: Ints) -> Ints:
    """Order rows by length, longest first, but queries before documents."""
    lengths = request.lengths[rows]
    if request.pairs is None:
        return np.argsort(-lengths, kind="stable").astype(np.int32)
    return np.lexsort((-lengths, rows >= request.num_queries)).astype(np.int32)


def _has_rows_left(queued: QueuedRequest) -> int:
    return queued.next_length or queued.num_rows_left


class WaitingQueue:
    """Requests in the order in which they run, with look-up by id and by deadline."""

    def __init__(self, max_small_tokens: int = UNBOUNDED, max_small_rows: int = UNBOUNDED) -> None:
        """Requests with more tokens or rows than these limits are large."""
        self._max_small_tokens = max_small_tokens
        self._max_small_rows = max_small_rows
        self._small = FairQueue[QueuedRequest]()
        self._large = FairQueue[QueuedRequest]()
        self._by_id: dict[str, QueuedRequest] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # a heap; may contain requests that have left
        self._start_by = StartDeadlines(self._waits_to_start)
        self._count = itertools.count()
        self.num_tokens = 0
        self.num_rows = 0
        self.num_large_tokens = 0
        self.num_large_rows = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[QueuedRequest]:
        """All requests by rank, of all clients and both kinds."""
        return iter(sorted(self._by_id.values(), key=lambda queued: queued.rank))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    @property
    def is_mixed(self) -> bool:
        """Whether both small and large requests wait."""
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
        """Whether the client of a request is more than `num_tokens` behind its share."""
        behind = self._line(queued.is_large).virtual_time - queued.client.virtual_time
        return behind * queued.client.weight > num_tokens

    def set_head_start(self, num_tokens: float) -> None:
        """Set the head start of one priority level over other clients, in tokens."""
        self._small.head_start_tokens = self._large.head_start_tokens = num_tokens

    @property
    def small_share(self) -> float:
        """The share of a step for small requests while both kinds wait, by the weights of waiting clients."""
        return small_share(self._small.weight, self._large.weight)

    @property
    def num_clients(self) -> int:
        """Number of waiting clients. A client with requests of both kinds counts twice."""
        return self._small.num_clients + self._large.num_clients

    def weight(self, *, large: bool) -> float:
        """The total weight of the clients with waiting requests of a kind."""
        return self._line(large).weight

    def num_tokens_of(self, client: str, *, large: bool | None = None) -> int:
        """Queued tokens of a client, in requests of one kind or (None) of both."""
        if large is None:
            return self._small.num_tokens_of(client) + self._large.num_tokens_of(client)
        return self._line(large).num_tokens_of(client)

    def is_large(self, request: Request) -> bool:
        return request.num_tokens > self._max_small_tokens or request.num_rows > self._max_small_rows

    def next_rank(self, request: Request) -> Rank:
        """The rank of a request that arrives now."""
        return request.arrival_s + request.priority * HEAD_START_S, next(self._count)

    def add(self, request: Request, start_by_s: float | None = None) -> None:
        """Queue a request. If none of its rows has run by `start_by_s`, `remove_overdue` removes it."""
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
        """Subtract tokens and rows that left the queue. Negative numbers add what came back."""
        self.num_tokens -= tokens
        self.num_rows -= rows
        queued.client.num_tokens -= tokens
        if queued.is_large:
            self.num_large_tokens -= tokens
            self.num_large_rows -= rows

    def account_run(self, queued: QueuedRequest, tokens: int, rows: int) -> None:
        """Subtract tokens and rows that run now, and charge the tokens to the client of the request."""
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
        """After a walk over `num_visited` requests of a kind, remove those without rows left and reorder the
        clients."""
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
        """Remove and return the requests that had to start by now and have not."""
        overdue = self._start_by.pop_overdue(now_s)
        for queued in overdue:
            self.remove(queued.request.id)
        return overdue

    def next_deadline_s(self) -> float | None:
        """The earliest time at which `remove_expired` or `remove_overdue` may have a request to remove."""
        while self._deadlines and not self._is_current(self._deadlines[0]):
            heapq.heappop(self._deadlines)
        start_by_s = self._start_by.next_s()
        if not self._deadlines:
            return start_by_s
        return self._deadlines[0][0] if start_by_s is None else min(start_by_s, self._deadlines[0][0])

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        """Whether a deadline belongs to a waiting request, not to an earlier one with the same id."""
        queued = self._by_id.get(entry[2])
        return queued is not None and queued.rank[1] == entry[1]

    def _waits_to_start(self, queued: QueuedRequest) -> bool:
        return not queued.has_started and self._by_id.get(queued.request.id) is queued

    def _drop_stale_deadlines(self) -> None:
        """Keep the heap in proportion to the queue: most requests leave long before their deadline."""
        if len(self._deadlines) > 64 + 2 * len(self._by_id):
            self._deadlines = [entry for entry in self._deadlines if self._is_current(entry)]
            heapq.heapify(self._deadlines)
