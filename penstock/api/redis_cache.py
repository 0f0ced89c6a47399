"""Rows of the result cache in Redis, which several processes and machines share.

Redis delays a request by `LOOKUP_TIMEOUT_S` at most, and never makes one fail. After a few consecutive
failures it is not used for a while. Rows from Redis are verified before they are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.api.cache_metrics import ERRORS
from penstock.api.cached_rows import (
    CachedModel,
    CachedRow,
    are_finite,
    decode_row,
    encode_row,
    fits,
    off_loop,
)
from penstock.checkpoint.revision import portable_revision
from penstock.checkpoint.spec import ModelSpec
from penstock.types import MAX_TERMS, PoolingParams, Request, Task

log = logging.getLogger("penstock.api")
PASSWORD_VARIABLE = "PENSTOCK_REDIS_PASSWORD"
LOOKUP_TIMEOUT_S = 0.05
WRITE_TIMEOUT_S = 1.0
MAX_FAILURES = 3  # consecutive
PAUSE_S = 5.0  # after that many failures
MAX_READ_ROWS = 4096  # rows that one command reads
MAX_READ_BYTES = 1 << 24  # of one request; a larger result takes longer to read than to compute
MAX_ROW_BYTES = 1 << 20
MAX_PENDING_BYTES = 1 << 25  # of rows waiting to be written
WRITE_ROWS = 64  # in one round trip
MAX_LOOP_ROWS = 64  # more are decoded on another thread
MAX_REVISIONS = 256
_PREFIX = b"penstock:rows:"


class CircuitBreaker:
    """Stops the use of a store for a while after consecutive failures."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._closed_again_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the store is not used at present."""
        return self._clock() < self._closed_again_s

    def on_success(self) -> None:
        if self._num_failures >= MAX_FAILURES:
            log.warning("Redis answers again")
        self._num_failures = 0

    def on_failure(self, error: BaseException) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            if self._num_failures == MAX_FAILURES:
                log.warning(
                    "Redis fails (%s): the result cache tries it every %g s", _in_words(error), PAUSE_S
                )
            self._closed_again_s = self._clock() + PAUSE_S


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200].rstrip(": ")


