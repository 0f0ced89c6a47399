"""Fails late work, wherever it waits: its deadline has passed, or it has not started in time."""

from __future__ import annotations

from penstock.engine.admission import Admission
from penstock.engine.arrivals import Arrivals
from penstock.engine.comparisons import Comparisons
from penstock.engine.pending import PendingRequests
from penstock.errors import DeadlineExceeded
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.scheduler import Scheduler
from penstock.types import Comparison, Failure, Outcome, Request


class Expiry:
    def __init__(
        self,
        scheduler: Scheduler,
        pending: PendingRequests,
        generation: GenerationScheduler | None,
        arrivals: Arrivals,
        comparisons: Comparisons,
        admission: Admission,
    ) -> None:
        self._scheduler = scheduler
        self._pending = pending
        self._generation = generation
        self._arrivals = arrivals
        self._comparisons = comparisons
        self._admission = admission

    def next_s(self) -> float | None:
        """The latest time for the next call of `expire`; None: no call is needed."""
        times = (
            self._scheduler.queue.next_deadline_s(),
            None if self._generation is None else self._generation.next_deadline_s(),
            self._arrivals.next_deadline_s(),
            self._comparisons.next_deadline_s() if self._comparisons else None,
        )
        return min((time_s for time_s in times if time_s is not None), default=None)

    def expire(self, now_s: float) -> list[Outcome]:
        """Fail the requests and comparisons that are late, and requests whose grammar takes too long."""
        outcomes: list[Outcome] = []
        for request in self._scheduler.expire(now_s):
            outcomes += self._pending.fail(request.id, deadline_error(request, now_s))
        if self._admission.max_queue_s:
            for request in self._scheduler.overdue(now_s):
                outcomes += self._pending.fail(request.id, self._admission.overdue_error())
        if self._generation is not None:
            outcomes += self._expire_generation(self._generation, now_s)
        outcomes += self._arrivals.expire(now_s)
        if self._comparisons:
            outcomes += self._expire_comparisons(now_s)
        return outcomes

    def _expire_generation(self, generation: GenerationScheduler, now_s: float) -> list[Outcome]:
        expired = generation.expire(now_s)
        outcomes: list[Outcome] = [Failure(request.id, deadline_error(request, now_s)) for request in expired]
        if self._admission.max_queue_s:
            error = self._admission.overdue_error
            outcomes += [Failure(request.id, error()) for request in generation.overdue(now_s)]
        return outcomes

    def _expire_comparisons(self, now_s: float) -> list[Outcome]:
        outcomes = self._comparisons.expire(now_s)
        if max_queue_s := self._admission.max_queue_s:
            overdue = self._comparisons.overdue(now_s, max_queue_s)
            outcomes += [Failure(each.id, self._admission.overdue_error()) for each in overdue]
        return outcomes


def deadline_error(work: Request | Comparison, now_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"not finished {now_s - work.arrival_s:.3f} s after arrival")
