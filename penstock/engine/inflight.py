"""Steps between their launch and their result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import GeneratePlan, Request, StepPlan, StepResult

RowSet = set[tuple[Request, int]]  # rows by request and row number


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    plan: StepPlan
    scheduled: list[ScheduledRows]  # empty for a step that generates
    future: Future[StepResult]
    launched_s: float
    is_alone: bool  # no other step was in flight at its launch
    is_suspect: bool  # it reruns rows of a failed step, so nothing is launched behind it
    estimate_s: float  # expected device time
    left_backlog: bool = False  # more rows waited when it was launched
    is_background: bool = False  # it has only background rows
    interrupts: bool = False  # a background step was running when it was launched
    lost: RowSet = field(default_factory=set)  # rows that depend on a failed step and start over

    @property
    def generates(self) -> bool:
        return isinstance(self.plan, GeneratePlan)


class StepsInFlight:
    """The steps in flight: a queue of steps, and at most one background step that they interrupt."""

    def __init__(self) -> None:
        self.steps: deque[InFlightStep] = deque()  # in the order of their launches
        self.interrupted: InFlightStep | None = None  # the background step that others interrupt

    def __bool__(self) -> bool:
        return bool(self.steps) or self.interrupted is not None

    @property
    def num_rows(self) -> int:
        num_rows = 0 if self.interrupted is None else self.interrupted.plan.num_rows
        return num_rows + sum(step.plan.num_rows for step in self.steps)

    @property
    def oldest_launch_s(self) -> float:
        """When the oldest of `steps` was launched; 0 if there is none. The interrupted step is left out: it
        may take any time, and if it hangs, the steps that interrupt it hang too."""
        return self.steps[0].launched_s if self.steps else 0.0

    def take_finished(self) -> Iterator[InFlightStep]:
        """Remove and yield finished steps: those of `steps` in launch order, then the background step."""
        while self.steps and self.steps[0].future.done():
            yield self.steps.popleft()
        if (step := self.interrupted) is not None and step.future.done():
            self.interrupted = None
            yield step

    def clear(self) -> None:
        self.steps.clear()
        self.interrupted = None
