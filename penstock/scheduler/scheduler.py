"""Who runs next, within a budget of tokens and rows. Pure Python and NumPy; time is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.content import PrefixKeys
from penstock.errors import NotPossible, QueueFull
from penstock.kvcache.blocks import BlockPool
from penstock.scheduler.queue import OpenRow, QueuedRequest, WaitingQueue
from penstock.scheduler.vector_cache import VectorCache, vector_counts
from penstock.types import CachedVectors, Ints, PoolingParams, Request


@dataclass(frozen=True, slots=True)
class Budget:
    tokens: int  # of one step
    rows: int  # of one step
    queued_tokens: int  # of the waiting line; beyond it requests are refused
    output_bytes: int = 0  # of token vectors that leave one step, a first row aside; 0: no limit


@dataclass(frozen=True, slots=True)
class Chunking:
    """How rows of causal models are spread over steps."""

    pool: BlockPool
    threshold: int  # most tokens of one row in one step
    prefixes: bool = False  # keep the keys and values of prefixes for later rows


class ScheduledRows(NamedTuple):
    """The rows that one request runs in the coming step: whole, or the tokens begins…ends of each."""

    request: Request
    rows: Ints
    begins: Ints | None = None  # [rows]
    ends: Ints | None = None  # [rows]
    tables: tuple[list[int] | None, ...] = ()  # the blocks of each row; None: nothing is kept of it
    held: CachedVectors | None = None  # where the vectors of a request with pairs lie
    stored: Ints | None = None  # its documents whose vectors are there already


_NO_ROWS = np.zeros(0, dtype=np.int32)


class _Chunk(NamedTuple):
    row: int
    begin: int
    end: int
    blocks: list[int] | None


@dataclass(slots=True)
class _Room:
    """What is left of a step's budget."""

    tokens: int
    rows: int
    output_bytes: int  # of token vectors
    token_bytes: int = 0  # what leaves the step for each token of the request that is asked now
    has_output: bool = False  # some token vectors leave it

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.rows <= 0

    @property
    def most(self) -> int:
        """Tokens that may still run and, if they have to, leave."""
        return min(self.tokens, self.output_bytes // self.token_bytes) if self.token_bytes else self.tokens

    def may_leave(self, tokens: int) -> bool:
        """Whether a row of so many may: a first one always, so that none waits for ever."""
        return not (self.token_bytes and self.has_output) or tokens * self.token_bytes <= self.output_bytes

    def use(self, tokens: int, rows: int) -> None:
        self.tokens -= tokens
        self.rows -= rows
        self.output_bytes -= tokens * self.token_bytes
        self.has_output |= self.token_bytes > 0


class Scheduler:
    """Continuous batching: whatever waits and fits shares the next step, the first in line first."""

    LOOK_AHEAD = 64  # requests behind one that does not fit which may still fill the step

    def __init__(
        self,
        budget: Budget,
        chunking: Chunking | None = None,
        vector_cache: VectorCache | None = None,
        token_bytes: Callable[[PoolingParams], int] = lambda params: 0,
    ) -> None:
        """`token_bytes` says how much leaves the engine for each token of a row that wants this."""
        self.budget = budget
        self.token_bytes = token_bytes
        self.chunking = chunking
        self.vector_cache = vector_cache  # where requests with pairs keep their vectors
        self.queue = WaitingQueue()
        self.apart: deque[list[QueuedRequest]] = (
            deque()
        )  # rows of failed steps, in groups that run before the line
        self._finished: list[OpenRow] = []  # rows that end in the step being planned

    def add(self, request: Request) -> None:
        """Join the waiting line; `QueueFull` if it is too long. An empty line takes any request."""
        if self.queue.tokens and self.queue.tokens + request.num_tokens > self.budget.queued_tokens:
            raise QueueFull(
                f"{self.queue.tokens} tokens are waiting and at most {self.budget.queued_tokens} may; "
                "try again shortly"
            )
        if request.pairs is not None:
            self._check_queries(request)
        self.queue.join(request)

    def ended(self, request: Request, *, well: bool) -> None:
        """Nothing of the request is left to run; `well` says that all of it succeeded."""
        if self.vector_cache is not None and request.pairs is not None:
            self.vector_cache.release(request.id, well=well)

    def cancel(self, request_id: str) -> bool:
        apart, waiting = self._take_apart(request_id), self.queue.remove(request_id)
        if apart is not None:
            self.queue.took(apart.tokens_left, apart.rows_left)
            self._release(apart.open)
        if waiting is not None:
            self._release(waiting.open)
        return apart is not None or waiting is not None

    def expire(self, now_s: float) -> list[Request]:
        late = self.queue.expired(now_s)
        for waiting in late:
            self._release(waiting.open)
        return [waiting.request for waiting in late]

    def again(self, groups: Sequence[Sequence[ScheduledRows]]) -> None:
        """Rows whose step failed, or that stood on what it was to write, begin once more before all others:
        each group apart, the next when all of the one before it have been planned."""
        for shares in groups:
            group: dict[str, QueuedRequest] = {}
            for share in shares:
                name = share.request.id
                group[name] = self._back(share, group.get(name) or self._take_apart(name))
            self.apart.append(list(group.values()))

    def _back(self, share: ScheduledRows, waiting: QueuedRequest | None) -> QueuedRequest:
        """The rows of a share, with those of their request that run apart already: queries go first."""
        request, line = share.request, self.queue.find(share.request.id)
        if waiting is None:
            waiting = QueuedRequest(request, _NO_ROWS, _NO_ROWS, self.queue.place(request), held=share.held)
        for closed in (waiting.close(share.rows), [] if line is None else line.close(share.rows)):
            self._release(closed)
            self.queue.took(sum(row.length - row.done for row in closed), len(closed))
        self.queue.sweep()
        stored = 0 if share.stored is None else len(share.stored)
        self.queue.took(-int(request.lengths[share.rows].sum()), -len(share.rows) - stored)
        waiting.put_back(share.rows, share.stored)
        return waiting

    def _take_apart(self, request_id: str) -> QueuedRequest | None:
        for group in self.apart:
            for waiting in group:
                if waiting.request.id == request_id:
                    group.remove(waiting)
                    self._sweep_apart()
                    return waiting
        return None

    def _sweep_apart(self) -> None:
        groups = [[waiting for waiting in group if waiting.rows_left] for group in self.apart]
        self.apart = deque(group for group in groups if group)

    def retract(self, shares: list[ScheduledRows]) -> None:
        """The step of these shares did not run: no row may reuse what it was to write."""
        if self.chunking is None:
            return
        pool = self.chunking.pool
        for share in shares:
            if share.begins is None or share.ends is None:
                continue
            for table, begin, end in zip(share.tables, share.begins, share.ends, strict=True):
                if table is not None:
                    pool.retract(table[int(begin) // pool.block_size : pool.blocks_for(int(end))])

    def schedule(self) -> list[ScheduledRows]:
        """Fill one step. A row larger than the whole budget runs alone, unless it can be cut."""
        if self.apart:
            shares, _ = self._fill(self.apart[0])
            if not shares and self._close_line():
                shares, _ = self._fill(self.apart[0])
            self._sweep_apart()
        else:
            shares, visited = self._fill(self.queue)
            if shares:
                self.queue.sweep(visited)
        self._release(self._finished)
        self._finished = []
        return shares

    def _fill(self, waits: Iterable[QueuedRequest]) -> tuple[list[ScheduledRows], int]:
        """The shares of a step, and how many of those that wait were asked."""
        budget, passed_over, visited = self.budget, 0, 0
        room = _Room(budget.tokens, budget.rows, budget.output_bytes)
        shares: list[ScheduledRows] = []
        large: list[QueuedRequest] = []
        chunking, limited = self.chunking, budget.output_bytes > 0
        for waiting in waits:
            visited += 1
            share = None
            if waiting.held is not None or waiting.request.pairs is None or self._hold(waiting):
                if shares and chunking is None and 2 * waiting.least > room.tokens:
                    large.append(waiting)  # most of those that wait, in every step
                    passed_over += 1
                    if passed_over > self.LOOK_AHEAD:
                        break
                    continue
                if limited:
                    room.token_bytes = self._leaving(waiting.request)
                if chunking is not None:
                    share = self._chunks(waiting, room, chunking)
                else:
                    share = self._whole_rows(waiting, room, alone=not shares)
            if share is not None:
                shares.append(share)
            if waiting.rows_left:
                passed_over += 1
            if room.full or passed_over > self.LOOK_AHEAD:
                break
        shares += self._best_fits(large, room)
        return shares, visited

    def _leaving(self, request: Request) -> int:
        if not request.also:  # almost all are so, and this is asked for each of them in every step
            return self.token_bytes(request.params)
        return sum(self.token_bytes(params) for params in request.wants)

    def _close_line(self) -> bool:
        """Rows that are open in the line give their memory to those that run apart, and begin again later."""
        found = False
        for waiting in self.queue:
            for row in waiting.close():
                self._release([row])
                self.queue.took(-row.done, 0)
                waiting.put_back(np.array([row.row], dtype=np.int32))
                found = True
        return found

    def _best_fits(self, large: list[QueuedRequest], room: _Room) -> Iterator[ScheduledRows]:
        """Of rows that would take more than half of what is left, the largest that fits: the first in line
        has its place already, and a step that is full costs as much to launch as one that is not."""
        while large and room.rows > 0:
            fitting = [waiting for waiting in large if waiting.least <= room.tokens]
            if not fitting:
                return
            best = max(fitting, key=lambda waiting: waiting.least)
            large.remove(best)
            if self.budget.output_bytes:
                room.token_bytes = self._leaving(best.request)
            if (share := self._whole_rows(best, room, alone=False)) is not None:
                yield share

    def _whole_rows(self, waiting: QueuedRequest, room: _Room, *, alone: bool) -> ScheduledRows | None:
        """Rows that run from end to end in this step."""
        before = waiting.tokens_taken
        taken = waiting.take(room.most, room.rows)
        if not len(taken) and room.token_bytes and not room.has_output:
            taken = waiting.take(room.tokens, 1)
        if not len(taken) and alone:
            taken = waiting.take(waiting.tokens_left, 1)
        stored = None if waiting.stored is None else self._take_stored(waiting)
        if not len(taken) and stored is None:
            return None
        self._use(room, waiting.tokens_taken - before, len(taken), finished=len(taken))
        return ScheduledRows(waiting.request, taken, held=waiting.held, stored=stored)

    def _hold(self, waiting: QueuedRequest) -> bool:
        """Places for the vectors of a request with pairs. What is there already is not run again."""
        assert self.vector_cache is not None
        held = self.vector_cache.hold(waiting.request)
        if held is None:
            return False  # it goes on when others have finished
        tokens, rows = waiting.hold(held)
        self.queue.took(tokens, rows)
        return True

    def _take_stored(self, waiting: QueuedRequest) -> Ints | None:
        stored = waiting.take_stored()
        if stored is not None:
            self.queue.took(0, len(stored))
        return stored

    def _check_queries(self, request: Request) -> None:
        if self.vector_cache is None:
            raise NotPossible("this engine keeps no vectors to score against")
        queries = request.num_queries
        if int(request.lengths[:queries].sum()) + queries <= self.vector_cache.size:
            return  # whatever of them counts
        needed = int(vector_counts(request)[:queries].clip(min=1).sum())
        if needed > self.vector_cache.size:
            raise NotPossible(
                f"the queries of one request have {needed} vectors; the store holds {self.vector_cache.size}"
            )

    def _chunks(self, waiting: QueuedRequest, room: _Room, chunking: Chunking) -> ScheduledRows | None:
        """Open rows go on; further rows run whole where they fit, and are opened where they do not."""
        most = chunking.threshold
        pieces: list[_Chunk] = []
        for open_row in list(waiting.open):
            if not room.full and room.may_leave(min(open_row.length - open_row.done, most)):
                pieces.append(self._advance(waiting, open_row, most, chunking, room))
        while not room.full and waiting.unopened and not waiting.documents_wait:
            length = waiting.least
            if not room.may_leave(length):
                break  # it goes first in another step, rather than being cut
            if length <= min(most, room.tokens) and not self._keeps(waiting, length, chunking):
                (row,) = waiting.take(length, 1)
                pieces.append(_Chunk(int(row), 0, length, None))
                self._use(room, length, 1, finished=1)
            elif (begun := self._open(waiting, length, chunking)) is not None:
                pieces.append(self._advance(waiting, begun, most, chunking, room))
            else:
                break  # no memory: it goes on when others have finished
        stored = self._take_stored(waiting)
        if not pieces and stored is None:
            return None
        if not pieces:
            return ScheduledRows(waiting.request, _NO_ROWS, _NO_ROWS, _NO_ROWS, (), waiting.held, stored)
        rows, begins, ends = (
            np.array(column, dtype=np.int32) for column in list(zip(*pieces, strict=True))[:3]
        )
        tables = tuple(piece.blocks for piece in pieces)
        return ScheduledRows(waiting.request, rows, begins, ends, tables, waiting.held, stored)

    @staticmethod
    def _keeps(waiting: QueuedRequest, length: int, chunking: Chunking) -> bool:
        """Whether a row's keys are worth keeping although it fits into the step."""
        return chunking.prefixes and waiting.request.reuse_prefix and length > chunking.pool.block_size

    def _open(self, waiting: QueuedRequest, length: int, chunking: Chunking) -> OpenRow | None:
        """Begin a row that is kept: all its blocks at once, so that it can finish whatever comes."""
        pool, request = chunking.pool, waiting.request
        row = int(waiting.order[waiting.cursor])
        keys: list[bytes] = []
        blocks: list[int] = []
        if self._keeps(waiting, length, chunking):
            start = int(request.starts[row])
            tokens = request.token_ids[start : start + length - 1]  # the last token is always computed
            keys = PrefixKeys(request, row, pool.block_size).extend(tokens)
            blocks = pool.match(keys)
        rest = pool.allocate(pool.blocks_for(length) - len(blocks))
        if rest is None:
            pool.release(blocks)
            return None
        waiting.take(length, 1)
        done = len(blocks) * pool.block_size
        self.queue.took(done, 0)
        begun = OpenRow(row, length, done, blocks + rest, keys)
        waiting.open.append(begun)
        return begun

    def _advance(
        self, waiting: QueuedRequest, row: OpenRow, most: int, chunking: Chunking, room: _Room
    ) -> _Chunk:
        """Run some more tokens of an open row. Steps run in order, and within one each layer writes before
        it reads: so what a step writes may be published at once, and what it reads is free for the next."""
        count = min(row.length - row.done, most, room.tokens)
        chunk = _Chunk(row.row, row.done, row.done + count, row.blocks)
        size = chunking.pool.block_size
        for block in range(row.done // size, min(chunk.end // size, len(row.keys))):
            chunking.pool.publish(row.blocks[block], row.keys[block])
        row.done = chunk.end
        finished = row.done == row.length
        if finished:
            waiting.open.remove(row)
            self._finished.append(row)
        self._use(room, count, 1, finished=int(finished))
        return chunk

    def _use(self, room: _Room, tokens: int, rows: int, *, finished: int) -> None:
        room.use(tokens, rows)
        self.queue.took(tokens, finished)

    def _release(self, rows: list[OpenRow]) -> None:
        if self.chunking is not None:
            for row in rows:
                self.chunking.pool.release(row.blocks)
