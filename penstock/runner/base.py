"""The interface between the engine loop and a runner. It imports no torch, so the null runner needs none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import ModelNotFound, NotPossible
from penstock.types import Array, Comparison, Ints, PoolPlan, StepPlan, StepResult

BLOCK_SIZE = 16  # tokens of a block of the KV cache
LATE_VECTORS = 1 << 16  # capacity for token vectors of queries, in the store that scores read


class Runner(Protocol):
    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step. The future completes on another thread when its result can be read.

        A `PoolPlan` gives a `PooledResult`, a `GeneratePlan` a `SampledResult`. Steps complete in the order
        of their launch. A result's arrays are valid until `pipeline_depth` further steps have been launched.
        A failed step raises from the future.
        """
        ...

    def compare(self, comparison: Comparison) -> Future[Array]:
        """Score vectors that the caller supplies, independently of steps. Returns fp32 [documents, 1].

        It runs in parts between steps. Cancelling the future ends it after the current part. The engine
        starts the next comparison when this one is done or cancelled.
        """
        ...

    def close(self) -> None: ...


class DraftRunner(NamedTuple):
    """A runner of a draft model, whose KV cache has the same blocks as that of the engine's model."""

    runner: Runner
    name: str
    vocab_size: int
    max_length: int  # maximum sequence length in tokens
    padding_slot: int  # slot of its sampler whose samples are discarded


class BackgroundSteps(Protocol):
    """Runs one background step at a time. The runner's other steps interrupt it and finish first."""

    def launch(self, plan: PoolPlan) -> Future[StepResult]:
        """Start a step that neither reads nor writes caches."""
        ...

    def hold(self) -> None:
        """Pause the step soon, until `release`: other steps are running or about to be launched."""
        ...

    def release(self) -> None: ...

    def advance(self) -> None:
        """Let a held step do a small part of its work."""
        ...


class IdleWork(Protocol):
    """Work that a runner does while the engine is idle, to make later steps faster."""

    @property
    def min_idle_s(self) -> float | None:
        """Required idle time before `run_idle`; None: there is no work."""
        ...

    def run_idle(self) -> None:
        """Do one short piece of work. No step may be in flight."""
        ...


class AdapterInfo(NamedTuple):
    """Figures of a loaded adapter."""

    rank: int  # the largest rank of its modules
    kinds: tuple[str, ...]  # last name parts of the modules that it changes, sorted
    num_bytes: int  # in host memory


class AdapterStats(NamedTuple):
    """The adapters of an engine, for metrics."""

    num_loaded: int  # adapters that requests may choose
    num_on_host: int
    num_on_device: int
    num_host_loads: int  # read from disk, since the start
    num_device_loads: int  # copied to the device, since the start


class AdapterStore(Protocol):
    """The adapters that requests may choose: on disk, in host memory and on the device.

    Ids are never reused. The checkpoint's own adapters have the first ids and are always available.
    """

    max_adapters: int  # different adapters in one step
    in_use: Callable[[], Collection[int]]  # adapters of requests that have not finished

    def load(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        """Check the adapter and read it into host memory on another thread. The future raises a
        `PenstockError` if it does not fit the model."""
        ...

    def unload(self, adapter_id: int) -> None:
        """Refuse new requests for an adapter. It stays in memory while `in_use` contains it."""
        ...

    def check(self, adapter_ids: Ints) -> None:
        """Raise `ModelNotFound` for an adapter that is not loaded (-1: none), `NotPossible` for too many."""
        ...

    def prefetch(self, adapter_ids: Ints) -> list[Future[Any]]:
        """Start reading the adapters that are only on disk. Empty if all are in memory."""
        ...

    def stats(self) -> AdapterStats: ...


def check_adapters(adapter_ids: Ints, known: Collection[int], max_adapters: int) -> None:
    """Raise `ModelNotFound` if an adapter is not in `known`, `NotPossible` if there are too many."""
    wanted = set(np.unique(adapter_ids).tolist()) - {-1}
    if unknown := wanted.difference(known):
        raise ModelNotFound(f"adapter {min(unknown)} is not loaded", param="adapter")
    if len(wanted) > max_adapters:
        raise NotPossible(
            f"a request has {len(wanted)} different adapters; at most {max_adapters} run at once",
            param="adapter",
        )


SLEEP_LEVELS = (1, 2)  # 1: weights are kept in host memory; 2: they are read from their files again
MakeRoom = Callable[[int], None]  # blocks until that many bytes are free, or others cannot free more


class Sleeper(Protocol):
    """Takes a runner's weights and caches off the device and brings them back. No step may run meanwhile."""

    default_level: int
    num_bytes: int  # device memory (host memory on a CPU) that the model takes while awake

    def sleep(self, level: int) -> int:
        """Free memory, and return the number of bytes. If it raises, nothing has changed. A runner that
        sleeps at level 1 may be sent to level 2."""
        ...

    def wake(self, make_room: MakeRoom) -> None:
        """Take the memory again. If it raises, the runner is still asleep."""
        ...
