"""Chooses the rows that run in the next step, within a budget of tokens and rows. Pure Python and NumPy,
without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.backlog import max_queued_of
from penstock.content import PrefixKeys
from penstock.errors import NotPossible, QueueFull
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.fair_queue import STEPS_IN_HEAD_START, ClientQueue
from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.queue import UNBOUNDED, OpenRow, QueuedRequest, WaitingQueue
from penstock.scheduler.vector_cache import VectorCache, vector_counts
from penstock.types import CachedVectors, Ints, PoolingParams, Request


@dataclass(frozen=True, slots=True)
class Budget:
    max_tokens: int  # per step
    max_rows: int  # per step
    max_queued_tokens: int  # in the waiting queue; further requests are refused
    max_output_bytes: int = 0  # token vectors per step; a step's first row may exceed it; 0: no limit
    is_shared: bool = False  # small and large requests (of several steps) share each step while both wait
    max_patches: int = UNBOUNDED  # image patches that start in a step; a step's first row may exceed it


@dataclass(frozen=True, slots=True)
class Chunking:
    """How rows of causal models are spread over steps."""

    pool: BlockPool
    max_chunk_tokens: int  # per row and step
    prefix_caching: bool = False  # keep the KV cache blocks of prefixes for later rows


class ScheduledRows(NamedTuple):
    """The rows that one request runs in the next step: whole rows, or tokens `begins` to `ends` of each."""

    request: Request
    rows: Ints
    begins: Ints | None = None  # [rows]
    ends: Ints | None = None  # [rows]
    tables: tuple[list[int] | None, ...] = ()  # block table of each row; None: the row uses no KV cache
    cached: CachedVectors | None = None  # locations of the request's vectors, if it has pairs
    cached_documents: Ints | None = None  # documents with cached vectors: scored without running


_NO_ROWS = np.zeros(0, dtype=np.int32)


class _Chunk(NamedTuple):
    row: int
    begin: int
    end: int
    blocks: list[int] | None


@dataclass(slots=True)
class _StepRoom:
    """The rest of a step's budget."""

    tokens: int
    rows: int
    output_bytes: int  # for token vectors
    patches: int = UNBOUNDED  # for images
    has_images: bool = False  # an image already starts in this step
    features: int = UNBOUNDED  # free slots of the image feature store, shared by the rows of the step
    token_bytes: int = 0  # output size per token of the request being scheduled
    has_output: bool = False  # the step already returns token vectors
    first_fits: bool = True  # the first row runs whatever its length
    adapters: set[int] = field(default_factory=set)  # adapters of the rows scheduled so far

    @property
    def is_full(self) -> bool:
        return self.tokens <= 0 or self.rows <= 0

    @property
    def max_tokens(self) -> int:
        """Tokens that still fit, together with their output."""
        return min(self.tokens, self.output_bytes // self.token_bytes) if self.token_bytes else self.tokens

    def has_output_room(self, tokens: int) -> bool:
        """Whether the output of a row fits. The first row always fits, so that no row waits for ever."""
        return not (self.token_bytes and self.has_output) or tokens * self.token_bytes <= self.output_bytes

    def use_patches(self, count: int) -> None:
        self.patches -= count
        self.has_images |= count > 0

    def take_features(self, count: int, size: int) -> bool:
        """Reserve slots for the images of a row in the feature store of `size` slots. False if they do not
        fit beside the images of the step's other rows. A first row always fits: rows with more images than
        the store holds are refused on arrival."""
        left = min(self.features, size)
        if count > left and left < size:
            return False
        self.features = left - count
        return True

    def use(self, tokens: int, rows: int) -> None:
        self.tokens -= tokens
        self.rows -= rows
        self.output_bytes -= tokens * self.token_bytes
        self.has_output |= self.token_bytes > 0


class Scheduler:
    """Continuous batching: fills each step with rows of waiting requests, in queue order.

    If `Budget.is_shared`, small requests (that fit into one step) and large ones each get a share of every
    step while both wait. A kind that needs less than its share leaves the rest to the other, so steps are as
    full as without shares.
    """

    LOOK_AHEAD = 64  # requests that may be passed over because they do not fit
    ADAPTER_LOOK_AHEAD = 1024  # requests that may be passed over because their adapter does not fit
    SHORT_STEPS = 32  # number of steps that stay short after small requests or a flood were seen

    def __init__(
        self,
        budget: Budget,
        chunking: Chunking | None = None,
        vector_cache: VectorCache | None = None,
        token_bytes: Callable[[PoolingParams], int] = lambda params: 0,
        image_cache: ImageCache | None = None,
    ) -> None:
        """`token_bytes` returns the output size of a token for given pooling parameters."""
        self.budget = budget
        self.token_bytes = token_bytes
        self.chunking = chunking
        self.vector_cache = vector_cache  # for requests with pairs
        self.image_cache = image_cache  # for requests with images
        self.queue = WaitingQueue(budget.max_tokens, budget.max_rows) if budget.is_shared else WaitingQueue()
        self.queue.set_head_start(STEPS_IN_HEAD_START * budget.max_tokens)
        self.background = WaitingQueue()  # background requests, which run when `queue` leaves room
        self.max_adapters = 0  # different adapters per step; 0: no limit
        self.max_shared_tokens = budget.max_tokens  # step size while small requests may wait for the step
        self._small_lead = 0.0  # tokens by which small requests are ahead of their share
        self._num_flood_steps = 0  # coming small-only steps to keep short: a client waits behind a flood
        self._num_short_steps = 0  # coming large-only steps to keep short: small requests may arrive
        # Rows of failed steps, in groups. They run before the queue.
        self.isolated: deque[list[QueuedRequest]] = deque()
        self._finished: list[OpenRow] = []  # rows that end in the step being scheduled

    def add(self, request: Request, start_by_s: float | None = None) -> None:
        """Queue a request; raises `QueueFull` if the queue is too long. An empty queue takes any request.
        If none of its rows has run by `start_by_s`, `overdue` removes it."""
        if request.images is not None:
            self._check_images(request)
        if request.is_background:
            self._add_background(request)
            return
        waiting, limit = self.queue.num_tokens, self.budget.max_queued_tokens
        if waiting and waiting + request.num_tokens > limit:
            self._check_share(request, waiting, limit)
        if waiting > self.budget.max_tokens and self._is_beside_flood(request, waiting):
            self._num_flood_steps = self.SHORT_STEPS
        if request.pairs is not None:
            self._check_queries(request)
        self.queue.add(request, start_by_s)

    def _check_images(self, request: Request) -> None:
        if self.image_cache is None:
            raise NotPossible("this model reads no images", param="images")
        self.image_cache.check(request)

    def _add_background(self, request: Request) -> None:
        """Queue a background request. It does not count against the limit of the other queue, and it has no
        time by which it must start."""
        waiting, limit = self.background.num_tokens, self.budget.max_queued_tokens
        if waiting and waiting + request.num_tokens > limit:
            raise QueueFull(f"{waiting} tokens of batches are waiting and at most {limit} may")
        if request.pairs is not None:
            self._check_queries(request)
        self.background.add(request)

    def requeue(self, request: Request, start_by_s: float | None = None) -> None:
        """Queue a request again, without checking limits: it was admitted before."""
        self._queue_of(request).add(request, start_by_s)

    def _queue_of(self, request: Request) -> WaitingQueue:
        return self.background if request.is_background else self.queue

    def _is_beside_flood(self, request: Request, waiting: int) -> bool:
        """Whether a client without queued requests adds a small one to a queue of several steps. The request
        waits for the step in flight and runs in the next one, so both should be short."""
        max_tokens, queue = self.budget.max_tokens, self.queue
        is_little = 8 * request.num_tokens <= max_tokens and waiting > max_tokens * queue.num_clients
        return is_little and not queue.num_tokens_of(request.client)

    def _check_share(self, request: Request, waiting: int, limit: int) -> None:
        """Raise `QueueFull`, unless the request's client holds less than its share of the full queue."""
        held = self.queue.num_tokens_of(request.client)
        limit = max_queued_of(limit, waiting, held, self.queue.num_clients)
        if waiting + request.num_tokens > limit:
            raise QueueFull(f"{waiting} tokens are waiting and at most {limit} may; try again shortly")

    def runs_soon(self, request: Request) -> bool:
        """Whether the request's client has at most one step of tokens queued, so that its rows run soon."""
        return self._queue_of(request).num_tokens_of(request.client) <= self.budget.max_tokens

    def finish(self, request: Request, *, succeeded: bool) -> None:
        """Free what a request holds, when no row of it is left to run."""
        if self.vector_cache is not None and request.pairs is not None:
            self.vector_cache.release(request.id, succeeded=succeeded)

    def cancel(self, request_id: str) -> bool:
        isolated = self._take_isolated(request_id)
        queued = self.queue.remove(request_id) or self.background.remove(request_id)
        if isolated is not None:
            self._account(isolated, isolated.num_tokens_left, isolated.num_rows_left)
            self._free_blocks(isolated.open)
        if queued is not None:
            self._free_blocks(queued.open)
        return isolated is not None or queued is not None

    def expire(self, now_s: float) -> list[Request]:
        """Remove and return the requests whose deadline has passed."""
        expired = self.queue.remove_expired(now_s) + self.background.remove_expired(now_s)
        for queued in expired:
            self._free_blocks(queued.open)
        return [queued.request for queued in expired]

    def overdue(self, now_s: float) -> list[Request]:
        """Remove and return the requests that had to start by now and have not."""
        return [queued.request for queued in self.queue.remove_overdue(now_s)]

    # Rows of failed steps.

    def requeue_isolated(self, groups: Sequence[Sequence[ScheduledRows]]) -> None:
        """Run rows again from their first token, before the queue. Groups run one after another, each apart
        from all other rows."""
        for scheduled in groups:
            group: dict[str, QueuedRequest] = {}
            for entry in scheduled:
                name = entry.request.id
                group[name] = self._requeue(entry, group.get(name) or self._take_isolated(name))
            self.isolated.append(list(group.values()))

    def _requeue(self, entry: ScheduledRows, isolated: QueuedRequest | None) -> QueuedRequest:
        """Add rows to the isolated rows of the same request, if there are any, so that queries still run
        first."""
        request, queue = entry.request, self._queue_of(entry.request)
        queued = queue.find(request.id)
        if isolated is None:
            rank = queue.next_rank(request)
            outside: ClientQueue[QueuedRequest] = ClientQueue(request.client)
            isolated = QueuedRequest(request, _NO_ROWS, _NO_ROWS, rank, outside, cached=entry.cached)
        for owner in (isolated, queued):
            closed = [] if owner is None else owner.close_rows(entry.rows)
            if owner is not None and closed:
                self._free_blocks(closed)
                queue.account(owner, sum(row.length - row.num_done for row in closed), len(closed))
        if queued is not None and not queued.num_rows_left:
            queue.remove(request.id)
        num_documents = 0 if entry.cached_documents is None else len(entry.cached_documents)
        queue.account(isolated, -int(request.lengths[entry.rows].sum()), -len(entry.rows) - num_documents)
        isolated.requeue(entry.rows, entry.cached_documents)
        return isolated

    def _take_isolated(self, request_id: str) -> QueuedRequest | None:
        for group in self.isolated:
            for queued in group:
                if queued.request.id == request_id:
                    group.remove(queued)
                    self._remove_finished_isolated()
                    return queued
        return None

    def _remove_finished_isolated(self) -> None:
        groups = [[queued for queued in group if queued.num_rows_left] for group in self.isolated]
        self.isolated = deque(group for group in groups if group)

    def _preempt_queued_rows(self, queue: WaitingQueue) -> bool:
        """Free the blocks of all open rows in a queue, for more urgent rows. The open rows start over."""
        found = False
        for queued in queue:
            for row in queued.close_rows():
                self._free_blocks([row])
                queue.account(queued, -row.num_done, 0)
                queued.requeue(np.array([row.row], dtype=np.int32))
                found = True
        return found

    def retract(self, scheduled: Sequence[ScheduledRows]) -> None:
        """Unpublish the blocks that a failed step was to write."""
        if self.chunking is None:
            return
        pool = self.chunking.pool
        for entry in scheduled:
            if entry.begins is None or entry.ends is None:
                continue
            for table, begin, end in zip(entry.tables, entry.begins, entry.ends, strict=True):
                if table is not None:
                    pool.retract(table[int(begin) // pool.block_size : pool.blocks_for(int(end))])

    # Filling a step.

    def schedule(self) -> list[ScheduledRows]:
        """Fill one step. A row larger than the whole budget runs alone, unless it can be chunked."""
        if self.isolated:
            scheduled = self._fill_isolated()
        elif not len(self.queue):
            self._small_lead = 0.0
            return []
        elif not self.queue.has_large:
            scheduled = self._fill_small()
        else:
            scheduled = self._fill_mixed() if self.queue.is_mixed else self._fill_large()
        self._free_finished()
        if scheduled or self.chunking is None or not len(self.background):
            return scheduled
        # Background rows may hold the blocks that the queued rows wait for.
        return self.schedule() if self._preempt_queued_rows(self.background) else scheduled

    def schedule_background(
        self, max_tokens: int, *, max_rows: int | None = None, first_fits: bool = False
    ) -> list[ScheduledRows]:
        """Fill a step with background rows only, so that interactive rows never share a step with them. With
        `first_fits`, the first row runs whatever its length."""
        if not len(self.background) or self.isolated:
            return []
        scheduled: list[ScheduledRows] = []
        room = self._step_room()
        room.tokens, room.first_fits = min(room.tokens, max_tokens), first_fits
        room.rows = room.rows if max_rows is None else min(room.rows, max_rows)
        num_visited = self._fill(self.background.of_kind(large=False), room, scheduled)
        if scheduled:
            self.background.settle(num_visited)
        else:
            self._fill_started(scheduled, self.background)
        self._free_finished()
        return scheduled

    def _free_finished(self) -> None:
        self._free_blocks(self._finished)
        self._finished = []

    def _fill_isolated(self) -> list[ScheduledRows]:
        scheduled: list[ScheduledRows] = []
        self._fill(iter(self.isolated[0]), self._step_room(), scheduled)
        for queue in (self.background, self.queue):
            if not scheduled and self._preempt_queued_rows(queue):
                self._fill(iter(self.isolated[0]), self._step_room(), scheduled)
        self._remove_finished_isolated()
        return scheduled

    def _fill_small(self) -> list[ScheduledRows]:
        """Fill a step while only small requests wait, or while steps are not shared."""
        scheduled: list[ScheduledRows] = []
        room = self._step_room()
        if self._num_flood_steps:
            self._num_flood_steps -= 1
            room.tokens = min(room.tokens, self.max_shared_tokens)
        num_visited = self._fill(self.queue.of_kind(large=False), room, scheduled)
        if scheduled:
            self.queue.settle(num_visited)
            self._num_short_steps = self.SHORT_STEPS
        else:
            self._fill_started(scheduled, self.queue)
        self._small_lead = 0.0
        return scheduled

    def _fill_large(self) -> list[ScheduledRows]:
        """Fill a step while only large requests wait."""
        scheduled: list[ScheduledRows] = []
        room = self._step_room()
        if self._num_short_steps:
            self._num_short_steps -= 1
            room.tokens = min(room.tokens, self.max_shared_tokens)
        num_visited = self._fill(self.queue.of_kind(large=True), room, scheduled)
        if scheduled:
            self.queue.settle(num_visited, large=True)
        else:
            self._fill_started(scheduled, self.queue)
        self._small_lead = 0.0
        return scheduled

    def _fill_mixed(self) -> list[ScheduledRows]:
        """Fill a step while both small and large requests wait. The kind that has run less leads: its first
        row runs whatever its length. It leaves the other kind its share."""
        queue, scheduled, room = self.queue, list[ScheduledRows](), self._step_room()
        room.tokens = min(room.tokens, self.max_shared_tokens)
        self._num_short_steps = self.SHORT_STEPS
        small_before, large_before = queue.num_tokens - queue.num_large_tokens, queue.num_large_tokens
        share = queue.small_share
        leader = self._yields(large=False) or (self._small_lead > 0 and not self._yields(large=True))
        waiting = (queue.of_kind(large=False), queue.of_kind(large=True))
        num_visited = [0, 0]  # small, large
        tokens, rows = self._share(room, large=not leader)
        if (self._small_lead > 0) is leader:  # the leader is behind its share and catches up
            tokens -= min(int(abs(self._small_lead) / 2), tokens // 2)
        room.tokens, room.rows = room.tokens - tokens, room.rows - rows
        num_visited[leader] = self._fill(waiting[leader], room, scheduled)
        room.tokens, room.rows = room.tokens + tokens, room.rows + rows
        for kind in (not leader, leader):  # the leader gets what the other kind leaves
            if not room.is_full:
                num_visited[kind] += self._fill(waiting[kind], room, scheduled)
        for kind in (False, True):
            queue.settle(num_visited[kind], large=kind)
        small = small_before - (queue.num_tokens - queue.num_large_tokens)
        large = large_before - queue.num_large_tokens
        lead = self._small_lead + 2 * (small * (1 - share) - large * share)
        self._small_lead = max(-self.budget.max_tokens, min(lead, self.budget.max_tokens))
        if not scheduled:
            self._fill_started(scheduled, self.queue)
        return scheduled

    def _fill_started(self, scheduled: list[ScheduledRows], queue: WaitingQueue) -> None:
        """Continue requests that hold blocks or vectors, because all visited requests wait for these."""
        if len(queue) <= self.LOOK_AHEAD:
            return  # the whole queue was visited
        started = [queued for queued in queue if queued.open or queued.cached is not None]
        self._fill(iter(started), self._step_room(), scheduled)
        for queued in started:
            if not queued.num_rows_left:
                queue.remove(queued.request.id)

    def _share(self, room: _StepRoom, *, large: bool) -> tuple[int, int]:
        """The tokens and rows of a step to reserve for a kind of requests: its need, at most its share."""
        if self._yields(large=large):
            return 0, 0
        queue = self.queue
        share = 1 - queue.small_share if large else queue.small_share
        tokens, rows = queue.num_large_tokens, queue.num_large_rows
        if not large:
            tokens, rows = queue.num_tokens - tokens, queue.num_rows - rows
        return min(tokens, int(room.tokens * share)), min(rows, int(room.rows * share))

    def _yields(self, *, large: bool) -> bool:
        """Whether a kind gets no share of the step, because the other kind's first request is of the same
        client and more urgent."""
        own, other = self.queue.first(large=large), self.queue.first(large=not large)
        if own.request.priority <= other.request.priority or own.request.client != other.request.client:
            return False
        return own.rank > other.rank

    def _step_room(self) -> _StepRoom:
        budget = self.budget
        return _StepRoom(budget.max_tokens, budget.max_rows, budget.max_output_bytes, budget.max_patches)

    def _fill(self, waiting: Iterator[QueuedRequest], room: _StepRoom, scheduled: list[ScheduledRows]) -> int:
        """Schedule rows of waiting requests into the room; returns how many requests were visited."""
        num_passed_over = num_visited = num_other_adapters = 0
        wide: list[QueuedRequest] = []
        chunking, limits_output = self.chunking, self.budget.max_output_bytes > 0
        for queued in waiting:
            num_visited += 1
            entry = None
            if queued.adapters is not None and not self._has_adapter_room(queued.adapters, room):
                num_other_adapters += 1  # the request is among the first in the next step
                if num_other_adapters > self.ADAPTER_LOOK_AHEAD:
                    break
                continue
            if queued.cached is not None or queued.request.pairs is None or self._hold_vectors(queued):
                is_wide = scheduled and chunking is None and 2 * queued.next_length > room.tokens
                if is_wide and not self._queue_of(queued.request).is_far_behind(
                    queued, self.budget.max_tokens
                ):
                    wide.append(queued)  # in every step, most requests of a long queue take this branch
                    num_passed_over += 1
                    if num_passed_over > self.LOOK_AHEAD:
                        break
                    continue
                if limits_output:
                    room.token_bytes = self._output_bytes_per_token(queued.request)
                if chunking is not None:
                    entry = self._schedule_chunks(queued, room, chunking)
                elif queued.is_one_text and queued.next_length:  # almost all requests
                    entry = self._schedule_text(queued, room, alone=not scheduled and room.first_fits)
                else:
                    entry = self._schedule_whole_rows(queued, room, alone=not scheduled and room.first_fits)
            if entry is not None:
                queued.has_started = True
                scheduled.append(entry)
                if queued.adapters is not None:
                    room.adapters |= queued.adapters
            if queued.next_length or queued.num_rows_left:
                num_passed_over += 1
            if room.tokens <= 0 or room.rows <= 0 or num_passed_over > self.LOOK_AHEAD:
                break
        if wide:
            scheduled += self._best_fits(wide, room)
        return num_visited

    def _has_adapter_room(self, adapters: frozenset[int], room: _StepRoom) -> bool:
        if not self.max_adapters or adapters <= room.adapters:
            return True
        return len(adapters | room.adapters) <= self.max_adapters

    def _output_bytes_per_token(self, request: Request) -> int:
        if not request.extra_params:  # fast path: true for almost all requests, and this runs in every step
            return self.token_bytes(request.params)
        return sum(self.token_bytes(params) for params in request.all_params)

    def _best_fits(self, wide: list[QueuedRequest], room: _StepRoom) -> Iterator[ScheduledRows]:
        """Schedule rows that need more than half of the remaining room: repeatedly the largest that fits. The
        first request of the queue is already scheduled, and a full step costs no more to launch than one with
        room left."""
        while wide and room.rows > 0:
            fitting = [queued for queued in wide if queued.next_length <= room.tokens]
            if not fitting:
                return
            best = max(fitting, key=lambda queued: queued.next_length)
            wide.remove(best)
            if best.adapters is not None and not self._has_adapter_room(best.adapters, room):
                continue
            if self.budget.max_output_bytes:
                room.token_bytes = self._output_bytes_per_token(best.request)
            if (entry := self._schedule_whole_rows(best, room, alone=False)) is not None:
                best.has_started = True
                if best.adapters is not None:
                    room.adapters |= best.adapters
                yield entry

    def _schedule_text(self, queued: QueuedRequest, room: _StepRoom, *, alone: bool) -> ScheduledRows | None:
        """Fast path of `_schedule_whole_rows` for a request with a single row."""
        tokens, request = queued.next_length, queued.request
        if room.rows < 1:
            return None
        if room.token_bytes:
            is_first_output = not room.has_output and tokens <= room.tokens
            if tokens > room.max_tokens and not (is_first_output or alone):
                return None
        elif tokens > room.tokens and not alone:
            return None
        taken = queued.take_only_row()
        room.use(tokens, 1)
        queue = self.background if request.is_background else self.queue
        queue.account_run(queued, tokens, 1)
        return ScheduledRows(request, taken)

    def _schedule_whole_rows(
        self, queued: QueuedRequest, room: _StepRoom, *, alone: bool
    ) -> ScheduledRows | None:
        """Schedule rows that run from first to last token in this step."""
        num_before, max_rows = queued.num_tokens_taken, room.rows
        if queued.request.images is not None:
            max_rows = min(max_rows, queued.rows_within(room.patches, or_one=not room.has_images))
        taken = queued.take(room.max_tokens, max_rows)
        if not len(taken) and room.token_bytes and not room.has_output and max_rows:
            taken = queued.take(room.tokens, 1)
        if not len(taken) and alone:
            taken = queued.take(queued.num_tokens_left, 1)
        if queued.request.images is not None:
            room.use_patches(queued.num_patches(taken))
        documents = None if queued.cached_documents is None else self._take_cached_documents(queued)
        if not len(taken) and documents is None:
            return None
        self._use(queued, room, queued.num_tokens_taken - num_before, len(taken), finished=len(taken))
        return ScheduledRows(queued.request, taken, cached=queued.cached, cached_documents=documents)

    # Requests with pairs.

    def _hold_vectors(self, queued: QueuedRequest) -> bool:
        """Reserve room for the vectors of a request with pairs. Rows whose vectors are cached do not run."""
        if self.vector_cache is None or (cached := self.vector_cache.hold(queued.request)) is None:
            return False  # the request runs when others have finished
        tokens, rows = queued.use_cached_vectors(cached)
        self._account(queued, tokens, rows)
        return True

    def _take_cached_documents(self, queued: QueuedRequest) -> Ints | None:
        documents = queued.take_cached_documents()
        if documents is not None:
            self._account(queued, 0, len(documents))
        return documents

    def _check_queries(self, request: Request) -> None:
        if self.vector_cache is None:
            raise NotPossible("this engine keeps no vectors to score against")
        queries = request.num_queries
        if int(request.lengths[:queries].sum()) + queries <= self.vector_cache.size:
            return  # they fit even if every token has a vector
        needed = int(vector_counts(request)[:queries].clip(min=1).sum())
        if needed > self.vector_cache.size:
            raise NotPossible(
                f"the queries of one request have {needed} vectors; the store holds {self.vector_cache.size}"
            )

    # Chunked prefill.

    def _schedule_chunks(
        self, queued: QueuedRequest, room: _StepRoom, chunking: Chunking
    ) -> ScheduledRows | None:
        """Advance open rows. Then run further rows whole if they fit, and open rows that do not."""
        max_tokens = chunking.max_chunk_tokens
        chunks: list[_Chunk] = []
        for open_row in list(queued.open):
            next_tokens = min(open_row.length - open_row.num_done, max_tokens)
            if not room.is_full and room.has_output_room(next_tokens):
                if not self._fits_features(queued, open_row.row, room):
                    continue
                chunks.append(self._advance(queued, open_row, chunking, room))
        while not room.is_full and queued.num_unopened and not queued.documents_blocked:
            length = queued.next_length
            if not room.has_output_room(length):
                break  # the row runs first in a later step instead of being chunked
            if queued.request.images is not None:
                if not queued.rows_within(room.patches, or_one=not room.has_images):
                    break
                if not self._fits_features(queued, int(queued.order[queued.cursor]), room):
                    break
                room.use_patches(queued.num_patches(queued.order[queued.cursor : queued.cursor + 1]))
            if length <= min(max_tokens, room.tokens) and not self._caches_prefix(queued, length, chunking):
                (row,) = queued.take(length, 1)
                chunks.append(_Chunk(int(row), 0, length, None))
                self._use(queued, room, length, 1, finished=1)
            elif (opened := self._open(queued, length, chunking)) is not None:
                chunks.append(self._advance(queued, opened, chunking, room))
            else:
                break  # no blocks are free: the row runs when others have finished
        documents = self._take_cached_documents(queued)
        if not chunks and documents is None:
            return None
        if not chunks:
            return ScheduledRows(queued.request, _NO_ROWS, _NO_ROWS, _NO_ROWS, (), queued.cached, documents)
        rows, begins, ends = (
            np.array(column, dtype=np.int32) for column in list(zip(*chunks, strict=True))[:3]
        )
        tables = tuple(chunk.blocks for chunk in chunks)
        return ScheduledRows(queued.request, rows, begins, ends, tables, queued.cached, documents)

    def _fits_features(self, queued: QueuedRequest, row: int, room: _StepRoom) -> bool:
        """Whether the features of a row's images fit into the store beside those of the step's other rows. A
        chunk with any token of an image needs the features of the whole image."""
        images = queued.request.images
        if images is None or self.image_cache is None:
            return True
        count = int(images.num_tokens[images.rows == row].sum())
        return not count or room.take_features(count, self.image_cache.size)

    @staticmethod
    def _caches_prefix(queued: QueuedRequest, length: int, chunking: Chunking) -> bool:
        """Whether a row uses the prefix cache; then it needs KV cache blocks even if it fits into a step."""
        return chunking.prefix_caching and queued.request.reuse_prefix and length > chunking.pool.block_size

    def _open(self, queued: QueuedRequest, length: int, chunking: Chunking) -> OpenRow | None:
        """Open a row and allocate all its blocks, so that it can always finish. None if too few are free."""
        pool, request = chunking.pool, queued.request
        row = int(queued.order[queued.cursor])
        prefix_keys: list[bytes] = []
        blocks: list[int] = []
        if self._caches_prefix(queued, length, chunking):
            start = int(request.starts[row])
            tokens = request.token_ids[start : start + length - 1]  # the last token is always computed
            prefix_keys = PrefixKeys(request, row, pool.block_size).extend(tokens)
            blocks = pool.match(prefix_keys)
        rest = pool.allocate(pool.blocks_for(length) - len(blocks))
        if rest is None:
            pool.release(blocks)
            return None
        queued.take(length, 1)
        num_cached = len(blocks) * pool.block_size
        self._account(queued, num_cached, 0)
        opened = OpenRow(row, length, num_cached, blocks + rest, prefix_keys)
        queued.open.append(opened)
        return opened

    def _advance(self, queued: QueuedRequest, row: OpenRow, chunking: Chunking, room: _StepRoom) -> _Chunk:
        """Run the next chunk of an open row. Steps run in order, and within a step each layer writes keys and
        values before it reads them. So the chunk's blocks are published immediately, and the blocks of a
        finished row are freed immediately."""
        count = min(row.length - row.num_done, chunking.max_chunk_tokens, room.tokens)
        chunk = _Chunk(row.row, row.num_done, row.num_done + count, row.blocks)
        size = chunking.pool.block_size
        for block in range(row.num_done // size, min(chunk.end // size, len(row.prefix_keys))):
            chunking.pool.publish(row.blocks[block], row.prefix_keys[block])
        row.num_done = chunk.end
        is_finished = row.num_done == row.length
        if is_finished:
            queued.open.remove(row)
            self._finished.append(row)
        self._use(queued, room, count, 1, finished=int(is_finished))
        return chunk

    def _use(self, queued: QueuedRequest, room: _StepRoom, tokens: int, rows: int, *, finished: int) -> None:
        room.use(tokens, rows)
        self._queue_of(queued.request).account_run(queued, tokens, finished)

    def _account(self, queued: QueuedRequest, tokens: int, rows: int) -> None:
        self._queue_of(queued.request).account(queued, tokens, rows)

    def _free_blocks(self, rows: list[OpenRow]) -> None:
        if self.chunking is not None:
            for row in rows:
                self.chunking.pool.release(row.blocks)
