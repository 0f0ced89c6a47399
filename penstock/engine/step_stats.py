"""The figures of a step, for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.inflight import InFlightStep
from penstock.types import PoolPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepStats:
    tokens: int
    rows: int
    requests: int
    fill: float  # tokens, as a fraction of the step's token budget
    step_s: float
    device_s: float

    @classmethod
    def of(cls, step: InFlightStep, result: StepResult, max_tokens: int, now_s: float) -> StepStats:
        """`max_tokens`: the token budget of a step."""
        plan = step.plan
        return cls(
            tokens=plan.num_tokens,
            rows=plan.num_rows,
            requests=len(plan.slices) if isinstance(plan, PoolPlan) else plan.num_rows,
            fill=min(1.0, plan.num_tokens / max_tokens),
            step_s=now_s - step.launched_s,
            device_s=result.device_s,
        )
