"""Limits of one API key: concurrent requests and tokens per second. They hold for all API processes together.

Each limited key has a small file in the runtime folder, which every API process maps into memory. The
first word is the state of the key's token bucket. Each process has its own word for its requests in flight.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import time
from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any

from penstock.errors import KeyLimitReached

BURST_S = 5.0  # an idle key may use this many seconds of its rate at once
_LOCK_TRIES = 1000  # a process that is suspended while it holds the lock must not block the others
_BUCKET = 0  # index of the bucket's word; the words of the processes follow


class CounterFolder:
    """Opens the counters of keys. Without a folder, they are local to this process."""

    def __init__(self, folder: Path | None = None, index: int = 0, num_processes: int = 1) -> None:
        """`index` is the number of this process among the API processes of the server."""
        self._folder = folder
        self._own: dict[str, MutableSequence[float]] = {}
        self._num_words = 1 + max(num_processes, index + 1)
        self.word = 1 + index  # index of this process's word
        self._lock = -1
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def open(self, name: str) -> MutableSequence[float]:
        """The counters of the key with this name. Repeated calls return the same memory."""
        if (words := self._own.get(name)) is None:
            words = [0.0] * self._num_words if self._folder is None else self._map(self._folder, name)
            words[self.word] = 0.0  # requests of this process's predecessor have ended
            self._own[name] = words
        return words

    def _map(self, folder: Path, name: str) -> Any:
        path = folder / hashlib.sha256(name.encode()).hexdigest()[:32]
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, 8 * self._num_words)  # keeps what another process has written
            return memoryview(mmap.mmap(descriptor, 8 * self._num_words)).cast("d")
        finally:
            os.close(descriptor)

    def lock(self) -> bool:
        """Lock the buckets. False if another process does not release the lock: go on without it."""
        if self._lock < 0:
            return False
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                os.sched_yield()
        return False

    def unlock(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)


class KeyLimits:
    """The limits of one key, and how much of them is in use."""

    __slots__ = ("_clock", "_folder", "_max_requests", "_name", "_rate", "_words")

    def __init__(
        self,
        name: str,
        folder: CounterFolder,
        max_requests: int | None,
        tokens_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,  # the same for all processes of a machine
    ) -> None:
        self._name = name
        self._folder = folder
        self._words = folder.open(name)
        self._max_requests = max_requests
        self._rate = tokens_per_s
        self._clock = clock

    @property
    def num_in_flight(self) -> int:
        return int(sum(self._words[_BUCKET + 1 :]))

    def check(self) -> None:
        """Refuse a request before its body is read, if the key is at a limit already."""
        if self._max_requests is not None and self.num_in_flight >= self._max_requests:
            raise self._too_many()
        if self._rate is not None and (debt_s := -self._level_s()) > 0:
            raise self._too_fast(debt_s)

    def enter(self) -> None:
        """Count a request until `leave`. Needs no lock: only this process writes its word, and it counts the
        request before it checks the limit."""
        word = self._folder.word
        self._words[word] += 1
        if self._max_requests is not None and self.num_in_flight > self._max_requests:
            self._words[word] -= 1
            raise self._too_many()

    def leave(self) -> None:
        self._words[self._folder.word] -= 1

    def take(self, num_tokens: int) -> None:
        """Take tokens out of the bucket, or refuse the request. A request with more tokens than the bucket
        holds needs a full bucket, and delays later requests by what is missing."""
        if self._rate is None:
            return
        is_locked = self._folder.lock()
        try:
            cost_s, level_s = num_tokens / self._rate, self._level_s()
            missing_s = min(cost_s, BURST_S) - level_s
            if missing_s > 0:
                raise self._too_fast(missing_s, num_tokens)
            self._words[_BUCKET] = self._clock() - level_s + cost_s
        finally:
            if is_locked:
                self._folder.unlock()

    def owe(self, num_tokens: int) -> None:
        """Take tokens that were already computed, even if the bucket does not hold them."""
        if self._rate is None or not num_tokens:
            return
        is_locked = self._folder.lock()
        try:
            self._words[_BUCKET] = self._clock() - self._level_s() + num_tokens / self._rate
        finally:
            if is_locked:
                self._folder.unlock()

    def _level_s(self) -> float:
        """The level of the bucket, in seconds of the key's rate. Its word is the time when it was empty."""
        return min(BURST_S, self._clock() - self._words[_BUCKET])

    def _too_many(self) -> KeyLimitReached:
        return KeyLimitReached(
            f"key {self._name} has {self._max_requests} requests in flight, which is its limit "
            "(max_concurrent_requests); try again shortly"
        )

    def _too_fast(self, missing_s: float, num_tokens: int | None = None) -> KeyLimitReached:
        of_request = "" if num_tokens is None else f"; this request has {num_tokens}"
        wait_s = max(1, math.ceil(missing_s))
        error = KeyLimitReached(
            f"key {self._name} has used its {self._rate:g} tokens per second "
            f"(max_tokens_per_second){of_request}; try again in {wait_s} s"
        )
        error.reason = "key_tokens"
        error.retry_after_s = wait_s
        return error
