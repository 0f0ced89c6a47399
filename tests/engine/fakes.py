"""Fake runners and a fake clock, so that a test decides when and how a step ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from penstock.engine.loop import EngineCore
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import Array, Outcome, PooledResult, PoolPlan, Request, StepPlan, StepResult


def row_values(plan: StepPlan, slot: int) -> list[float]:
    """The fake model's output for a row: first token, sum of tokens, length."""
    tokens = plan.token_ids[plan.cu_lengths[slot] : plan.cu_lengths[slot + 1]]
    return [float(tokens[0]), float(tokens.sum()), float(len(tokens))]


def expected_values(request: Request) -> list[list[float]]:
    rows = np.split(request.token_ids, np.cumsum(request.lengths)[:-1])
    return [[float(row[0]), float(row.sum()), float(len(row))] for row in rows]


def compute(plan: StepPlan, device_s: float = 0.5) -> PooledResult:
    assert isinstance(plan, PoolPlan)
    outputs: list[Array] = []
    for variant in plan.variants:
        slots = range(plan.num_rows) if variant.rows is None else variant.rows
        values = np.array([row_values(plan, int(slot)) for slot in slots], dtype=np.float32)
        outputs.append(values[:, : variant.params.dimensions])
    return PooledResult(tuple(outputs), device_s=device_s)


class ManualRunner:
    """A runner whose steps end when the test calls `finish`."""

    def __init__(self) -> None:
        self.flights: list[tuple[StepPlan, Future[StepResult]]] = []
        self.launched: list[StepPlan] = []
        self.closed = False

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.flights.append((plan, future))
        self.launched.append(plan)
        return future

    def finish(self, index: int = 0) -> None:
        plan, future = self.flights.pop(index)
        future.set_result(compute(plan))

    def fail(self, error: Exception, index: int = 0) -> None:
        self.flights.pop(index)[1].set_exception(error)

    def close(self) -> None:
        self.closed = True


class PoisonedRunner:
    """A runner whose steps end at once. A step with a poisoned token raises, or returns NaN for that row."""

    def __init__(self, poison: set[int], how: str) -> None:
        self.poison = poison
        self.how = how
        self.launches = 0

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        self.launches += 1
        bad = self.poison & set(plan.token_ids.tolist())
        future: Future[StepResult] = Future()
        if bad and self.how == "launch raises":
            raise ValueError(f"cannot launch token {min(bad)}")
        if bad and self.how == "step raises":
            future.set_exception(ValueError(f"cannot compute token {min(bad)}"))
            return future
        result = compute(plan)
        if self.how == "nan":
            self._spoil(plan, result)
        future.set_result(result)
        return future

    def close(self) -> None:
        return None

    def _spoil(self, plan: StepPlan, result: PooledResult) -> None:
        assert isinstance(plan, PoolPlan)
        for variant, values in zip(plan.variants, result.outputs, strict=True):
            slots = range(plan.num_rows) if variant.rows is None else variant.rows
            for at, slot in enumerate(slots):
                begin, end = plan.cu_lengths[slot], plan.cu_lengths[slot + 1]
                if self.poison & set(plan.token_ids[begin:end].tolist()):
                    values[at] = np.nan


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_core(
    runner: ManualRunner | PoisonedRunner,
    *,
    tokens: int = 100,
    rows: int = 100,
    queued_tokens: int = 10**9,
    depth: int = 1,
    clock: Callable[[], float] | None = None,
    share_identical: bool = False,  # most tests send requests with equal rows
) -> EngineCore:
    return EngineCore(
        runner,
        Scheduler(Budget(tokens, rows, queued_tokens)),
        depth=depth,
        clock=clock or Clock(),
        share_identical=share_identical,
    )


def run_to_the_end(core: EngineCore, turns: int = 1000) -> list[Outcome]:
    """Step the core until it is idle, for runners whose steps end at once."""
    outcomes: list[Outcome] = []
    for _ in range(turns):
        if not core.busy:
            return outcomes
        outcomes += core.step()
    raise AssertionError("the core is still busy")
