"""What the engine core asks of a runner. Free of torch, so that a null runner needs none."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from penstock.types import Array, Comparison, StepPlan, StepResult

BLOCK_SIZE = 16  # tokens of a block of key/value memory


class Runner(Protocol):
    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step. The future completes, on some other thread, when its results can be read.

        Steps complete in the order of their launch. A result's arrays are valid until
        `pipeline_depth` further steps have been launched. A step that fails raises from the future.
        """
        ...

    def compare(self, comparison: Comparison) -> Future[Array]:
        """Score vectors that came from outside, fp32 [documents, 1]; independent of steps."""
        ...

    def close(self) -> None: ...
