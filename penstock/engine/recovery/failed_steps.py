"""What happens after a failed step: which rows run again, in which groups, and which requests fail."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.inflight import InFlightStep, RowSet
from penstock.engine.pending import PendingRequests
from penstock.engine.recovery.oom import TokenBackoff, halves
from penstock.engine.recovery.poisoned import LostRowTracker, excluding, rows_of
from penstock.errors import DeviceFailed, DeviceOutOfMemory, RowFailed
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.scheduler import ScheduledRows, Scheduler
from penstock.types import Failure, GeneratePlan, Outcome, StepPlan

log = logging.getLogger("penstock.engine")


class StepRecovery:
    """Recovers from failed steps, so that a request fails only for its own fault.

    - Out of memory: the rows run again in two halves, and steps stay smaller for a while.
    - Any other error: the requests run again in halves until the poisoned one is alone; only that one fails.
    - Rows of later in-flight steps that depend on the failed one start over as well.
    - A generation step is left to the `GenerationScheduler`, which isolates its sequences.
    - A device failure is final: `device_failure` is set, and the owner of the engine has to build another.
    """

    def __init__(
        self, scheduler: Scheduler, pending: PendingRequests, generation: GenerationScheduler | None
    ) -> None:
        self.device_failure: DeviceFailed | None = None
        self._scheduler = scheduler
        self._pending = pending
        self._generation = generation
        self._block_size = scheduler.chunking.pool.block_size if scheduler.chunking else 0
        self._retries: deque[list[ScheduledRows]] = deque()  # parts of failed steps, run alone and in order
        self._backoff = TokenBackoff.of(scheduler.budget.max_tokens)
        self._generation_backoff = TokenBackoff.of(scheduler.budget.max_tokens)

    @property
    def has_suspects(self) -> bool:
        """Whether rows of failed steps wait. They run before all others, one part at a time: a part may need
        what the part before it wrote."""
        return bool(self._retries or self._scheduler.isolated)

    def next_retry(self) -> list[ScheduledRows]:
        """The next part of a failed step; empty if there is none."""
        while self._retries:
            if scheduled := self._still_needed(self._retries.popleft()):
                return scheduled
        return []

    def step_succeeded(self, step: InFlightStep) -> None:
        if self._backoff.is_reduced:
            self._backoff.succeeded()
            self._set_budget()
        if step.generates:
            self._generation_backoff.succeeded()
            self._set_generation_budget()

    def step_failed(
        self, step: InFlightStep, later: Sequence[InFlightStep], error: BaseException
    ) -> list[Outcome]:
        """Recover from a failed step. `later`: the steps in flight that were launched after it."""
        if isinstance(error, DeviceFailed):
            self.device_failure = error
            return []
        if isinstance(step.plan, GeneratePlan):
            return self._recover_generation(step.plan, error)
        lost = self._mark_lost_rows(step, later)
        if isinstance(error, DeviceOutOfMemory):
            return self._recover_memory(step, later, lost, error)
        self._scheduler.retract(step.scheduled)
        return self._isolate(step, lost, error)

    def clear(self) -> None:
        self._retries.clear()

    def _mark_lost_rows(self, failed: InFlightStep, later: Sequence[InFlightStep]) -> list[ScheduledRows]:
        """The rows of later in-flight steps that depend on the failed one; their results are dropped."""
        tracker = LostRowTracker(failed.scheduled, self._block_size)
        found: list[ScheduledRows] = []
        for step in later:
            lost = excluding(tracker.find(step.scheduled), step.lost)
            step.lost.update(rows_of(lost))
            found += lost
        self._scheduler.retract(found)
        return found

    def _recover_memory(
        self,
        step: InFlightStep,
        later: Sequence[InFlightStep],
        lost: list[ScheduledRows],
        error: DeviceOutOfMemory,
    ) -> list[Outcome]:
        """Run the step again in halves. If later steps in flight may have taken over blocks that it still
        needs, its rows start over instead."""
        self._log_out_of_memory(step.plan, error)
        self._backoff.ran_out(step.plan.num_tokens)
        self._set_budget()
        if step.plan.kv is None or not later:
            self._start_over([lost])
            return self._divide(step, error)
        self._scheduler.retract(step.scheduled)
        self._start_over([excluding(step.scheduled, step.lost) + lost])
        return []

    def _divide(self, step: InFlightStep, error: DeviceOutOfMemory) -> list[Outcome]:
        """Run the rows of a step again in two halves. A row that cannot be divided runs once more with
        nothing else in flight, and fails if it still does not fit.

        Rows with a block table keep their blocks meanwhile: nothing is scheduled before the halves have run.
        This holds for cancelled rows too, because others may reuse the prefix that they write.
        """
        scheduled = self._still_needed(excluding(step.scheduled, step.lost))
        if not scheduled:
            return []
        if (parts := halves(scheduled)) is not None:
            self._retries.extendleft(part for part in reversed(parts) if part)
            return []
        if not step.is_alone:
            self._retries.appendleft(scheduled)
            return []
        self._scheduler.retract(scheduled)
        outcomes: list[Outcome] = []
        for entry in scheduled:
            tokens = int(entry.request.lengths[entry.rows].sum())
            message = f"a row of {tokens} tokens needs more memory than the device has: {error.message}"
            outcomes += self._pending.fail(entry.request.id, RowFailed(message))
        return outcomes

    def _isolate(self, step: InFlightStep, lost: list[ScheduledRows], error: BaseException) -> list[Outcome]:
        """Run the requests of a step again in two halves; a request that was alone in it fails. Rows that
        depended on the step run with their request, or after all others."""
        suspects = [s for s in excluding(step.scheduled, step.lost) if self._pending.waits_for(s.request)]
        outcomes: list[Outcome] = []
        if len(suspects) == 1 and len(step.scheduled) == 1:
            outcomes += self._pending.fail(suspects.pop().request.id, _step_error(error))
        middle = len(suspects) // 2
        groups = [suspects[:middle], suspects[middle:]]
        for group in groups:
            names = {entry.request.id for entry in group}
            group += [entry for entry in lost if entry.request.id in names]
        self._start_over([*groups, lost])
        return outcomes

    def _start_over(self, groups: list[list[ScheduledRows]]) -> None:
        """Run rows again from their first token, isolated group by group; each row once."""
        seen: RowSet = set()
        needed: list[list[ScheduledRows]] = []
        for group in groups:
            needed.append([])
            for entry in group:
                if self._pending.waits_for(entry.request) and (left := excluding([entry], seen)):
                    needed[-1] += left
                    seen |= rows_of(left)
        self._scheduler.requeue_isolated([group for group in needed if group])

    def _still_needed(self, scheduled: Sequence[ScheduledRows]) -> list[ScheduledRows]:
        """The entries of requests that have not ended. Entries with block tables always stay."""
        return [entry for entry in scheduled if entry.tables or self._pending.waits_for(entry.request)]

    def _recover_generation(self, plan: GeneratePlan, error: BaseException) -> list[Outcome]:
        """Out of memory: all sequences of the step start over in smaller steps. Any other error, or a step
        that cannot be smaller: the scheduler isolates the poisoned request."""
        if self._generation is None:
            raise RuntimeError("a generation step needs a generation scheduler") from error
        isolate = True
        if isinstance(error, DeviceOutOfMemory):
            self._log_out_of_memory(plan, error)
            self._generation_backoff.ran_out(plan.num_tokens)
            self._set_generation_budget()
            isolate = plan.num_tokens == 1
        failed = self._generation.step_failed(plan, isolate=isolate)
        return [Failure(request.id, _step_error(error)) for request in failed]

    def _set_budget(self) -> None:
        budget = self._scheduler.budget
        self._scheduler.budget = replace(budget, max_tokens=self._backoff.max_tokens)

    def _set_generation_budget(self) -> None:
        generation, max_tokens = self._generation, self._generation_backoff.max_tokens
        if generation is not None and generation.limits.max_tokens != max_tokens:
            generation.limits = replace(generation.limits, max_tokens=max_tokens)

    @staticmethod
    def _log_out_of_memory(plan: StepPlan, error: DeviceOutOfMemory) -> None:
        log.warning("a step of %d tokens ran out of memory: %s", plan.num_tokens, error.message)


def _step_error(error: BaseException) -> RowFailed:
    return RowFailed(f"the step failed: {type(error).__name__}: {error}")
