"""Several engines of one model as one `EngineHandle`, with load balancing and one retry if an engine is lost.

If an engine dies or hangs, its requests in flight run once more on another engine. This is safe, because
results depend only on the rows. There is at most one retry, so that a request that kills engines does not
kill all of them. A stream is retried only before its first token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from penstock.balance import UNAVAILABLE, Affinity, Balancer, divide
from penstock.content import prefix_keys, query_key, select_rows
from penstock.errors import EngineUnavailable, PenstockError
from penstock.handle import EngineHandle, EngineStats, StreamListener, Unsubscribe
from penstock.types import (
    Array,
    Comparison,
    GeneratedTokens,
    Ints,
    PooledOutput,
    Request,
    Timings,
    cumulative,
)
from penstock.wire.status import StatusReader

log = logging.getLogger("penstock.client")
CLOSED = "the server is closing"
MIXED = "the engines of the model were replaced by others with other weights meanwhile; try again"
# Engines are chosen by the first 64 blocks of a prompt's prefix.
PREFIX_BLOCK, MAX_PREFIX_BLOCKS = 64, 64  # tokens per block, number of blocks
MAX_COUNTED_OUTPUT = 256  # output tokens per sequence counted as load; the real number is not known yet
SPLIT_STEPS = 2  # a request of fewer steps is not split over engines
# Maximum share of a request's tokens that splitting may add by repeating all queries in every part.
MAX_QUERY_SHARE = 0.1
ASLEEP_STEPS = 4  # steps of extra load on the engines that are awake before a sleeping one is woken
RETRY_PATIENCE_S = 5.0  # how long a request of a lost engine waits for an engine if no other serves
RETRY_POLL_S = 0.02
MAX_LOOP_BYTES = 1 << 22  # larger outputs are joined on another thread


class GroupedClient(EngineHandle, Protocol):
    """What the group needs from the connection to one engine."""

    on_ready: Callable[[int], None]

    @property
    def status(self) -> StatusReader | None: ...

    @property
    def holds_requests(self) -> bool: ...


class _Member:
    """One engine, with the number of tokens that this process has in flight on it."""

    __slots__ = ("client", "index", "num_background_tokens", "num_tokens", "status")

    def __init__(self, index: int, client: GroupedClient) -> None:
        self.index = index
        self.client = client
        self.status = client.status
        self.num_tokens = 0  # in flight, without background requests
        self.num_background_tokens = 0

    def count(self, num_tokens: int, is_background: bool) -> None:
        if is_background:
            self.num_background_tokens += num_tokens
        else:
            self.num_tokens += num_tokens


def affinity_of(request: Request, settings: Mapping[str, Any]) -> Affinity | None:
    """The prefix or queries of a request that an engine with these settings may have cached. None if there
    is nothing to reuse."""
    if request.pairs is not None:
        if not settings.get("share_identical"):
            return None
        return Affinity([query_key(request)], int(request.lengths[: request.num_queries].sum()))
    kept = "prefix_caching" if request.sampling is None else "generate_prefixes"
    if not request.reuse_prefix or not settings.get(kept):
        return None
    keys = prefix_keys(request, PREFIX_BLOCK, MAX_PREFIX_BLOCKS)
    return Affinity(keys, PREFIX_BLOCK) if keys else None


class EngineGroup(EngineHandle):
    """The engines of one model. The group is ready while at least one of them is."""

    def __init__(self, clients: Sequence[GroupedClient], name: str = "the model") -> None:
        self._members = [_Member(index, client) for index, client in enumerate(clients)]
        self._name = name
        self._balancer = Balancer()
        self._revision = ""
        self._is_closed = False
        self._step_tokens = 1
        self._settings: dict[str, Any] = {}
        self.uses_affinity = True
        self.retry_patience_s = RETRY_PATIENCE_S
        self.on_ready: Callable[[int, int], None] = lambda index, pid: None  # engine index, process id
        self.on_retry: Callable[[], None] = lambda: None
        for member in self._members:
            member.client.on_ready = partial(self._welcome, member)

    # State.

    @property
    def ready(self) -> bool:
        return any(member.client.ready for member in self._members)

    @property
    def unavailable_reason(self) -> str:
        return "" if self.ready else self._members[0].client.unavailable_reason

    @property
    def engines_ready(self) -> list[bool]:
        """Whether each engine gets requests."""
        usable = self._usable()
        return [member in usable for member in self._members]

    @property
    def num_ready(self) -> int:
        return len(self._usable())

    @property
    def revision(self) -> str:
        return self._usable()[0].client.revision if self.ready else ""

    @property
    def engine_settings(self) -> dict[str, Any]:
        return self._usable()[0].client.engine_settings if self.ready else {}

    @property
    def tokens_in_flight(self) -> list[int]:
        """Tokens that this process has in flight on each engine."""
        return [member.num_tokens + member.num_background_tokens for member in self._members]

    def stats(self) -> EngineStats:
        return EngineStats(sum(member.client.stats().num_requests for member in self._members))

    def start(self) -> None:
        for member in self._members:
            member.client.start()

    def close(self) -> None:
        self._is_closed = True
        for member in self._members:
            member.client.close()

    def _usable(self) -> list[_Member]:
        """The ready engines with the group's revision of the model. If no ready engine has it, the group
        switches to the revision of the first ready engine."""
        ready = [member for member in self._members if member.client.ready]
        usable = [member for member in ready if member.client.revision == self._revision]
        if ready and not usable:
            self._revision = ready[0].client.revision
            usable = [member for member in ready if member.client.revision == self._revision]
        return usable

    def _welcome(self, member: _Member, pid: int) -> None:
        """Use the settings of an engine that has become ready, and warn if it loaded another revision."""
        if member not in self._usable():
            log.warning(
                "engine %d of %s has loaded other files or settings than the engines that serve: it gets no "
                "requests until these are gone; restart the server to use the new files",
                *(member.index, self._name),
            )
        self._settings = member.client.engine_settings
        self._step_tokens = int(self._settings.get("max_num_batched_tokens", 1))
        self.on_ready(member.index, pid)

    # Choice.

    def _loads(self, tried: _Member | None = None, *, is_background: bool = False) -> list[float]:
        """Tokens ahead of a new request on each engine: those that this process has in flight, plus those
        that wait there from all processes. Background work yields to other work, so it counts only for
        background requests. Called for every request."""
        revision, asleep_tokens = self._revision, ASLEEP_STEPS * self._step_tokens
        loads = []
        for member in self._members:
            client = member.client
            if member is tried or not client.ready or client.revision != revision:
                loads.append(UNAVAILABLE)
            elif (status := member.status) is None:
                loads.append(float(member.num_tokens))
            else:
                loads.append(member.num_tokens + status.waiting_tokens(asleep_tokens))
        if is_background:
            pairs = zip(loads, self._members, strict=True)
            return [load + member.num_background_tokens for load, member in pairs]
        return loads

    def _choose(
        self,
        affinity: Affinity | None = None,
        tried: _Member | None = None,
        error: Exception | None = None,
        *,
        is_background: bool = False,
    ) -> _Member:
        """Choose the engine of a request, other than the engine already `tried`. If there is none, raise
        `error`."""
        slack, choose = self._step_tokens, self._balancer.choose
        if self._is_closed:
            raise error or EngineUnavailable(CLOSED)
        index = choose(self._loads(tried, is_background=is_background), affinity, slack_tokens=slack)
        if index is None and self._usable():  # `_usable` may have switched revisions
            index = choose(self._loads(tried, is_background=is_background), affinity, slack_tokens=slack)
        if index is not None:
            return self._members[index]
        if holding := [member for member in self._members if member.client.holds_requests]:
            return min(holding, key=lambda member: member.num_tokens)
        raise error or EngineUnavailable(self.unavailable_reason)

    def _affinity(self, request: Request) -> Affinity | None:
        return affinity_of(request, self._settings) if self.uses_affinity else None

    # Requests.

    async def run(self, request: Request) -> PooledOutput:
        if request.num_tokens >= SPLIT_STEPS * self._step_tokens and len(ranges := self._split(request)) > 1:
            return await self._run_parts(request, ranges)
        member = self._choose(self._affinity(request), is_background=request.is_background)
        return await self._run_twice(request, request.num_tokens, member, is_background=request.is_background)

    async def compare(self, comparison: Comparison) -> PooledOutput:
        num_vectors = len(comparison.queries) + len(comparison.documents)
        return await self._run_twice(comparison, num_vectors, self._choose())

    async def _run_twice(
        self, work: Request | Comparison, num_tokens: int, member: _Member, *, is_background: bool = False
    ) -> PooledOutput:
        """Run on an engine, and once more on another one if the first is lost."""
        member.count(num_tokens, is_background)
        try:
            return await _run_on(member, work)
        except EngineUnavailable as error:
            another = await self._another(member, error, is_background)
        finally:
            member.count(-num_tokens, is_background)
        self.on_retry()
        another.count(num_tokens, is_background)
        try:
            return await _run_on(another, work)
        finally:
            another.count(-num_tokens, is_background)

    async def _another(self, tried: _Member, error: EngineUnavailable, is_background: bool) -> _Member:
        """Choose another engine for a request whose engine is lost. If no other engine serves, wait up to
        `retry_patience_s` for the first that comes back, which may be the same one."""
        until_s = time.monotonic() + self.retry_patience_s
        excluded: _Member | None = tried
        while True:
            try:
                return self._choose(tried=excluded, error=error, is_background=is_background)
            except EngineUnavailable:
                if self._is_closed or time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(RETRY_POLL_S)
            excluded = None

    # Requests that are split.

    def _split(self, request: Request) -> list[tuple[_Member, int, int]]:
        """The parts of a large request, each with its engine, first row and end row. For requests with pairs,
        the row numbers count documents. Empty if the request is not split."""
        queries = request.num_queries
        query_tokens = int(request.lengths[:queries].sum())
        loads = self._loads(is_background=request.is_background)
        num_usable = len(loads) - loads.count(UNAVAILABLE)
        if num_usable < 2 or query_tokens * num_usable > MAX_QUERY_SHARE * request.num_tokens:
            return []
        shares = divide(loads, request.num_tokens - query_tokens, self._step_tokens)
        row_ends = cumulative(request.lengths[queries:])[1:]
        ends = np.searchsorted(row_ends, np.cumsum(shares), side="right").tolist()
        ranges, begin = [], 0
        for member, end, share in zip(self._members, ends, shares, strict=True):
            if share and end > begin:
                ranges.append((member, begin, end))
                begin = end
        if ranges:  # the last part takes the rows that rounding has left
            member, first, _ = ranges[-1]
            ranges[-1] = member, first, request.num_rows - queries
        return ranges

    async def _run_parts(self, request: Request, ranges: Sequence[tuple[_Member, int, int]]) -> PooledOutput:
        """Run each part of a request on its engine, and join the outputs."""
        revision = self.revision
        parts = [
            (member, _part(request, begin, end, number)) for number, (member, begin, end) in enumerate(ranges)
        ]
        tasks = [
            asyncio.ensure_future(
                self._run_twice(part, part.num_tokens, member, is_background=part.is_background)
            )
            for member, part in parts
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one has failed, others may still run
                task.cancel()
        if self.revision != revision:
            raise EngineUnavailable(MIXED)
        is_large = sum(output.values.nbytes for output in outputs) > MAX_LOOP_BYTES
        return await asyncio.to_thread(_join, request, outputs) if is_large else _join(request, outputs)

    # Streams.

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        stream = _GroupStream(self, request, listener)
        stream.begin(self._choose(self._affinity(request), is_background=request.is_background))
        return stream.end


class _GroupStream(StreamListener):
    """A stream that starts again on another engine if the first is lost before the first token."""

    def __init__(self, group: EngineGroup, request: Request, listener: StreamListener) -> None:
        self._group, self._request, self._listener = group, request, listener
        self._is_background = request.is_background
        self._has_token = self._is_retry = False
        self._member: _Member | None = None
        self._stop: Unsubscribe = lambda: None
        self._retry: asyncio.Future[None] | None = None  # the search for another engine
        max_tokens = 0 if request.sampling is None else request.sampling.max_tokens
        self._num_tokens = request.num_tokens + request.num_rows * min(max_tokens, MAX_COUNTED_OUTPUT)

    @property
    def finished(self) -> bool:
        return self._listener.finished

    def begin(self, member: _Member) -> None:
        self._stop = member.client.stream(self._request, self)
        self._member = member
        member.count(self._num_tokens, self._is_background)

    def end(self) -> None:
        """Stop listening. May be called more than once."""
        if self._member is not None:
            self._member.count(-self._num_tokens, self._is_background)
            self._member = None
        if self._retry is not None:
            self._retry.cancel()
        self._stop()

    def on_token(self, row: int, token_id: int) -> None:
        self._has_token = True
        self._listener.on_token(row, token_id)

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        self._has_token = True
        self._listener.on_tokens(parts)

    def on_error(self, error: PenstockError) -> None:
        if self._has_token or self._is_retry or not isinstance(error, EngineUnavailable):
            self._listener.on_error(error)
            return
        tried, self._is_retry = self._member, True
        self.end()
        assert tried is not None  # its client has just reported the error
        try:
            self._begin_again(
                self._group._choose(tried=tried, error=error, is_background=self._is_background)
            )
        except EngineUnavailable:
            self._retry = asyncio.ensure_future(self._wait_for_another(tried, error))
        except PenstockError as final:
            self._listener.on_error(final)

    async def _wait_for_another(self, tried: _Member, error: EngineUnavailable) -> None:
        try:
            self._begin_again(await self._group._another(tried, error, self._is_background))
        except PenstockError as final:
            self._listener.on_error(final)

    def _begin_again(self, member: _Member) -> None:
        self.begin(member)
        self._group.on_retry()


def _run_on(member: _Member, work: Request | Comparison) -> Awaitable[PooledOutput]:
    client = member.client
    return client.compare(work) if isinstance(work, Comparison) else client.run(work)


def _part(request: Request, begin: int, end: int, number: int) -> Request:
    """A part of a request: some of its rows or, if it has pairs, some documents and all queries."""
    rows: Ints = np.arange(begin, end, dtype=np.int32)
    if request.pairs is None:
        return select_rows(request, rows, f"{request.id}/{number}")
    queries = request.num_queries
    rows = np.concatenate([np.arange(queries, dtype=np.int32), queries + rows])
    return replace(select_rows(request, rows, f"{request.id}/{number}"), pairs=request.pairs[begin:end])


def _join(request: Request, outputs: Sequence[PooledOutput]) -> PooledOutput:
    """Join the outputs of a request's parts, which ran at the same time."""
    timings = Timings(
        max(output.timings.queue_s for output in outputs), max(output.timings.device_s for output in outputs)
    )
    columns = zip(*((output.values, *output.extra_values) for output in outputs), strict=True)
    values, *extra = [_concatenate(column) for column in columns]
    return PooledOutput(request.id, values, timings, tuple(extra))


def _concatenate(parts: Sequence[Array]) -> Array:
    """Concatenate rows. Sparse outputs are padded, because parts may differ in their number of terms."""
    if parts[0].ndim == 3:
        most = max(part.shape[1] for part in parts)
        parts = [_with_terms(part, most) for part in parts]
    return np.concatenate(parts)


def _with_terms(part: Array, num_terms: int) -> Array:
    missing = num_terms - part.shape[1]
    if not missing:
        return part
    padding = np.zeros((len(part), missing, 2), dtype=part.dtype)
    padding[..., 0] = -1
    return np.concatenate([part, padding], axis=1)
