"""The engine's status: a page of memory that the engine writes and every process of the server reads.

Reading it costs no message and needs no answer from the engine, so it also works while the engine is busy or
hangs. Each value is one aligned machine word: a reader never sees half of a value, but two values may have
been written at different moments. Times are on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.backlog import Backlog
from penstock.types import EngineSleep as EngineSleep  # re-exported for readers of the page


class EngineStatus(NamedTuple):  # created very often, so it has to be cheap
    """The values of the page. A new engine process starts with zeros."""

    pid: int = 0  # process id of the engine that serves; 0: none has served yet
    heartbeat_s: float = 0.0  # last iteration of the engine's loop
    launch_began_s: float = 0.0  # start of the launch that the loop is in; 0: it launches no step
    step_began_s: float = 0.0  # launch of the oldest step in flight; 0: no step is in flight
    queued_tokens: int = 0
    queued_rows: int = 0
    tokens_per_s: float = 0.0  # recent rate at which steps finish tokens; 0: not measured yet
    queued_large_tokens: int = 0  # the part of `queued_tokens` in requests that run over several steps
    queued_prompt_tokens: int = 0  # tokens of prompts that wait to generate
    prompt_tokens_per_s: float = 0.0  # recent rate at which prompts begin to generate; 0: not measured yet
    small_weight: float = 0.0  # total weight of the clients with waiting small requests
    large_weight: float = 0.0  # total weight of the clients with waiting large requests
    prompt_weight: float = 0.0  # total weight of the clients with waiting prompts
    state: int = EngineSleep.AWAKE  # an `EngineSleep`
    last_request_s: float = 0.0  # last arrival or answer of a request; initially, when serving began
    device_bytes: int = 0  # device memory that the model uses while awake, and frees when it sleeps
    adapters_on_host: int = 0  # LoRA adapters in host memory
    adapters_on_device: int = 0
    adapter_host_loads: int = 0  # adapter reads from files since the engine started
    adapter_device_loads: int = 0  # adapter copies to the device since the engine started

    @property
    def sleep_state(self) -> EngineSleep:
        return EngineSleep(self.state)

    @property
    def backlog(self) -> Backlog:
        """The waiting pooling requests."""
        small = self.queued_tokens - self.queued_large_tokens
        weights = self.small_weight, self.large_weight
        return Backlog(small, self.queued_large_tokens, self.tokens_per_s, *weights)

    @property
    def prompt_backlog(self) -> Backlog:
        """The prompts that wait to generate."""
        return Backlog(self.queued_prompt_tokens, 0, self.prompt_tokens_per_s, self.prompt_weight, 0.0)


_FIELDS = EngineStatus._fields
_IS_INT = tuple(isinstance(value, int) for value in EngineStatus())
_SIZE = 8 * len(_FIELDS)
_AFTER_PID = struct.Struct(f"{len(_FIELDS) - 1}d")
_STATE, _LAUNCH_BEGAN_S = map(_FIELDS.index, ("state", "launch_began_s"))
_QUEUED_TOKENS, _QUEUED_PROMPT_TOKENS = map(_FIELDS.index, ("queued_tokens", "queued_prompt_tokens"))


class StatusWriter:
    """The engine's side."""

    def __init__(self, path: Path) -> None:
        self._values = _map(path, writable=True)
        self._values[:] = 0.0
        self._doubles: Any = self._values.data  # writes one value faster than NumPy does

    def publish(self, status: EngineStatus) -> None:
        """Write every value. The process id is last, so that readers do not take an earlier engine's values
        for those of this one."""
        _AFTER_PID.pack_into(self._values.data, 8, *status[1:])
        self._values[0] = status.pid

    def launching(self, began_s: float) -> None:
        """Record when the loop began to launch a step; 0: the launch has ended."""
        self._doubles[_LAUNCH_BEGAN_S] = began_s


