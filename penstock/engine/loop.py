"""The engine loop: requests in, answers out, one step after another.

Synchronous and single-threaded: its owner calls `add`, `cancel` and `step` from one thread. The server runs
it in a process of its own, offline use in a thread; the code is the same.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.backlog import ADMITTED_SHARE, Backlog, check_wait
from penstock.engine.adapter_waits import AdapterWaits
from penstock.engine.comparisons import Comparisons
from penstock.engine.dedup import Deduplicator
from penstock.engine.fair_share import FairShare
from penstock.engine.grammars import Grammars
from penstock.engine.inflight import InFlightStep
from penstock.engine.pending import PendingRequests
from penstock.engine.recovery.failed_steps import StepRecovery
from penstock.engine.throughput import Throughput
from penstock.errors import (
    BadValue,
    DeadlineExceeded,
    DeviceFailed,
    EngineError,
    NotPossible,
    PenstockError,
    QueueTooSlow,
)
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import (
    AdapterInfo,
    AdapterStats,
    AdapterStore,
    BackgroundSteps,
    IdleWork,
    Runner,
    Sleeper,
)
from penstock.scheduler.background import BackgroundLane
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.queue import HEAD_START_S, UNBOUNDED
from penstock.scheduler.scheduler import ScheduledRows, Scheduler
from penstock.types import (
    Comparison,
    Failure,
    GeneratePlan,
    Outcome,
    PooledResult,
    PoolPlan,
    Request,
    SampledResult,
    SamplerParams,
    StepPlan,
    StepResult,
)

log = logging.getLogger("penstock.engine")


@dataclass(slots=True)
class HeldWork:
    """What waits for the engine to wake, outside of its queues."""

    num_rows: int = 0
    num_tokens: int = 0  # to pool
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in numbers, for metrics."""

    tokens: int
    rows: int
    requests: int
    fill: float  # tokens over the budget
    step_s: float
    device_s: float


class NextStep(NamedTuple):
    plan: StepPlan
    scheduled: list[ScheduledRows]
    is_background: bool = False


_NO_ADAPTERS = AdapterStats(0, 0, 0, 0, 0)
SHARED_STEP_S = 0.05  # a step of large requests takes about this long while small ones wait for it
BACKGROUND_STEP_S = 0.002  # a background step, while interactive requests come
MAX_LONG_ROW = 4  # times a short step: a background row that others interrupt


