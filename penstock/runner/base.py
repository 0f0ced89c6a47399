"""The interface between the engine loop and a runner. It imports no torch, so the null runner needs none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from penstock.types import Array, Comparison, PoolPlan, StepPlan, StepResult

BLOCK_SIZE = 16  # tokens of a block of the KV cache


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
