"""The result cache: answers rows that were computed before without the engine.

The key of a row covers its content, the request's parameters and the revision of the loaded model. Values are
the bytes that the engine returned, so a reply from the cache equals the first one. Only pooling results of
single rows are cached: no generated text, and no scores that depend on two rows.
"""

from __future__ import annotations

import enum
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from penstock.api.cache_metrics import BYTES, EVICTIONS, HITS, LOOKUPS
from penstock.api.cached_rows import CachedModel, CachedRow, join_rows, off_loop, row_digests, split_output
from penstock.api.redis_cache import MAX_PENDING_BYTES, RedisStore
from penstock.config import ServerConfig
from penstock.content import select_rows
from penstock.tasks.run import Scheduling, submit
from penstock.types import PooledOutput, Request, Timings

SECRET_VARIABLE = "PENSTOCK_RESULT_CACHE_SECRET"
ENTRY_BYTES = 440  # overhead of an entry: key, tuples, place in the table
MAX_LOOP_ROWS = 128  # more rows are hashed and copied on another thread
MAX_LOOP_BYTES = 1 << 18


class CacheControl(enum.IntEnum):
    """A request's cache options."""

    DEFAULT = 0
    NO_CACHE = 1  # compute all rows, and keep them
    NO_STORE = 2  # neither look up nor keep


def cache_control_of(header: bytes) -> CacheControl:
    """The meaning of a Cache-Control header. Directives for other caches are ignored."""
    directives = {each.strip() for each in header.lower().split(b",")}
    if b"no-store" in directives:
        return CacheControl.NO_STORE
    return CacheControl.NO_CACHE if directives & {b"no-cache", b"max-age=0"} else CacheControl.DEFAULT


class CacheUser(Protocol):
    """The call that a request belongs to."""

    cache_control: CacheControl
    num_cached_rows: int | None  # of all its requests; None: the cache was not used


class _Entry(msgspec.Struct, gc=False):
    row: CachedRow
    num_bytes: int
    expires_s: float