class EngineCore:
    """schedule → launch → collect, with at most `depth` steps in flight."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
        observe: Callable[[StepStats], None] = lambda stats: None,
        share_identical: bool = True,
        generation: GenerationScheduler | None = None,
        background_step_s: float = BACKGROUND_STEP_S,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.depth = depth
        self.clock = clock
        self.wake = wake  # called from another thread when a step has finished
        self.observe = observe
        self.mark_launch: Callable[[float], None] = lambda began_s: (
            None
        )  # it may block for long; 0: it is over
        self.generation = generation  # None: this engine only pools
        self.grammars: Grammars | None = None  # compiles grammars before their requests join `generation`
        self.max_queue_s = 0.0  # until a request starts; 0: no limit
        self.background: BackgroundSteps | None = None  # None: nothing interrupts a step
        self.idle_work: IdleWork | None = None  # None: the runner has none
        self._last_busy_s = clock()  # when something last ran or waited
        self.sleeper: Sleeper | None = None  # None: this engine cannot sleep
        self.why_not_sleep = "this engine cannot sleep"  # where it has no sleeper
        self.adapters: AdapterStore | None = None  # None: requests have no adapters
        self.held = HeldWork()  # while the engine sleeps
        self.dedup = Deduplicator(scheduler.runs_soon) if share_identical else None
        self.pending = PendingRequests(scheduler, self.dedup)
        self._recovery = StepRecovery(scheduler, self.pending, generation)
        self._fair_share = FairShare()
        self._lane = BackgroundLane(scheduler.budget.max_tokens, background_step_s)
        self._background_generated = False  # the last background step
        self._throughput = Throughput()  # of pooling
        self._prompt_throughput = Throughput()  # of prompts that begin to generate
        self._num_fast_tokens = UNBOUNDED  # behind as many waiting tokens, no request waits too long
        self._num_started_tokens = 0  # of prompts, when the last generation step was planned
        self._comparisons = Comparisons()
        self._adapter_waits = AdapterWaits()
        self._in_flight: deque[InFlightStep] = deque()
        self._interrupted: InFlightStep | None = None  # a background step that the others interrupt

    @property
    def busy(self) -> bool:
        generating = (self.generation is not None and self.generation.busy) or self.grammars
        waiting = self._comparisons or self._adapter_waits
        in_flight = self._in_flight or self._interrupted
        return bool(self.pending or in_flight or waiting or generating)

    @property
    def device_failure(self) -> DeviceFailed | None:
        """Why the device is lost; then nothing can run any more."""
        return self._recovery.device_failure

    @property
    def pool(self) -> BlockPool | None:
        """The KV cache blocks, if the engine has any."""
        if self.scheduler.chunking is not None:
            return self.scheduler.chunking.pool
        return None if self.generation is None else self.generation.pool

    @property
    def adapter_stats(self) -> AdapterStats:
        """Where the adapters are, and how often they were moved."""
        return _NO_ADAPTERS if self.adapters is None else self.adapters.stats()

    @property
    def running(self) -> int:
        """The number of rows in flight."""
        num_rows = 0 if self._interrupted is None else self._interrupted.plan.num_rows
        return num_rows + sum(step.plan.num_rows for step in self._in_flight)

    @property
    def num_comparisons(self) -> int:
        """Comparisons that wait or run."""
        return len(self._comparisons)

    @property
    def oldest_launch_s(self) -> float:
        """When the oldest step in flight was launched; 0 if none is in flight. A step that others interrupt
        may take any time; if it hangs, so do they."""
        return self._in_flight[0].launched_s if self._in_flight else 0.0

    @property
    def can_fill_step(self) -> bool:
        """Whether enough tokens wait to fill a step that could be launched now."""
        enough = self.scheduler.queue.num_tokens >= self.scheduler.budget.max_tokens
        return enough and self._may_launch()

    def add(self, request: Request) -> None:
        """Take on a request; `BadValue`, `NotPossible` or `QueueFull` if it cannot be."""
        self._check_id(request.id)
        if request.adapters is not None and self._waits_for_adapters(request):
            return
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        now = self.clock()
        if not request.is_background:
            self._lane.saw_interactive(now)
        if request.sampling is not None:
            self._add_generation(request, request.sampling)
        elif request.is_background:
            self.pending.add(request)
        else:
            if self.scheduler.queue.num_tokens > self._num_fast_tokens:
                check_wait(self._wait_s(request), self.max_queue_s)
            self.pending.add(request, now + self.max_queue_s if self.max_queue_s else None)

    def load_adapter(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        """Let requests choose the LoRA adapter in `folder`. The future completes on another thread; it raises
        a `PenstockError` if the adapter does not fit the model. Ids are never used twice."""
        if self.adapters is not None:
            return self.adapters.load(adapter_id, folder, name)
        refused: Future[AdapterInfo] = Future()
        refused.set_exception(NotPossible("this engine takes no adapters; start it with --enable-lora"))
        return refused

    def adapters_in_use(self) -> set[int]:
        """Adapters of requests that have not finished."""
        requests = list(self.pending.requests())
        if self.generation is not None:
            requests += self.generation.requests()
        if self.grammars is not None:
            requests += self.grammars.requests()
        requests += self._adapter_waits.requests()
        arrays = [request.adapters for request in requests if request.adapters is not None]
        return {int(each) for array in arrays for each in np.unique(array)}

    def unload_adapter(self, adapter_id: int) -> None:
        """Refuse new requests for an adapter; those taken on before finish."""
        if self.adapters is not None:
            self.adapters.unload(adapter_id)

    def _waits_for_adapters(self, request: Request) -> bool:
        """Refuse adapters that are not loaded, and begin to read those that are only on disk. Returns whether
        the request waits for that."""
        if self.adapters is None or request.adapters is None:
            raise NotPossible("this model has no adapters", param="adapter")
        self.adapters.check(request.adapters)
        if reads := self.adapters.prefetch(request.adapters):
            self._adapter_waits.hold(request, reads, lambda: self.wake())
        return bool(reads)

    def _admit_adapted(self) -> list[Outcome]:
        """Requests whose adapters were read join the queues."""
        outcomes: list[Outcome] = []
        for request, error in self._adapter_waits.ready():
            try:
                if error is not None:
                    raise error
                self._enqueue(request)
            except PenstockError as failure:
                outcomes.append(Failure(request.id, failure))
        return outcomes

    def _wait_s(self, request: Request) -> float:
        """Seconds until a pooling request that arrives now starts."""
        queue = self.scheduler.queue
        is_large = queue.is_large(request)
        own_tokens = queue.num_tokens_of(request.client, large=is_large)
        own_tokens += min(request.num_tokens, self.scheduler.budget.max_tokens)
        return self.backlog.client_wait_s(own_tokens, request.weight, is_large=is_large)

    def _prompt_wait_s(self, generation: GenerationScheduler, request: Request) -> float:
        """Seconds until a request that arrives now begins to generate."""
        own_tokens = generation.queued_tokens_of(request.client) + request.num_tokens
        return self.prompt_backlog.client_wait_s(own_tokens, request.weight, is_large=False)

    def _start_by_s(self) -> float | None:
        """By when a request that is queued now must start."""
        return self.clock() + self.max_queue_s if self.max_queue_s else None

    @property
    def backlog(self) -> Backlog:
        """The pooling work that waits."""
        queue, large = self.scheduler.queue, self.scheduler.queue.num_large_tokens
        small = queue.num_tokens - large + self.held.num_tokens
        weights = queue.weight(large=False), queue.weight(large=True)
        return Backlog(small, large, self._throughput.tokens_per_s, *weights)

    @property
    def prompt_backlog(self) -> Backlog:
        """The prompts that wait to generate."""
        waiting, weight = self.held.num_prompt_tokens, 0.0
        if self.generation is not None:
            waiting += self.generation.queued_tokens
            weight = self.generation.queued_weight
        return Backlog(waiting, 0, self._prompt_throughput.tokens_per_s, weight, 0.0)

    def submit(self, work: Request | Comparison) -> list[Outcome]:
        """Take on a request or a comparison. Returns its failure if it is refused, and also if the code
        raises anything unexpected: nothing in one request may stop the engine."""
        try:
            if isinstance(work, Comparison):
                self.compare(work)
            else:
                self.add(work)
        except PenstockError as error:
            return [Failure(work.id, error)]
        except Exception as error:
            log.exception("a request could not be taken on")
            self.cancel(work.id)
            why = f"the engine cannot take on this request: {type(error).__name__}: {error}"
            return [Failure(work.id, EngineError(why))]
        return []

    def _check_id(self, request_id: str) -> None:
        is_known = request_id in self.pending or request_id in self._comparisons.ids
        if is_known or self.generates(request_id):
            raise BadValue(f"request_id {request_id!r} is already in use", param="request_id")

    def _add_generation(self, request: Request, sampling: SamplerParams) -> None:
        if self.generation is None:
            raise NotPossible("this engine does not generate")
        start_by_s = None
        if not request.is_background:
            check_wait(self._prompt_wait_s(self.generation, request), self.max_queue_s)
            start_by_s = self._start_by_s()
        if sampling.grammar is None:
            self.generation.add(request, start_by_s=start_by_s)
        elif self.grammars is None:
            raise NotPossible("this engine does not constrain its output")
        else:
            self.generation.check(request)
            self.grammars.begin(request, sampling.grammar, lambda: self.wake())

    def compare(self, comparison: Comparison) -> None:
        """Score vectors that the caller brings; `QueueFull` if too many wait. They wait for no step."""
        self._check_id(comparison.id)
        self._comparisons.add(comparison)
        self._launch_comparison()

    def _launch_comparison(self) -> None:
        if self._comparisons.can_launch:
            self._comparisons.launch(self.runner.compare, lambda: self.wake(), self.clock())

    def cancel(self, request_id: str) -> None:
        """Drop a request. Its rows in flight finish and are ignored."""
        if self.pending.cancel(request_id) or self._comparisons.cancel(request_id):
            return
        if self._adapter_waits.cancel(request_id):
            return
        if self.grammars is not None:
            self.grammars.cancel(request_id)
        if self.generation is not None:
            self.generation.cancel(request_id)

    def generates(self, request_id: str) -> bool:
        """Whether further tokens of this request may come."""
        compiling = self.grammars is not None and request_id in self.grammars
        if request_id in self._adapter_waits:
            return True
        return compiling or (self.generation is not None and request_id in self.generation)

    def next_deadline_s(self) -> float | None:
        """The earliest deadline of all requests, or when background rows that wait may run."""
        waiting = self.scheduler.queue.next_deadline_s()
        generating = None if self.generation is None else self.generation.next_deadline_s()
        compiling = None if self.grammars is None else self.grammars.next_deadline_s()
        comparing = self._comparisons.next_deadline_s() if self._comparisons else None
        background = None
        if self._has_background_work and not self._in_flight and self._interrupted is None:
            background = self._lane.next_chance_s()
        adapting = self._adapter_waits.next_deadline_s() if self._adapter_waits else None
        deadlines = (waiting, generating, compiling, comparing, adapting, background)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def step(self) -> list[Outcome]:
        """One turn of the loop: expire, admit, collect, launch."""
        outcomes = self._expire()
        outcomes += self._admit_adapted() if self._adapter_waits else []
        outcomes += self._admit_compiled()
        outcomes += self._collect()
        outcomes += self._comparisons.collect(self.clock())
        if self.device_failure is not None:
            return outcomes + self._fail_all(self.device_failure)
        self._launch_comparison()
        self._launch()
        if self.idle_work is not None and (outcomes or self.busy):
            self._last_busy_s = self.clock()
        return outcomes

    def idle_work_due_s(self) -> float | None:
        """When the runner may do what no request waits for; None: it has nothing to do, or others run."""
        if self.idle_work is None or self.busy:
            return None
        min_idle_s = self.idle_work.min_idle_s
        return None if min_idle_s is None else self._last_busy_s + min_idle_s

    def run_idle_work(self) -> None:
        """Let the runner do a short piece of such work, if it is due. The owner calls this when it has waited
        for requests and none has come."""
        due_s = self.idle_work_due_s()
        if due_s is None or self.idle_work is None or self.clock() < due_s:
            return
        self.mark_launch(self.clock())
        self.idle_work.run_idle()
        self.mark_launch(0.0)

    def forget_cached(self) -> None:
        """Forget cached prefixes and vectors, whose contents are lost. Nothing may be in flight."""
        if (pool := self.pool) is not None:
            pool.forget_prefixes()
        if (vectors := self.scheduler.vector_cache) is not None:
            vectors.forget()
        if (images := self.scheduler.image_cache) is not None:
            images.forget()

    def fail_device(self, error: DeviceFailed) -> None:
        """Give up the device, which failed outside of a step."""
        self._recovery.device_failure = error

    def check_integrity(self) -> None:
        """Assert that nothing is held for requests that are gone; for tests, when idle."""
        if self.generation is not None:
            self.generation.check_integrity()
        if not self.busy and self.scheduler.chunking is not None:
            self.scheduler.chunking.pool.check_integrity()

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        self.runner.close()

    # Expire and admit.

    def _expire(self) -> list[Outcome]:
        """Fail the requests whose deadline has passed, and those that cannot continue."""
        now = self.clock()
        outcomes: list[Outcome] = []
        for request in self.scheduler.expire(now):
            outcomes += self.pending.fail(request.id, deadline_error(request, now))
        for request in self.scheduler.overdue(now) if self.max_queue_s else ():
            outcomes += self.pending.fail(request.id, self._overdue_error())
        for request in () if self.generation is None else self.generation.expire(now):
            outcomes.append(Failure(request.id, deadline_error(request, now)))
        if self.generation is not None and self.max_queue_s:
            for request in self.generation.overdue(now):
                outcomes.append(Failure(request.id, self._overdue_error()))
        for request, error in self._adapter_waits.expire(now) if self._adapter_waits else ():
            outcomes.append(Failure(request.id, error))
        for request, error in () if self.grammars is None else self.grammars.expire(now):
            outcomes.append(Failure(request.id, error))
        if self._comparisons:
            outcomes += self._expire_comparisons(now)
        return outcomes if self.generation is None else outcomes + self._generation_failures()

    def _expire_comparisons(self, now_s: float) -> list[Outcome]:
        outcomes = self._comparisons.expire(now_s)
        for comparison in self._comparisons.overdue(now_s, self.max_queue_s) if self.max_queue_s else ():
            outcomes.append(Failure(comparison.id, self._overdue_error()))
        return outcomes

    def _overdue_error(self) -> QueueTooSlow:
        return QueueTooSlow(
            f"waited {self.max_queue_s:g} s and did not start, which is the limit; try again shortly"
        )

    def _generation_failures(self) -> list[Outcome]:
        failures = {} if self.generation is None else self.generation.take_failures()
        return [Failure(request_id, error) for request_id, error in failures.items()]

    def _admit_compiled(self) -> list[Outcome]:
        """Requests whose grammars are compiled join the generation scheduler."""
        if self.grammars is None or self.generation is None:
            return []
        outcomes: list[Outcome] = []
        for request, constraints in self.grammars.ready():
            try:
                if isinstance(constraints, PenstockError):
                    raise constraints
                start_by_s = None if request.is_background else self._start_by_s()
                self.generation.add(request, constraints, start_by_s)
            except PenstockError as error:
                outcomes.append(Failure(request.id, error))
        return outcomes

    # Collect.

    def _collect(self) -> list[Outcome]:
        """Take the results of finished steps: in launch order, but a background step that others interrupt
        when it is done."""
        outcomes: list[Outcome] = []
        while self._in_flight and self._in_flight[0].future.done():
            outcomes += self._collect_step(self._in_flight.popleft())
        if (step := self._interrupted) is not None and step.future.done():
            self._interrupted = None
            outcomes += self._collect_step(step)
        return outcomes

    def _collect_step(self, step: InFlightStep) -> list[Outcome]:
        if (error := step.future.exception()) is None:
            return self._collect_result(step, step.future.result())
        if not step.is_background:
            self._fair_share.failed(step.generates, step.estimate_s)
        return self._recovery.step_failed(step, self._in_flight, error)

    def _collect_result(self, step: InFlightStep, result: StepResult) -> list[Outcome]:
        plan, generation = step.plan, self.generation
        if step.is_background:
            kept_s = (isinstance(result, PooledResult) and result.stretch_s) or result.device_s
            self._lane.ran_background(plan.num_tokens, kept_s, step.launched_s, self.clock())
        else:
            self._lane.ran_interactive(result.device_s)
            if isinstance(plan, PoolPlan) and plan.slices:  # one request of each step tells enough
                self._lane.answered_interactive(self._waited_s(step, plan, result), self.clock())
            self._fair_share.succeeded(step.generates, plan.num_tokens, step.estimate_s, result.device_s)
        self._recovery.step_succeeded(step)
        if plan.images is not None and self.scheduler.image_cache is not None:
            self.scheduler.image_cache.publish(plan.images)
        outcomes: list[Outcome] = []
        if isinstance(plan, PoolPlan) and isinstance(result, PooledResult):
            # Otherwise there is nothing to learn about the rate of interactive work.
            if not step.is_background and (step.left_backlog or self._throughput.had_backlog):
                self._measure_throughput(step)
            outcomes += self.pending.deliver(step, plan, result)
        elif isinstance(plan, GeneratePlan) and isinstance(result, SampledResult) and generation is not None:
            outcomes += generation.collect(plan, result)
            outcomes += self._generation_failures()
        else:
            raise TypeError(f"a {type(plan).__name__} cannot give a {type(result).__name__}")
        self.observe(self._stats(step, result))
        return outcomes

    def _waited_s(self, step: InFlightStep, plan: PoolPlan, result: StepResult) -> float:
        """For how long the first request of an interactive step waited for a background step."""
        if step.interrupts:
            return self.clock() - step.launched_s - result.device_s
        return self._lane.waited_s(plan.slices[0].request.arrival_s, step.launched_s)

    def _measure_throughput(self, step: InFlightStep) -> None:
        self._throughput.record(
            step.plan.num_tokens,
            began_s=step.launched_s,
            now_s=self.clock(),
            has_backlog=step.left_backlog and bool(len(self.scheduler.queue) or self._in_flight),
        )
        if rate := self._throughput.tokens_per_s:
            self.scheduler.queue.set_head_start(rate * HEAD_START_S)
            if self.max_queue_s:
                self._num_fast_tokens = int(rate * ADMITTED_SHARE * self.max_queue_s)
            max_tokens = self.scheduler.budget.max_tokens
            tokens = max(int(rate * SHARED_STEP_S), max_tokens // 8)
            self.scheduler.max_shared_tokens = min(max_tokens, tokens)

    def _stats(self, step: InFlightStep, result: StepResult) -> StepStats:
        plan = step.plan
        return StepStats(
            tokens=plan.num_tokens,
            rows=plan.num_rows,
            requests=len(plan.slices) if isinstance(plan, PoolPlan) else plan.num_rows,
            fill=min(1.0, plan.num_tokens / self.scheduler.budget.max_tokens),
            step_s=self.clock() - step.launched_s,
            device_s=result.device_s,
        )

    def _fail_all(self, error: DeviceFailed) -> list[Outcome]:
        """Fail every request; the owner of this engine has to build another."""
        outcomes = self.pending.fail_all(error) + self._comparisons.fail_all(error)
        if self.generation is not None:
            outcomes += [Failure(key, error) for key in self.generation.clear()]
        if self.grammars is not None:
            outcomes += [Failure(key, error) for key in self.grammars.clear()]
        outcomes += [Failure(key, error) for key in self._adapter_waits.clear()]
        self._in_flight.clear()
        self._interrupted = None
        self._recovery.clear()
        return outcomes

    # Launch.

    def _launch(self) -> None:
        """Launch steps until `depth` are in flight or nothing can run."""
        self._launch_steps()
        if self.background is not None and self._interrupted is not None:
            self._hold_background(self.background)

    def _launch_steps(self) -> None:
        while self._may_launch():
            is_suspect = self._recovery.has_suspects
            if (next_step := self._next_step()) is None:
                return
            plan, scheduled, is_background = next_step
            generates, now = isinstance(plan, GeneratePlan), self.clock()
            estimate_s = 0.0
            if not is_background:
                self._lane.saw_interactive(now)
                estimate_s = self._fair_share.launched(
                    generates, plan.num_tokens, other_has_work=self._has_work(not generates)
                )
            self.mark_launch(now)
            is_interruptible = is_background and self.background is not None and uses_no_cache(plan)
            future = self._start(plan, is_interruptible)
            self.mark_launch(0.0)
            step = InFlightStep(
                plan,
                scheduled,
                future,
                launched_s=now,
                is_alone=not self._in_flight,
                is_suspect=is_suspect,
                estimate_s=estimate_s,
                left_backlog=self.scheduler.queue.num_rows > 0,
                is_background=is_background,
                interrupts=self._interrupted is not None,
            )
            if is_interruptible:
                self._interrupted = step
            else:
                self._in_flight.append(step)
            future.add_done_callback(lambda _: self.wake())

    def _start(self, plan: StepPlan, is_interruptible: bool) -> Future[StepResult]:
        try:
            if is_interruptible and self.background is not None and isinstance(plan, PoolPlan):
                return self.background.launch(plan)
            return self.runner.launch(plan)
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def _hold_background(self, background: BackgroundSteps) -> None:
        """Hold the background step while others run or wait, but for a part of it now and then."""
        if not (self._in_flight or self._has_work(generates=False) or self._has_work(generates=True)):
            background.release()
            return
        background.hold()
        if self._lane.is_held_back:
            background.advance()
            self._lane.launched(is_background=True)

    def _may_launch(self) -> bool:
        """Whether a step may be launched behind those in flight. Rows of failed steps run with nothing else
        in flight, and nothing is launched behind a step that has just failed."""
        if not self._in_flight:
            return True
        last = self._in_flight[-1]
        if self._recovery.has_suspects or last.is_suspect or len(self._in_flight) >= self.depth:
            return False
        return not last.future.done() or last.future.exception() is None

    def _next_step(self) -> NextStep | None:
        """An interactive step; if nothing interactive can run, a background one. They never mix, so an
        interactive row never waits for background rows beside it."""
        if self._interrupted is not None:
            if (step := self._interactive_step()) is not None:
                self._lane.launched(is_background=False)
            return step
        if not self._has_background_work:
            return self._interactive_step()
        step = self._background_step() if self._lane.is_starving else None
        step = step or self._interactive_step()
        if step is None and not self._in_flight:  # an interactive request waits for one step at most
            step = self._background_step()
        if step is not None:
            self._lane.launched(is_background=step.is_background)
        return step

    @property
    def _has_background_work(self) -> bool:
        generation = self.generation
        return len(self.scheduler.background) > 0 or (generation is not None and generation.has_background)

    def _background_step(self) -> NextStep | None:
        """A background step. Pooling and generation take turns, if both wait."""
        if self._recovery.has_suspects:
            return None
        kinds = (self._background_pooling, self._background_generation)
        for kind in kinds if self._background_generated else kinds[::-1]:
            if (step := kind(self._lane.max_tokens(self.clock()))) is not None:
                self._background_generated = kind == self._background_generation
                return step
        return None

    def _background_pooling(self, max_tokens: int) -> NextStep | None:
        scheduled = self.scheduler.schedule_background(max_tokens)
        if not scheduled and self.background is not None:  # it is interrupted, so a row may be longer
            scheduled = self.scheduler.schedule_background(MAX_LONG_ROW * max_tokens, max_rows=1)
        if not scheduled and self._lane.may_run_long(self.clock()):
            scheduled = self.scheduler.schedule_background(max_tokens, first_fits=True)
        return self._planned(scheduled, is_background=True) if scheduled else None

    def _background_generation(self, max_tokens: int) -> NextStep | None:
        if self.generation is None:
            return None
        plan = self.generation.schedule_background(
            self.clock(), max_tokens, admit=not self.scheduler.isolated
        )
        return None if plan is None else NextStep(plan, [], is_background=True)

    def _interactive_step(self) -> NextStep | None:
        """A pooling or a generation step. They never mix: a model may attend in both directions in one and
        not in the other, and each kind keeps its fastest attention."""
        generation = self.generation
        if generation is None:
            return self._pooling_step()
        if not self._recovery.has_suspects and self._fair_share.prefers_generation:
            return self._generation_step(generation) or self._pooling_step()
        return self._pooling_step() or self._generation_step(generation)  # rows of failed steps go first

    def _pooling_step(self) -> NextStep | None:
        scheduled = self._recovery.next_retry() or self.scheduler.schedule()
        return self._planned(scheduled) if scheduled else None

    def _planned(self, scheduled: list[ScheduledRows], *, is_background: bool = False) -> NextStep:
        self.pending.mark_launched(scheduled, self.clock())
        chunking = self.scheduler.chunking
        block_size = chunking.pool.block_size if chunking else 0
        plan = build_plan(scheduled, block_size, self.scheduler.image_cache)
        return NextStep(plan, scheduled, is_background)

    def _generation_step(self, generation: GenerationScheduler) -> NextStep | None:
        # While isolated rows wait for blocks, no new sequence may take the blocks that others free.
        now = self.clock()
        plan = generation.schedule(now, admit=not self.scheduler.isolated)
        if self.max_queue_s:
            started = generation.num_started_tokens - self._num_started_tokens
            self._num_started_tokens += started
            self._prompt_throughput.record(
                started, began_s=now, now_s=now, has_backlog=bool(generation.queued_tokens)
            )
        return None if plan is None else NextStep(plan, [])

    def _has_work(self, generates: bool) -> bool:
        if generates:
            return self.generation is not None and self.generation.has_interactive
        return bool(len(self.scheduler.queue))


def uses_no_cache(plan: StepPlan) -> bool:
    """Whether a step neither reads nor writes what other steps may use: caches, image features, and the
    adapters of the step that runs, which the layers hold."""
    if not isinstance(plan, PoolPlan) or plan.kv is not None:
        return False
    if plan.adapters is not None or plan.images is not None:
        return False
    return all(variant.pairs is None for variant in plan.variants)


def deadline_error(request: Request | Comparison, now_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"not finished {now_s - request.arrival_s:.3f} s after arrival")
