"""The interface between the engine loop and a runner. It imports no torch, so the null runner needs none."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import ModelNotFound, NotPossible
from penstock.types import Array, Comparison, Ints, PoolPlan, StepPlan, StepResult

BLOCK_SIZE = 16  # tokens of a block of the KV cache
LATE_VECTORS = 1 << 16  # token vectors of queries, in the store that scores read from


class Runner(Protocol):
    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step. The future completes on another thread when its result can be read.

        A `PoolPlan` gives a `PooledResult`, a `GeneratePlan` a `SampledResult`. Steps complete in the order
        of their launch. A result's arrays are valid until `pipeline_depth` further steps have been launched.
        A failed step raises from the future.
        """
        ...

    def compare(self, comparison: Comparison) -> Future[Array]:
        """Score vectors that the caller brings, fp32 [documents, 1]; independent of steps.

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
    """Runs one background step at a time, which the runner's other steps interrupt. They finish first."""

    def launch(self, plan: PoolPlan) -> Future[StepResult]:
        """Start a step that neither reads nor writes caches."""
        ...

    def hold(self) -> None:
        """Stop the step soon, until it is released: other steps are running or about to be launched."""
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
    """An adapter that was loaded, in numbers."""

    rank: int  # the largest of its modules
    kinds: tuple[str, ...]  # last parts of the names of the modules that it changes, sorted
    num_bytes: int  # in host memory


class AdapterStats(NamedTuple):
    """The adapters of an engine, for metrics."""

    num_loaded: int  # that requests may choose
    num_on_host: int
    num_on_device: int
    num_host_loads: int  # read from disk, since the start
    num_device_loads: int  # copied to the device, since the start


class AdapterStore(Protocol):
    """The adapters that requests may choose: on disk, in host memory and on the device.

    Ids are never used twice. Those of the checkpoint's own adapters come first and are always there.
    """

    max_adapters: int  # different ones in one step
    in_use: Callable[[], Collection[int]]  # adapters of requests that have not finished

    def load(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        """Check the adapter and read it into host memory on another thread. The future raises a
        `PenstockError` if it does not fit the model."""
        ...

    def unload(self, adapter_id: int) -> None:
        """Refuse new requests for an adapter. What is held for others is kept while `in_use` names it."""
        ...

    def check(self, adapter_ids: Ints) -> None:
        """`ModelNotFound` for an adapter that is not loaded, -1 excepted; `NotPossible` for too many."""
        ...

    def prefetch(self, adapter_ids: Ints) -> list[Future[Any]]:
        """Begin to read those that are only on disk. Empty if all are in memory."""
        ...

    def stats(self) -> AdapterStats: ...


def check_adapters(adapter_ids: Ints, known: Collection[int], max_adapters: int) -> None:
    """`ModelNotFound` for an adapter that is not known, `NotPossible` for too many."""
    wanted = set(np.unique(adapter_ids).tolist()) - {-1}
    if unknown := wanted.difference(known):
        raise ModelNotFound(f"adapter {min(unknown)} is not loaded", param="adapter")
    if len(wanted) > max_adapters:
        raise NotPossible(
            f"a request has {len(wanted)} different adapters; at most {max_adapters} run at once",
            param="adapter",
        )


SLEEP_LEVELS = (1, 2)  # 1: weights are kept in the host's memory; 2: they are read again from their files
MakeRoom = Callable[[int], None]  # blocks until that many bytes are free, or others cannot free more


class Sleeper(Protocol):
    """Takes a runner's weights and caches off the device and brings them back. No step may run meanwhile."""

    default_level: int
    num_bytes: int  # of the device, or of a CPU's memory, that the model takes while it is awake

    def sleep(self, level: int) -> int:
        """Free memory; returns how many bytes. If it raises, nothing has changed. A runner that sleeps at
        level 1 may be sent on to level 2."""
        ...

    def wake(self, make_room: MakeRoom) -> None:
        """Take the memory again. If it raises, the runner still sleeps."""
        ...
