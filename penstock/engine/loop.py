"""The engine loop: requests in, answers out, one step after another.

Synchronous and single-threaded: its owner calls `add`, `cancel` and `step` from one thread. The server runs
it in a separate process, offline engines in a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from penstock.backlog import Backlog
from penstock.engine.admission import Admission
from penstock.engine.arrivals import Arrivals
from penstock.engine.comparisons import Comparisons
from penstock.engine.dedup import Deduplicator
from penstock.engine.expiry import Expiry
from penstock.engine.grammars import Grammars
from penstock.engine.inflight import InFlightStep, StepsInFlight
from penstock.engine.pending import PendingRequests
from penstock.engine.recovery.failed_steps import StepRecovery
from penstock.engine.step_choice import NextStep, StepChooser
from penstock.engine.step_stats import StepStats
from penstock.errors import (
    BadValue,
    DeviceFailed,
    EngineError,
    NotPossible,
    PenstockError,
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
from penstock.scheduler.scheduler import Scheduler
from penstock.types import (
    Comparison,
    Failure,
    GeneratePlan,
    Outcome,
    PooledResult,
    PoolPlan,
    Request,
    SampledResult,
    StepResult,
)

log = logging.getLogger("penstock.engine")

_NO_ADAPTERS = AdapterStats(0, 0, 0, 0, 0)
BACKGROUND_STEP_S = 0.002  # target time of a background step while interactive requests arrive


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
        # Called with the time when a launch begins, because it may block for long, and with 0 when it ends.
        self.mark_launch: Callable[[float], None] = lambda began_s: None
        self.generation = generation  # None if the engine only serves pooling models
        self.background: BackgroundSteps | None = None  # None: steps cannot be interrupted
        self.idle_work: IdleWork | None = None  # None: the runner has none
        self._last_busy_s = clock()  # when something last ran or waited
        self.sleeper: Sleeper | None = None  # None: this engine cannot sleep
        self.why_not_sleep = "this engine cannot sleep"  # the reason, if there is no sleeper
        self.dedup = Deduplicator(scheduler.runs_soon) if share_identical else None
        self.pending = pending = PendingRequests(scheduler, self.dedup)
        self.admission = admission = Admission(scheduler, generation)
        self.held = admission.held  # work that waits for the engine to wake
        self._in_flight = StepsInFlight()
        self._recovery = StepRecovery(scheduler, pending, generation)
        self._comparisons = Comparisons()
        lane = BackgroundLane(scheduler.budget.max_tokens, background_step_s)
        self._arrivals = Arrivals(scheduler, pending, generation, admission, lane, lambda: self.wake())
        self._expiry = Expiry(scheduler, pending, generation, self._arrivals, self._comparisons, admission)
        self._chooser = StepChooser(
            scheduler,
            pending,
            generation,
            in_flight=self._in_flight,
            recovery=self._recovery,
            admission=admission,
            lane=lane,
            clock=lambda: self.clock(),
        )

    @property
    def max_queue_s(self) -> float:
        """Maximum time that a request waits until it starts; 0: no limit."""
        return self.admission.max_queue_s

    @max_queue_s.setter
    def max_queue_s(self, seconds: float) -> None:
        self.admission.max_queue_s = seconds

    @property
    def adapters(self) -> AdapterStore | None:
        """The adapters that requests may choose; None: this engine takes no adapters."""
        return self._arrivals.adapters

    @adapters.setter
    def adapters(self, adapters: AdapterStore | None) -> None:
        self._arrivals.adapters = adapters

    @property
    def grammars(self) -> Grammars | None:
        """The grammar compiler; None: this engine does not constrain its output."""
        return self._arrivals.grammars

    @grammars.setter
    def grammars(self, grammars: Grammars | None) -> None:
        self._arrivals.grammars = grammars

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        generating = self.generation is not None and self.generation.busy
        return bool(self.pending or self._in_flight or self._comparisons or self._arrivals or generating)

    @property
    def device_failure(self) -> DeviceFailed | None:
        """The error by which the device was lost; None while it works. After it no step can run."""
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
        return self._in_flight.num_rows

    @property
    def num_comparisons(self) -> int:
        """Comparisons that wait or run."""
        return len(self._comparisons)

    @property
    def oldest_launch_s(self) -> float:
        """When the oldest step in flight was launched; 0 if none is in flight."""
        return self._in_flight.oldest_launch_s

    @property
    def backlog(self) -> Backlog:
        """The waiting pooling work."""
        return self.admission.backlog

    @property
    def prompt_backlog(self) -> Backlog:
        """The prompts that wait to start generating."""
        return self.admission.prompt_backlog

    @property
    def can_fill_step(self) -> bool:
        """Whether enough tokens wait to fill a step that could be launched now."""
        enough = self.scheduler.queue.num_tokens >= self.scheduler.budget.max_tokens
        return enough and self._may_launch()

    # Requests.

    def add(self, request: Request) -> None:
        """Accept a request. Raises `BadValue`, `NotPossible` or `QueueFull` if it is refused."""
        self._check_id(request.id)
        self._arrivals.add(request, self.clock())

    def compare(self, comparison: Comparison) -> None:
        """Score vectors that the caller supplies, independently of steps. `QueueFull` if too much waits."""
        self._check_id(comparison.id)
        self._comparisons.add(comparison)
        self._launch_comparison()

    def submit(self, work: Request | Comparison) -> list[Outcome]:
        """Accept a request or a comparison. Returns its failure if it is refused. An unexpected error becomes
        a failure too, because no single request may stop the engine."""
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

    def cancel(self, request_id: str) -> None:
        """Drop a request. Its rows in flight finish and are ignored."""
        if self.pending.cancel(request_id) or self._comparisons.cancel(request_id):
            return
        self._arrivals.cancel(request_id)
        if self.generation is not None:
            self.generation.cancel(request_id)

    def generates(self, request_id: str) -> bool:
        """Whether this request may still generate tokens."""
        generation = self.generation
        return request_id in self._arrivals or (generation is not None and request_id in generation)

    def _check_id(self, request_id: str) -> None:
        generation = self.generation
        is_known = request_id in self.pending or request_id in self._comparisons.ids
        is_known = is_known or request_id in self._arrivals
        if is_known or (generation is not None and request_id in generation):
            raise BadValue(f"request_id {request_id!r} is already in use", param="request_id")

    # Adapters.

    def load_adapter(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        """Load the LoRA adapter in `folder`, so that requests can choose it. The future completes on another
        thread; it raises a `PenstockError` if the adapter does not fit the model. Ids are never reused."""
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
        requests += self._arrivals.requests()
        arrays = [request.adapters for request in requests if request.adapters is not None]
        return {int(each) for array in arrays for each in np.unique(array)}

    def unload_adapter(self, adapter_id: int) -> None:
        """Refuse new requests for an adapter. Requests that were accepted before still finish."""
        if self.adapters is not None:
            self.adapters.unload(adapter_id)

    # Turns of the loop.

    def next_deadline_s(self) -> float | None:
        """The earliest deadline, or the time when waiting background rows may run if that is earlier."""
        times = self._expiry.next_s(), self._chooser.next_chance_s()
        return min((time_s for time_s in times if time_s is not None), default=None)

    def step(self) -> list[Outcome]:
        """One turn of the loop: expire, admit, collect, launch."""
        now_s = self.clock()
        outcomes = self._expiry.expire(now_s) + self._generation_failures()
        outcomes += self._arrivals.admit(now_s)
        outcomes += self._collect()
        if self.device_failure is not None:
            return outcomes + self._fail_all(self.device_failure)
        self._launch()
        if self.idle_work is not None and (outcomes or self.busy):
            self._last_busy_s = self.clock()
        return outcomes

    def idle_work_due_s(self) -> float | None:
        """When the runner may do idle work; None: it has none, or the engine is busy."""
        if self.idle_work is None or self.busy:
            return None
        min_idle_s = self.idle_work.min_idle_s
        return None if min_idle_s is None else self._last_busy_s + min_idle_s

    def run_idle_work(self) -> None:
        """Let the runner do a short piece of idle work, if it is due. The owner calls this after a wait in
        which no request arrived."""
        due_s = self.idle_work_due_s()
        if due_s is None or self.idle_work is None or self.clock() < due_s:
            return
        self.mark_launch(self.clock())
        self.idle_work.run_idle()
        self.mark_launch(0.0)

    def forget_cached(self) -> None:
        """Forget cached prefixes, vectors and images, whose contents are lost. No step may be in flight."""
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
        """Assert that nothing is held for requests that have ended. For tests, while the engine is idle."""
        if self.generation is not None:
            self.generation.check_integrity()
        if not self.busy and self.scheduler.chunking is not None:
            self.scheduler.chunking.pool.check_integrity()

    def close(self) -> None:
        self._arrivals.close()
        self.runner.close()

    # Collect.

    def _collect(self) -> list[Outcome]:
        """The outcomes of finished steps and comparisons."""
        outcomes: list[Outcome] = []
        for step in self._in_flight.take_finished():
            if (error := step.future.exception()) is None:
                outcomes += self._collect_result(step, step.future.result())
            else:
                self._chooser.failed(step)
                outcomes += self._recovery.step_failed(step, self._in_flight.steps, error)
        return outcomes + self._comparisons.collect(self.clock())

    def _collect_result(self, step: InFlightStep, result: StepResult) -> list[Outcome]:
        plan, generation = step.plan, self.generation
        self._chooser.succeeded(step, result)
        self._recovery.step_succeeded(step)
        if plan.images is not None and self.scheduler.image_cache is not None:
            self.scheduler.image_cache.publish(plan.images)
        outcomes: list[Outcome] = []
        if isinstance(plan, PoolPlan) and isinstance(result, PooledResult):
            if not step.is_background:
                self.admission.pooled(step, self.clock(), is_last=not self._in_flight.steps)
            outcomes += self.pending.deliver(step, plan, result)
        elif isinstance(plan, GeneratePlan) and isinstance(result, SampledResult) and generation is not None:
            outcomes += generation.collect(plan, result)
            outcomes += self._generation_failures()
        else:
            raise TypeError(f"a {type(plan).__name__} cannot give a {type(result).__name__}")
        self.observe(StepStats.of(step, result, self.scheduler.budget.max_tokens, self.clock()))
        return outcomes

    def _generation_failures(self) -> list[Outcome]:
        """Failures of sequences that cannot continue."""
        failures = {} if self.generation is None else self.generation.take_failures()
        return [Failure(request_id, error) for request_id, error in failures.items()]

    def _fail_all(self, error: DeviceFailed) -> list[Outcome]:
        """Fail every request; the owner of this engine has to build another."""
        outcomes = self.pending.fail_all(error) + self._comparisons.fail_all(error)
        if self.generation is not None:
            outcomes += [Failure(key, error) for key in self.generation.clear()]
        outcomes += [Failure(key, error) for key in self._arrivals.clear()]
        self._in_flight.clear()
        self._recovery.clear()
        return outcomes

    # Launch.

    def _launch(self) -> None:
        """Launch the next comparison, and steps until `depth` are in flight or nothing can run."""
        self._launch_comparison()
        while self._may_launch() and self._launch_step():
            pass
        if self.background is not None and self._in_flight.interrupted is not None:
            self._chooser.hold_interrupted(self.background)

    def _launch_comparison(self) -> None:
        if self._comparisons.can_launch:
            self._comparisons.launch(self.runner.compare, lambda: self.wake(), self.clock())

    def _may_launch(self) -> bool:
        """Whether a step may be launched behind those in flight. Rows of failed steps run with nothing else
        in flight, and nothing is launched behind a step that has just failed."""
        if not (steps := self._in_flight.steps):
            return True
        last = steps[-1]
        if self._recovery.has_suspects or last.is_suspect or len(steps) >= self.depth:
            return False
        return not last.future.done() or last.future.exception() is None

    def _launch_step(self) -> bool:
        """Launch the next step; False if nothing can run."""
        in_flight, is_suspect = self._in_flight, self._recovery.has_suspects
        if (chosen := self._chooser.next_step(can_interrupt=self.background is not None)) is None:
            return False
        plan, now_s = chosen.plan, self.clock()
        estimate_s = self._chooser.launched(chosen, now_s)
        self.mark_launch(now_s)
        future = self._start(chosen)
        self.mark_launch(0.0)
        step = InFlightStep(
            plan,
            chosen.scheduled,
            future,
            launched_s=now_s,
            is_alone=not in_flight.steps,
            is_suspect=is_suspect,
            estimate_s=estimate_s,
            left_backlog=self.scheduler.queue.num_rows > 0,
            is_background=chosen.is_background,
            interrupts=in_flight.interrupted is not None,
        )
        if chosen.is_interruptible:
            in_flight.interrupted = step
        else:
            in_flight.steps.append(step)
        future.add_done_callback(lambda _: self.wake())
        return True

    def _start(self, chosen: NextStep) -> Future[StepResult]:
        try:
            if chosen.is_interruptible and self.background is not None and isinstance(chosen.plan, PoolPlan):
                return self.background.launch(chosen.plan)
            return self.runner.launch(chosen.plan)
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed
