"""A step between its launch and its result."""

from __future__ import annotations

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
    estimate_s: float  # the device time that it is expected to take
    left_backlog: bool = False  # more rows waited when it was launched
    is_background: bool = False  # it has nothing but background rows
    interrupts: bool = False  # a background step was running when it was launched
    lost: RowSet = field(default_factory=set)  # rows that depend on a failed step and start over

    @property
    def generates(self) -> bool:
        return isinstance(self.plan, GeneratePlan)
