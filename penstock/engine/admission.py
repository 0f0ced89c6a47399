"""Measures how fast work leaves the queues, and refuses requests that would wait too long to start."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backlog import ADMITTED_SHARE, Backlog, check_wait
from penstock.engine.inflight import InFlightStep
from penstock.engine.throughput import Throughput
from penstock.errors import QueueTooSlow
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.queue import HEAD_START_S, UNBOUNDED
from penstock.scheduler.scheduler import Scheduler
from penstock.types import Request

SHARED_STEP_S = 0.05  # target time of a step of large requests while small ones wait for it


@dataclass(slots=True)
class HeldWork:
    """Work outside the queues, which waits for a sleeping engine to wake."""

    num_rows: int = 0
    num_tokens: int = 0  # of pooling requests
    num_prompt_tokens: int = 0


class Admission:
    """The measured rates of an engine, and the queue limits that follow from them."""

    def __init__(self, scheduler: Scheduler, generation: GenerationScheduler | None) -> None:
        self.max_queue_s = 0.0  # maximum wait until a request starts; 0: no limit
        self.num_fast_tokens = UNBOUNDED  # behind up to this many tokens, no pooling request waits too long
        self.held = HeldWork()
        self.throughput = Throughput()  # of pooling
        self.prompt_throughput = Throughput()  # of prompts that start to generate
        self._scheduler = scheduler
        self._generation = generation
        self._num_started_tokens = 0  # prompt tokens that had started at the last planned generation step

    @property
    def backlog(self) -> Backlog:
        """The waiting pooling work."""
        queue, large = self._scheduler.queue, self._scheduler.queue.num_large_tokens
        small = queue.num_tokens - large + self.held.num_tokens
        weights = queue.weight(large=False), queue.weight(large=True)
        return Backlog(small, large, self.throughput.tokens_per_s, *weights)

    @property
    def prompt_backlog(self) -> Backlog:
        """The prompts that wait to start generating."""
        waiting, weight = self.held.num_prompt_tokens, 0.0
        if self._generation is not None:
            waiting += self._generation.queued_tokens
            weight = self._generation.queued_weight
        return Backlog(waiting, 0, self.prompt_throughput.tokens_per_s, weight, 0.0)

    def check(self, request: Request) -> None:
        """Raise `QueueTooSlow` if a pooling request that arrives now would wait too long to start. The check
        can be skipped while at most `num_fast_tokens` wait."""
        queue = self._scheduler.queue
        is_large = queue.is_large(request)
        own_tokens = queue.num_tokens_of(request.client, large=is_large)
        own_tokens += min(request.num_tokens, self._scheduler.budget.max_tokens)
        wait_s = self.backlog.client_wait_s(own_tokens, request.weight, is_large=is_large)
        check_wait(wait_s, self.max_queue_s)

    def check_prompt(self, request: Request, generation: GenerationScheduler) -> None:
        """Raise `QueueTooSlow` if a request that arrives now would wait too long to start generating."""
        own_tokens = generation.queued_tokens_of(request.client) + request.num_tokens
        wait_s = self.prompt_backlog.client_wait_s(own_tokens, request.weight, is_large=False)
        check_wait(wait_s, self.max_queue_s)

    def start_by_s(self, now_s: float) -> float | None:
        """The time by which a request that is queued now must start; None: no limit."""
        return now_s + self.max_queue_s if self.max_queue_s else None

    def overdue_error(self) -> QueueTooSlow:
        return QueueTooSlow(
            f"waited {self.max_queue_s:g} s and did not start, which is the limit; try again shortly"
        )

    def pooled(self, step: InFlightStep, now_s: float, *, is_last: bool) -> None:
        """Update the pooling rate after a successful interactive pooling step. `is_last`: no other step is
        in flight."""
        if not step.left_backlog and not self.throughput.had_backlog:
            return  # nothing waited, so the step does not show the rate
        self.throughput.record(
            step.plan.num_tokens,
            began_s=step.launched_s,
            now_s=now_s,
            has_backlog=step.left_backlog and (not is_last or len(self._scheduler.queue) > 0),
        )
        if rate := self.throughput.tokens_per_s:
            self._scheduler.queue.set_head_start(rate * HEAD_START_S)
            if self.max_queue_s:
                self.num_fast_tokens = int(rate * ADMITTED_SHARE * self.max_queue_s)
            max_tokens = self._scheduler.budget.max_tokens
            tokens = max(int(rate * SHARED_STEP_S), max_tokens // 8)
            self._scheduler.max_shared_tokens = min(max_tokens, tokens)

    def planned_generation(self, generation: GenerationScheduler, now_s: float) -> None:
        """Record how many prompt tokens start with the generation step that was just planned."""
        if not self.max_queue_s:
            return
        started = generation.num_started_tokens - self._num_started_tokens
        self._num_started_tokens += started
        self.prompt_throughput.record(
            started, began_s=now_s, now_s=now_s, has_backlog=bool(generation.queued_tokens)
        )