class MemoryStore:
    """Rows in memory, within a number of bytes. The least recently used row is evicted first."""

    def __init__(
        self, max_bytes: int, ttl_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_evicted = 0
        self._lifetime_s = ttl_s or float("inf")
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, keys: Iterable[bytes]) -> list[CachedRow | None]:
        now_s = self._clock()
        return [self._get(key, now_s) for key in keys]

    def _get(self, key: bytes, now_s: float) -> CachedRow | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_s <= now_s:
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry.row

    def put(self, keys: Iterable[bytes], rows: Iterable[CachedRow]) -> None:
        expires_s = self._clock() + self._lifetime_s
        for key, row in zip(keys, rows, strict=True):
            if key in self._entries:
                self._remove(key)
            size = row.num_bytes + ENTRY_BYTES
            if size <= self.max_bytes:
                self._make_room(size)
                self._entries[key] = _Entry(row, size, expires_s)
                self.num_bytes += size

    def _make_room(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self.num_evicted += 1

    def _remove(self, key: bytes) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes


class ResultCache:
    """The stores of one API process, in front of all its engines."""

    def __init__(self, memory: MemoryStore | None, redis: RedisStore | None, secret: bytes = b"") -> None:
        self.memory = memory
        self.redis = redis
        self._secret = secret
        # A larger output would only evict itself.
        self._max_kept_bytes = max(
            0 if memory is None else memory.max_bytes, 0 if redis is None else MAX_PENDING_BYTES
        )

    @classmethod
    def of(cls, config: ServerConfig) -> ResultCache | None:
        """The cache that a server is configured to have; None: it has none."""
        if not config.result_cache_mb and config.result_cache_redis is None:
            return None
        ttl_s, secret = config.result_cache_ttl_s, os.environ.get(SECRET_VARIABLE, "").encode()
        secret = secret and hashlib.blake2b(secret).digest()  # keys of blake2b have at most 64 bytes
        memory = MemoryStore(config.result_cache_mb << 20, ttl_s) if config.result_cache_mb else None
        redis = None
        if config.result_cache_redis is not None:
            redis = RedisStore(config.result_cache_redis, ttl_s, secret)
        return cls(memory, redis, secret)

    async def answer(
        self, user: CacheUser, model: CachedModel, request: Request, scheduling: Scheduling
    ) -> PooledOutput:
        """The output of a request: cached rows from the cache, the others from the engine."""
        engine, revision = model.engine, model.engine.revision
        if not revision or request.pairs is not None or user.cache_control is CacheControl.NO_STORE:
            return await submit(engine, request, scheduling)
        is_large = request.num_rows > MAX_LOOP_ROWS or request.token_ids.nbytes > MAX_LOOP_BYTES
        keys = await off_loop(is_large, row_digests, request, self._secret)
        if model.adapter is not None:  # ids of adapters are meaningful in one server only
            keys = [model.adapter.digest + key for key in keys]
        lookup = _Lookup(model, revision, request, keys)
        rows: list[CachedRow | None] = [None] * len(keys)
        if user.cache_control is CacheControl.DEFAULT:
            rows = await self._find(lookup)
        num_found = len(rows) - rows.count(None)
        output = await self._complete(lookup, rows, scheduling) if num_found else None
        if output is None:
            num_found, output = 0, await self._compute(lookup, scheduling)
        user.num_cached_rows = (user.num_cached_rows or 0) + num_found
        return output

    async def close(self) -> None:
        if self.redis is not None:
            await self.redis.close()

    async def _find(self, lookup: _Lookup) -> list[CachedRow | None]:
        """The rows that a store has, all of one layout."""
        name = lookup.model.spec.name
        LOOKUPS.labels(name).inc(len(lookup.keys))
        rows: list[CachedRow | None] = [None] * len(lookup.keys)
        if self.memory is not None:
            rows = self.memory.get(lookup.memory_keys)
            if num_found := len(rows) - rows.count(None):
                HITS.labels(name, "memory").inc(num_found)
        if self.redis is not None and None in rows:
            missing = [number for number, row in enumerate(rows) if row is None]
            found = await self.redis.find(lookup.model, lookup.revision, lookup.request, lookup.keys, missing)
            if found:
                HITS.labels(name, "redis").inc(len(found))
                for number, row in found.items():
                    rows[number] = row
                self._remember([lookup.memory_keys[number] for number in found], list(found.values()))
        layout = next((row.layout for row in rows if row is not None), None)
        return [row if row is not None and row.layout == layout else None for row in rows]

    async def _compute(self, lookup: _Lookup, scheduling: Scheduling) -> PooledOutput:
        """The output of a request, from the engine. Its rows are kept."""
        output = await submit(lookup.model.engine, lookup.request, scheduling)
        if _output_bytes(output) <= self._max_kept_bytes:
            rows = await _split(lookup.request, output)
            if rows is not None:
                self._keep(lookup, range(len(rows)), rows)
        return output

    async def _complete(
        self, lookup: _Lookup, rows: list[CachedRow | None], scheduling: Scheduling
    ) -> PooledOutput | None:
        """The output of a request with some or all rows cached. Only the missing rows run. None if the cached
        rows cannot be used."""
        engine, request = lookup.model.engine, lookup.request
        missing = [number for number, row in enumerate(rows) if row is None]
        if not missing:
            return await _join(request, rows, Timings())
        if engine.revision != lookup.revision:  # another model was loaded meanwhile
            return None
        job = select_rows(request, np.array(missing, dtype=np.int32), request.id)
        output = await submit(engine, job, scheduling)
        computed = await _split(job, output)
        layout = next(row.layout for row in rows if row is not None)
        if computed is None or computed[0].layout != layout:  # the cached rows are no results of this model
            return None
        self._keep(lookup, missing, computed)
        for number, row in zip(missing, computed, strict=True):
            rows[number] = row
        return await _join(request, rows, output.timings)

    def _keep(self, lookup: _Lookup, numbers: Sequence[int], rows: Sequence[CachedRow]) -> None:
        """Put computed rows into the stores, unless another model was loaded meanwhile."""
        if lookup.model.engine.revision != lookup.revision:
            return
        self._remember([lookup.memory_keys[number] for number in numbers], rows)
        if self.redis is not None:
            keys = [lookup.keys[number] for number in numbers]
            self.redis.put(lookup.model, lookup.revision, keys, rows)

    def _remember(self, keys: Sequence[bytes], rows: Sequence[CachedRow]) -> None:
        if (memory := self.memory) is None:
            return
        evicted = memory.num_evicted
        memory.put(keys, rows)
        BYTES.set(memory.num_bytes)
        if memory.num_evicted > evicted:
            EVICTIONS.inc(memory.num_evicted - evicted)


class _Lookup:
    """A request, and the keys of its rows."""

    __slots__ = ("keys", "memory_keys", "model", "request", "revision")

    def __init__(self, model: CachedModel, revision: str, request: Request, keys: list[bytes]) -> None:
        self.model = model
        self.revision = revision
        self.request = request
        self.keys = keys  # without the model
        loaded = revision.encode()
        self.memory_keys = [loaded + key for key in keys]


async def _split(request: Request, output: PooledOutput) -> list[CachedRow] | None:
    is_large = _is_large(request.num_rows, _output_bytes(output))
    return await off_loop(is_large, split_output, request, output)


async def _join(request: Request, rows: Sequence[CachedRow | None], timings: Timings) -> PooledOutput:
    whole = [row for row in rows if row is not None]
    is_large = _is_large(len(whole), sum(row.num_bytes for row in whole))
    return await off_loop(is_large, join_rows, request, whole, timings)


def _output_bytes(output: PooledOutput) -> int:
    return output.values.nbytes + sum(array.nbytes for array in output.extra_values)


def _is_large(num_rows: int, num_bytes: int) -> bool:
    return num_rows > 8 * MAX_LOOP_ROWS or num_bytes > 8 * MAX_LOOP_BYTES