class StatusPage(Protocol):
    """The status of one engine, or of several engines combined."""

    def read(self) -> EngineStatus: ...

    @property
    def has_backlog(self) -> bool:
        """Whether a request that arrives now would wait for others."""


class StatusReader(StatusPage):
    """The side of the supervisor and the API processes. A restarted engine writes to the same page."""

    def __init__(self, path: Path) -> None:
        self._values = _map(path, writable=False)
        self._doubles: Any = self._values.data  # reads one value faster than NumPy does

    def read(self) -> EngineStatus:
        values: list[Any] = [
            int(value) if is_int else value
            for value, is_int in zip(self._values.tolist(), _IS_INT, strict=True)
        ]
        return EngineStatus(*values)

    @property
    def has_served(self) -> bool:
        """Whether an engine has begun to serve."""
        return bool(self._doubles[0])

    @property
    def has_backlog(self) -> bool:
        """Whether any tokens are waiting; much cheaper than `read`."""
        values = self._doubles
        return bool(values[_QUEUED_TOKENS] or values[_QUEUED_PROMPT_TOKENS])

    def waiting_tokens(self, asleep_tokens: int) -> float:
        """Waiting tokens of all kinds, plus `asleep_tokens` if the engine is not awake. As cheap as
        `has_backlog`."""
        values = self._doubles
        tokens: float = values[_QUEUED_TOKENS] + values[_QUEUED_PROMPT_TOKENS]
        return tokens + asleep_tokens if values[_STATE] else tokens  # 0: awake


class GroupStatus(StatusPage):
    """The pages of several engines of one model, read as one."""

    def __init__(self, readers: Sequence[StatusReader], are_ready: Callable[[], Sequence[bool]]) -> None:
        """`are_ready` returns whether each engine gets requests."""
        self._readers = readers
        self._are_ready = are_ready

    def _used(self) -> list[StatusReader]:
        used = [reader for reader, is_ready in zip(self._readers, self._are_ready(), strict=True) if is_ready]
        return used or list(self._readers)

    @property
    def has_backlog(self) -> bool:
        return all(reader.has_backlog for reader in self._used())

    def read(self) -> EngineStatus:
        """The combined waiting work and rates of all engines that get requests."""
        pages = [reader.read() for reader in self._used()]
        columns = {name: [getattr(page, name) for page in pages] for name in (*_SUMMED, *_RATES)}
        totals: dict[str, Any] = {name: sum(columns[name]) for name in _SUMMED}
        totals |= {name: _total_rate(columns[name]) for name in _RATES}
        states = {page.sleep_state for page in pages}
        return EngineStatus(
            pid=pages[0].pid,
            heartbeat_s=max(page.heartbeat_s for page in pages),
            state=next(state for state in _MOST_AWAKE_FIRST if state in states),
            last_request_s=max(page.last_request_s for page in pages),
            **totals,
        )


_SUMMED = (
    *("queued_tokens", "queued_rows", "queued_large_tokens", "queued_prompt_tokens", "device_bytes"),
    *("small_weight", "large_weight", "prompt_weight"),
    *("adapters_on_host", "adapters_on_device", "adapter_host_loads", "adapter_device_loads"),
)
_RATES = ("tokens_per_s", "prompt_tokens_per_s")
_MOST_AWAKE_FIRST = (
    EngineSleep.AWAKE,
    EngineSleep.WAKING,
    EngineSleep.FALLING_ASLEEP,
    EngineSleep.ASLEEP,
)


def _total_rate(rates: Sequence[float]) -> float:
    """The total rate of all engines. An engine without a measured rate counts with the others' average."""
    known = [rate for rate in rates if rate]
    return sum(known) / len(known) * len(rates) if known else 0.0


def create_status_page(path: Path) -> None:
    """Create the page before any process maps it; only this user can open it."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def _map(path: Path, *, writable: bool) -> NDArray[np.float64]:
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(descriptor, _SIZE, access=access), dtype=np.float64)
    finally:
        os.close(descriptor)
