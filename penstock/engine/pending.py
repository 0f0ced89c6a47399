"""Pooling requests between arrival and answer. Each gets rows from finished steps and ends exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.content import select_rows
from penstock.engine.dedup import Deduplicator
from penstock.engine.inflight import InFlightStep
from penstock.engine.progress import Allocate, Follower, Progress, Values, all_finite, split_outputs
from penstock.engine.recovery.poisoned import surviving_values
from penstock.errors import PenstockError, RowFailed
from penstock.scheduler.scheduler import ScheduledRows, Scheduler
from penstock.types import (
    Array,
    Failure,
    Ints,
    Outcome,
    PooledOutput,
    PooledResult,
    PooledRows,
    PoolPlan,
    Request,
    RowSlice,
    Timings,
)

MAX_JOINED_BYTES = 1 << 14  # maximum output bytes per row for requests that are answered together


class PendingRequests:
    """Pooling requests by id. Generation has its own bookkeeping in `GenerationScheduler`."""

    def __init__(self, scheduler: Scheduler, dedup: Deduplicator | None) -> None:
        self.allocate: Allocate = np.empty  # makes the arrays of answers
        self.joins_answers = False  # single-row requests that end in the same step become one `PooledRows`
        self._scheduler = scheduler
        self._dedup = dedup
        self._progress: dict[str, Progress] = {}
        self._num_relays = 0

    def __len__(self) -> int:
        return len(self._progress)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._progress

    def __getitem__(self, request_id: str) -> Progress:
        return self._progress[request_id]

    def requests(self) -> Iterator[Request]:
        return (progress.request for progress in self._progress.values())

    def add(self, request: Request, start_by_s: float | None = None) -> None:
        """Queue the rows that no other request computes. Raises `QueueFull` or `NotPossible` if refused."""
        dedup = self._dedup
        if dedup is None or request.pairs is not None:
            self._scheduler.add(request, start_by_s)
            progress = Progress.of(request)
        elif (leader := dedup.lead(request)) is not None:
            self._scheduler.add(request, start_by_s)
            dedup.register(leader)
            progress = leader
        else:
            split = dedup.split(request)
            if split.job.num_rows:
                self._scheduler.add(split.job, start_by_s)
            progress = dedup.begin(request, split)
        progress.start_by_s = start_by_s
        self._track(progress)

    def waits_for(self, job: Request) -> bool:
        """Whether a request still waits for rows of this job: it has neither ended nor been cancelled."""
        progress = self._progress.get(job.id)
        return progress is not None and progress.job is job

    def mark_launched(self, scheduled: Sequence[ScheduledRows], now_s: float) -> None:
        for entry in scheduled:
            progress = self._progress.get(entry.request.id)
            if progress is not None and progress.first_launch_s is None:
                progress.first_launch_s = now_s

    def deliver(self, step: InFlightStep, plan: PoolPlan, result: PooledResult) -> list[Outcome]:
        """Give each request its rows of a step. Returns answers of complete requests, and failures."""
        outcomes: list[Outcome] = []
        not_finite = _requests_not_finite(step, plan, result)
        if self.joins_answers and not (not_finite or step.lost) and _has_one_small_output(plan, result):
            joined, slices = self._join_answers(plan, result)
            if joined is not None:
                outcomes += [joined] if len(joined.ids) > 1 else joined.parts()
            if not slices:
                return outcomes
            plan = replace(plan, slices=slices)
        for row_slice, values in _slice_values(step, plan, result.outputs):
            progress = self._progress.get(row_slice.request.id)
            if progress is None or progress.job is not row_slice.request:
                continue  # cancelled meanwhile
            if not_finite and row_slice.request.id in not_finite:
                outcomes += self._fail(progress, RowFailed("the model gave values that are not finite"))
                continue
            progress.store(row_slice, values)
            progress.device_s += result.device_s
            if progress.complete:
                outcomes += self._finish(progress)
        return outcomes

    def _join_answers(
        self, plan: PoolPlan, result: PooledResult
    ) -> tuple[PooledRows | None, tuple[RowSlice, ...]]:
        """Answer together the single-row requests that ran in this step only and that no other request
        follows. Returns their joint answer, and the slices of all other requests."""
        ids: list[str] = []
        rows: list[Ints] = []
        queue_s: list[float] = []
        others: list[RowSlice] = []
        all_progress, dedup = self._progress, self._dedup
        for row_slice in plan.slices:
            request = row_slice.request
            progress = all_progress.get(request.id)
            if progress is None or progress.job is not request or not progress.ends_with_its_row:
                others.append(row_slice)
                continue
            del all_progress[request.id]
            if dedup is not None:
                dedup.forget(progress)
            ids.append(request.id)
            rows.append(row_slice.step_rows)
            queue_s.append(progress.queue_s)
        if not ids:
            return None, plan.slices
        values = result.outputs[0][np.concatenate(rows)]  # a copy: the step's memory is reused
        return PooledRows(ids, values, queue_s, result.device_s), tuple(others)

    def fail(self, request_id: str, error: PenstockError) -> list[Outcome]:
        """End a request with an error, if it is still pending."""
        progress = self._progress.get(request_id)
        return [] if progress is None else self._fail(progress, error)

    def fail_all(self, error: PenstockError) -> list[Outcome]:
        """End every request with an error."""
        pending = list(self._progress.values())
        for progress in pending:
            self._scheduler.cancel(progress.request.id)
            self._forget(progress, succeeded=False)
            progress.detach()
        return [Failure(progress.request.id, error) for progress in pending if not progress.is_relay]

    def cancel(self, request_id: str) -> bool:
        """Drop a request; False if the id is unknown. Rows in flight finish and are ignored."""
        if (progress := self._progress.get(request_id)) is None:
            return False
        self._drop(progress)
        return True

    def _track(self, progress: Progress) -> None:
        progress.allocate = self.allocate
        self._progress[progress.request.id] = progress

    def _finish(self, progress: Progress) -> list[Outcome]:
        """The answers of a complete request and of the followers that it completes."""
        progress.spread()
        self._forget(progress, succeeded=True)
        outcomes: list[Outcome] = [] if progress.is_relay else [_answer(progress)]
        for follower in progress.detach():
            other = follower.progress
            if self._progress.get(other.request.id) is not other:
                continue
            other.receive(progress, follower)
            if other.complete:
                outcomes += self._finish(other)
        return outcomes

    def _fail(self, progress: Progress, error: PenstockError) -> list[Outcome]:
        """End a request with an error. Rows that its followers need are queued again for them."""
        outcomes: list[Outcome] = [] if progress.is_relay else [Failure(progress.request.id, error)]
        return outcomes + self._drop(progress, error)

    def _drop(self, progress: Progress, error: PenstockError | None = None) -> list[Outcome]:
        self._scheduler.cancel(progress.request.id)
        self._forget(progress, succeeded=False)
        outcomes: list[Outcome] = []
        for follower in progress.detach():
            other = follower.progress
            if self._progress.get(other.request.id) is not other:
                continue
            if progress.is_relay and error is not None:  # the rows ran for this follower alone
                outcomes += self._fail(other, error)
            else:
                self._relay(follower)
        return outcomes

    def _relay(self, follower: Follower) -> None:
        """Queue rows for a follower whose leader has ended. It was admitted, so no queue limit applies."""
        other, rows = follower.progress, follower.rows
        self._num_relays += 1
        job = select_rows(other.request, rows, f"{other.request.id}~{self._num_relays}")
        self._scheduler.requeue(job, other.start_by_s)
        relay = Progress.of(job)
        relay.is_relay = True
        relay.followers.append(Follower(other, rows, np.arange(len(rows), dtype=np.int32)))
        self._track(relay)

    def _forget(self, progress: Progress, *, succeeded: bool) -> None:
        del self._progress[progress.request.id]
        self._scheduler.finish(progress.request, succeeded=succeeded)
        if self._dedup is not None:
            self._dedup.forget(progress)


def _has_one_small_output(plan: PoolPlan, result: PooledResult) -> bool:
    """Whether all rows of a step end in it, each with one small output of the same size."""
    if len(plan.variants) != 1 or plan.variants[0].rows is not None or plan.variants[0].params.per_token:
        return False
    return result.outputs[0].nbytes <= MAX_JOINED_BYTES * plan.num_rows


def _slice_values(
    step: InFlightStep, plan: PoolPlan, arrays: tuple[Array, ...]
) -> list[tuple[RowSlice, tuple[Values, ...]]]:
    """The values of each slice of a step, without the rows that depend on a failed step."""
    found = split_outputs(plan, arrays)
    if not step.lost:
        return found
    left = (surviving_values(row_slice, values, step.lost) for row_slice, values in found)
    return [each for each in left if each is not None]


def _requests_not_finite(step: InFlightStep, plan: PoolPlan, result: PooledResult) -> set[str]:
    """Ids of the requests with values that are not finite. One check of the whole step clears most steps."""
    checked, are_flags = result.finite or result.outputs, bool(result.finite)
    if all_finite(checked, are_flags):
        return set()
    found = _slice_values(step, plan, checked)
    return {row_slice.request.id for row_slice, values in found if not all_finite(values, are_flags)}


def _answer(progress: Progress) -> PooledOutput:
    first, *more = progress.outputs()
    timings = Timings(progress.queue_s, progress.device_s)
    return PooledOutput(progress.request.id, first, timings, tuple(more))