class PortableRevisions:
    """The portable revisions of loaded models. Each is computed on a thread, because that takes long."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()  # by loaded revision; "": not known
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = threading.Event()

    def get(self, model: CachedModel, loaded: str) -> str:
        """The portable revision; "" until it is known."""
        if loaded not in self._known:
            self._known[loaded] = ""
            while len(self._known) > MAX_REVISIONS:
                self._known.popitem(last=False)
            task = asyncio.ensure_future(self._compute(model, loaded))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._known[loaded]

    async def _compute(self, model: CachedModel, loaded: str) -> None:
        settings = model.engine.engine_settings
        found = await asyncio.to_thread(portable_revision, model.spec, settings, loaded, self._stopped.is_set)
        self._known[loaded] = found
        if not found and not self._stopped.is_set():
            log.warning(
                "the files of %s cannot be read or have changed since they were loaded: its results are not "
                "kept in Redis",
                model.spec.name,
            )

    async def settled(self) -> None:
        """Wait until the requested revisions are known."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class RedisStore:
    """Rows in Redis. All methods are called on the event loop."""

    def __init__(self, url: str, ttl_s: float = 0.0, secret: bytes = b"") -> None:
        self.breaker = CircuitBreaker()
        self.revisions = PortableRevisions()
        self._url = url
        self._ttl_ms = int(ttl_s * 1000) or None
        self._secret = secret
        self._client: Any = None
        self._waiting: deque[tuple[list[bytes], asyncio.Future[list[bytes | None]]]] = deque()
        self._pending: deque[tuple[bytes, CachedRow]] = deque()
        self._pending_bytes = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    async def find(
        self, model: CachedModel, loaded: str, request: Request, keys: Sequence[bytes], wanted: Sequence[int]
    ) -> dict[int, CachedRow]:
        """The wanted rows of a request that Redis has, by row number."""
        revision = self.revisions.get(model, loaded)
        if not revision or self.breaker.is_open or _result_bytes(model, request) > MAX_READ_BYTES:
            return {}
        names = {number: self._name(revision, keys[number]) for number in wanted}
        stored = await self._read(list(names.values()))
        found = {
            number: value for number, value in zip(names, stored, strict=True) if isinstance(value, bytes)
        }
        if not found:
            return {}
        is_large = len(found) > MAX_LOOP_ROWS
        rows = await off_loop(is_large, self._decode, found, names, request, model.spec.embed_dim)
        if len(rows) < len(found):
            ERRORS.labels("redis", "damaged").inc(len(found) - len(rows))
        return rows

    def put(self, model: CachedModel, loaded: str, keys: Sequence[bytes], rows: Sequence[CachedRow]) -> None:
        """Queue rows to be written. Rows are dropped if Redis is too slow."""
        revision = self.revisions.get(model, loaded)
        if not revision or self.breaker.is_open:
            return
        num_dropped = 0
        for key, row in zip(keys, rows, strict=True):
            size = row.num_bytes
            if size > MAX_ROW_BYTES:
                continue
            if self._pending_bytes + size > MAX_PENDING_BYTES:
                num_dropped += 1
                continue
            self._pending_bytes += size
            self._pending.append((self._name(revision, key), row))
        if num_dropped:
            ERRORS.labels("redis", "not_written").inc(num_dropped)
        if self._writer is None and self._pending:
            self._writer = asyncio.ensure_future(self._write_pending())

    async def settled(self) -> None:
        """Wait until all queued rows are written."""
        await self.revisions.settled()
        while self._writer is not None:
            await asyncio.wait([self._writer])

    async def close(self) -> None:
        await self.revisions.close()
        tasks = [task for task in (self._reader, self._writer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            with contextlib.suppress(Exception):
                await self._client.aclose()

    @staticmethod
    def _name(revision: str, key: bytes) -> bytes:
        return b"%s%s:%s" % (_PREFIX, revision.encode(), key)

    def _decode(
        self, stored: dict[int, bytes], names: dict[int, bytes], request: Request, embed_dim: int
    ) -> dict[int, CachedRow]:
        """The rows that are intact and may be results of this request. Empty if they differ in layout."""
        all_params, lengths = request.all_params, request.lengths.tolist()
        rows = {}
        for number, value in stored.items():
            row = decode_row(value, names[number], self._secret)
            if row is not None and fits(row, all_params, lengths[number], embed_dim):
                rows[number] = row
        layouts = {row.layout for row in rows.values()}
        return rows if len(layouts) == 1 and are_finite(list(rows.values())) else {}

    async def _read(self, names: list[bytes]) -> list[bytes | None]:
        """The values of these names; None if Redis does not have a value or is too slow."""
        future: asyncio.Future[list[bytes | None]] = asyncio.get_running_loop().create_future()
        self._waiting.append((names, future))
        if self._reader is None:
            self._reader = asyncio.ensure_future(self._read_waiting())
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await future
        except TimeoutError:
            ERRORS.labels("redis", "timeout").inc()
            return [None] * len(names)

    async def _read_waiting(self) -> None:
        """Read what all current requests wait for, with one command for many of them."""
        try:
            while self._waiting:
                batch = [self._waiting.popleft()]
                num_names = len(batch[0][0])
                while self._waiting and num_names + len(self._waiting[0][0]) <= MAX_READ_ROWS:
                    batch.append(self._waiting.popleft())
                    num_names += len(batch[-1][0])
                values = await self._mget([name for names, _ in batch for name in names])
                for names, future in batch:
                    if not future.done():
                        future.set_result(values[: len(names)])
                    values = values[len(names) :]
        finally:
            self._reader = None

    async def _mget(self, names: list[bytes]) -> list[bytes | None]:
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                values: list[bytes | None] = await self._connected().mget(names)
        except TimeoutError as error:  # each waiting request counts it
            self.breaker.on_failure(error)
            return [None] * len(names)
        except Exception as error:
            self._fail(error, "connection")
            return [None] * len(names)
        self.breaker.on_success()
        return values if len(values) == len(names) else [None] * len(names)

    async def _write_pending(self) -> None:
        try:
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(WRITE_ROWS, len(self._pending)))]
                self._pending_bytes -= sum(row.num_bytes for _, row in batch)
                if not self.breaker.is_open:
                    await self._write(batch)
        finally:
            self._writer = None

    async def _write(self, batch: Sequence[tuple[bytes, CachedRow]]) -> None:
        try:
            async with (
                asyncio.timeout(WRITE_TIMEOUT_S),
                self._connected().pipeline(transaction=False) as pipe,
            ):
                for name, row in batch:
                    pipe.set(name, encode_row(row, name, self._secret), px=self._ttl_ms)
                await pipe.execute()
        except Exception as error:
            self._fail(error, "timeout" if isinstance(error, TimeoutError) else "connection")
            ERRORS.labels("redis", "not_written").inc(len(batch))

    def _fail(self, error: BaseException, reason: str) -> None:
        ERRORS.labels("redis", reason).inc()
        self.breaker.on_failure(error)

    def _connected(self) -> Any:
        """The client, which connects when needed."""
        if self._client is None:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff

            password = os.environ.get(PASSWORD_VARIABLE)
            options: dict[str, Any] = {"password": password} if password else {}
            self._client = Redis.from_url(
                self._url,
                socket_connect_timeout=WRITE_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=4,
                **options,
            )
        return self._client


def _result_bytes(model: CachedModel, request: Request) -> int:
    """The approximate size of a request's result."""
    total = 0
    for params in request.all_params:
        count = request.num_tokens if params.per_token else request.num_rows
        total += count * 4 * max(1, params.num_labels) * _width(model.spec, params)
    return total


def _width(spec: ModelSpec, params: PoolingParams) -> int:
    if params.task is Task.SPARSE and not params.lexical:
        return 2 * (params.top_k or MAX_TERMS)
    return params.dimensions or spec.width(params.task)
