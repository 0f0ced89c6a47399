"""Chooses what the engine runs next: interactive or background work, pooling or generation.

A step has work of one kind. Interactive and background rows never mix, so background rows in the same step
never delay an interactive row. Pooling and generation never mix: a model may use bidirectional attention in
one and causal attention in the other, and each keeps its fastest attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.admission import Admission
from penstock.engine.fair_share import FairShare
from penstock.engine.inflight import InFlightStep, StepsInFlight
from penstock.engine.pending import PendingRequests
from penstock.engine.recovery.failed_steps import StepRecovery
from penstock.runner.base import BackgroundSteps
from penstock.scheduler.background import BackgroundLane
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows, Scheduler
from penstock.types import GeneratePlan, PooledResult, PoolPlan, StepPlan, StepResult

MAX_LONG_ROW = 4  # maximum size of a background row that can be interrupted, in short steps


class NextStep(NamedTuple):
    plan: StepPlan
    scheduled: list[ScheduledRows]  # empty for a step that generates
    is_background: bool = False
    is_interruptible: bool = False  # interactive steps may interrupt it


class StepChooser:
    """next_step → launched → succeeded or failed, on the engine's thread.

    `next_step` takes rows out of the queues, so the caller must launch what it returns.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pending: PendingRequests,
        generation: GenerationScheduler | None,
        *,
        in_flight: StepsInFlight,
        recovery: StepRecovery,
        admission: Admission,
        lane: BackgroundLane,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._pending = pending
        self._generation = generation
        self._in_flight = in_flight
        self._recovery = recovery
        self._admission = admission
        self._lane = lane
        self._clock = clock
        self._fair_share = FairShare()
        self._background_generated = False  # whether the last background step was a generation step

    def next_step(self, *, can_interrupt: bool) -> NextStep | None:
        """An interactive step; a background step if nothing interactive can run, or if background work
        starves. None: nothing can run. `can_interrupt`: interactive steps can interrupt background steps."""
        if self._in_flight.interrupted is not None:
            if (step := self._interactive_step()) is not None:
                self._lane.launched(is_background=False)
            return step
        if not self._has_background_work:
            return self._interactive_step()
        step = self._background_step(can_interrupt) if self._lane.is_starving else None
        step = step or self._interactive_step()
        if step is None and not self._in_flight:  # an interactive request waits for one step at most
            step = self._background_step(can_interrupt)
        if step is not None:
            self._lane.launched(is_background=step.is_background)
        return step

    def hold_interrupted(self, background: BackgroundSteps) -> None:
        """Hold the interrupted background step while other work runs or waits; let it advance at times."""
        if not (self._in_flight.steps or self._has_work(generates=False) or self._has_work(generates=True)):
            background.release()
            return
        background.hold()
        if self._lane.is_held_back:
            background.advance()
            self._lane.launched(is_background=True)

    def next_chance_s(self) -> float | None:
        """When waiting background rows may run if nothing else happens. None: no rows wait for this."""
        return self._lane.next_chance_s() if self._has_background_work and not self._in_flight else None

    def launched(self, step: NextStep, now_s: float) -> float:
        """Record the launch of a step, and return its estimated device time in seconds."""
        if step.is_background:
            return 0.0
        generates = isinstance(step.plan, GeneratePlan)
        self._lane.saw_interactive(now_s)
        return self._fair_share.launched(
            generates, step.plan.num_tokens, other_has_work=self._has_work(not generates)
        )

    def succeeded(self, step: InFlightStep, result: StepResult) -> None:
        """Record the times of a successful step."""
        plan, lane = step.plan, self._lane
        if step.is_background:
            kept_s = (isinstance(result, PooledResult) and result.stretch_s) or result.device_s
            lane.ran_background(plan.num_tokens, kept_s, step.launched_s, self._clock())
            return
        lane.ran_interactive(result.device_s)
        if isinstance(plan, PoolPlan) and plan.slices:  # one request of each step is enough
            lane.answered_interactive(self._waited_s(step, plan, result), self._clock())
        self._fair_share.succeeded(step.generates, plan.num_tokens, step.estimate_s, result.device_s)

    def failed(self, step: InFlightStep) -> None:
        """Count a failed step as one that took no time."""
        if not step.is_background:
            self._fair_share.failed(step.generates, step.estimate_s)

    def _waited_s(self, step: InFlightStep, plan: PoolPlan, result: StepResult) -> float:
        """How long the first request of an interactive step waited for a background step."""
        if step.interrupts:
            return self._clock() - step.launched_s - result.device_s
        return self._lane.waited_s(plan.slices[0].request.arrival_s, step.launched_s)

    def _has_work(self, generates: bool) -> bool:
        if generates:
            return self._generation is not None and self._generation.has_interactive
        return bool(len(self._scheduler.queue))

    # Background steps.

    @property
    def _has_background_work(self) -> bool:
        generation = self._generation
        return len(self._scheduler.background) > 0 or (generation is not None and generation.has_background)

    def _background_step(self, can_interrupt: bool) -> NextStep | None:
        """Pooling and generation take turns, if both wait."""
        if self._recovery.has_suspects:
            return None
        max_tokens = self._lane.max_tokens(self._clock())
        for generates in (False, True) if self._background_generated else (True, False):
            step = (
                self._background_generation(max_tokens)
                if generates
                else self._background_pooling(max_tokens, can_interrupt)
            )
            if step is not None:
                self._background_generated = generates
                return step
        return None

    def _background_pooling(self, max_tokens: int, can_interrupt: bool) -> NextStep | None:
        scheduled = self._scheduler.schedule_background(max_tokens)
        if not scheduled and can_interrupt:  # the step can be interrupted, so its row may be longer
            scheduled = self._scheduler.schedule_background(MAX_LONG_ROW * max_tokens, max_rows=1)
        if not scheduled and self._lane.may_run_long(self._clock()):
            scheduled = self._scheduler.schedule_background(max_tokens, first_fits=True)
        if not scheduled:
            return None
        plan = self._planned(scheduled)
        return NextStep(plan, scheduled, True, is_interruptible=can_interrupt and uses_no_cache(plan))

    def _background_generation(self, max_tokens: int) -> NextStep | None:
        if self._generation is None:
            return None
        plan = self._generation.schedule_background(
            self._clock(), max_tokens, admit=not self._scheduler.isolated
        )
        return None if plan is None else NextStep(plan, [], is_background=True)

    # Interactive steps.

    def _interactive_step(self) -> NextStep | None:
        """Pooling and generation share the device time. Rows of failed steps go first."""
        generation = self._generation
        if generation is None:
            return self._pooling_step()
        if not self._recovery.has_suspects and self._fair_share.prefers_generation:
            return self._generation_step(generation) or self._pooling_step()
        return self._pooling_step() or self._generation_step(generation)

    def _pooling_step(self) -> NextStep | None:
        scheduled = self._recovery.next_retry() or self._scheduler.schedule()
        return NextStep(self._planned(scheduled), scheduled) if scheduled else None

    def _planned(self, scheduled: list[ScheduledRows]) -> PoolPlan:
        self._pending.mark_launched(scheduled, self._clock())
        chunking = self._scheduler.chunking
        block_size = chunking.pool.block_size if chunking else 0
        return build_plan(scheduled, block_size, self._scheduler.image_cache)

    def _generation_step(self, generation: GenerationScheduler) -> NextStep | None:
        # While isolated rows wait for blocks, no new sequence may take the blocks that others free.
        now_s = self._clock()
        plan = generation.schedule(now_s, admit=not self._scheduler.isolated)
        self._admission.planned_generation(generation, now_s)
        return None if plan is None else NextStep(plan, [])


def uses_no_cache(plan: PoolPlan) -> bool:
    """Whether a step shares no state with other steps: no caches, no image features, and no adapters, because
    layers hold only the adapters of the step that runs."""
    if plan.kv is not None or plan.adapters is not None or plan.images is not None:
        return False
    return all(variant.pairs is None for variant in plan.variants)
