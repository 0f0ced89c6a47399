"""The engine: requests in, answers out, one step after another.

Synchronous and single-threaded; whoever owns it calls `add`, `cancel` and `step` from one thread. The
server runs it in a process of its own, offline use in a thread: the same code.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.engine.dedup import Deduplicator, some_rows
from penstock.engine.fair_share import FairShare
from penstock.engine.grammars import Grammars
from penstock.engine.progress import Empty, Follower, Part, Progress, rows_of, sound
from penstock.engine.recovery.oom import Pressure, halves
from penstock.engine.recovery.poisoned import Rows, Spoiled, sound_rows, without
from penstock.errors import (
    BadValue,
    DeadlineExceeded,
    DeviceFailed,
    DeviceOutOfMemory,
    NotPossible,
    PenstockError,
    RowFailed,
)
from penstock.kvcache.blocks import BlockPool
from penstock.runner.base import Runner
from penstock.scheduler.generation import GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Scheduler, Share
from penstock.types import (
    Array,
    Comparison,
    Failure,
    GeneratePlan,
    Outcome,
    PooledOutput,
    PooledResult,
    PoolPlan,
    Request,
    RowSlice,
    SampledResult,
    StepPlan,
    StepResult,
    Timings,
)

log = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step was, for metrics."""

    tokens: int
    rows: int
    requests: int
    fill: float  # tokens over the budget
    step_s: float
    device_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    plan: StepPlan
    shares: list[Share]
    future: Future[StepResult]
    launched_s: float
    apart: bool  # nothing else is in flight
    suspected: bool  # some of its rows may be at fault: nothing is launched behind it
    estimate: float  # seconds that it is thought to take
    lost: Rows = field(default_factory=set)  # rows that stood on a step that failed; they begin again


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
        lane: GenerationScheduler | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.depth = depth
        self.clock = clock
        self.wake = wake  # called from another thread when a step has finished
        self.observe = observe
        self.twins = Deduplicator() if share_identical else None
        self.lane = lane  # of requests whose rows are continued
        self.grammars = grammars  # of those that must follow one, before they join the lane
        self.empty: Empty = np.empty  # where values of answers are to lie
        self._turns = FairShare()
        self._progress: dict[str, Progress] = {}
        self._flights: deque[_Flight] = deque()
        self._relays = 0
        self._comparisons: dict[str, tuple[Comparison, Future[Array]]] = {}
        self._suspects: deque[list[Share]] = deque()  # shares of failed steps, to be run apart, in order
        self._pressure = Pressure.of(scheduler.budget)
        self._lane_pressure = Pressure.of(scheduler.budget)
        self.broken: DeviceFailed | None = None  # the device is lost: nothing can be run any more
        self._block_size = scheduler.chunking.pool.block_size if scheduler.chunking else 0

    @property
    def busy(self) -> bool:
        generating = (self.lane is not None and self.lane.busy) or self.grammars
        return bool(self._progress or self._flights or self._comparisons or generating)

    @property
    def pool(self) -> BlockPool | None:
        """Memory of rows that go on over steps, where there is some."""
        if self.scheduler.chunking is not None:
            return self.scheduler.chunking.pool
        return None if self.lane is None else self.lane.pool

    @property
    def running(self) -> int:
        """Rows in flight."""
        return sum(flight.plan.num_rows for flight in self._flights)

    def add(self, request: Request) -> None:
        """Take a request on; `QueueFull` or `BadValue` if it cannot be."""
        if request.id in self._progress or self.generates(request.id):
            raise BadValue(f"request_id {request.id!r} is already in use", param="request_id")
        if request.sampling is not None:
            self._continue(request)
            return
        if self.twins is None or request.pairs is not None:
            self.scheduler.add(request)
            self._begin(Progress.of(request))
            return
        split = self.twins.split(request)
        if split.job.num_rows:
            self.scheduler.add(split.job)
        self._begin(self.twins.begin(request, split))

    def _begin(self, progress: Progress) -> None:
        progress.empty = self.empty
        self._progress[progress.request.id] = progress

    def _continue(self, request: Request) -> None:
        """Into the lane; where there is a grammar, by way of its compiler."""
        assert request.sampling is not None
        if self.lane is None:
            raise NotPossible("this engine does not generate")
        if request.sampling.grammar is None:
            self.lane.add(request)
        elif self.grammars is None:
            raise NotPossible("this engine does not constrain its output")
        else:
            self.lane.check(request)
            self.grammars.begin(request, lambda: self.wake())

    def compare(self, comparison: Comparison) -> None:
        """Take on vectors to be compared; they wait for no step."""
        future = self.runner.compare(comparison)
        self._comparisons[comparison.id] = (comparison, future)
        future.add_done_callback(lambda _: self.wake())

    def cancel(self, request_id: str) -> None:
        """Forget a request. Rows that are in flight run to their end and are dropped."""
        if (progress := self._progress.get(request_id)) is not None:
            self._let_go(progress)
            return
        if self.grammars is not None:
            self.grammars.cancel(request_id)
        if self.lane is not None:
            self.lane.cancel(request_id)

    def generates(self, request_id: str) -> bool:
        """Whether further tokens of this request may come."""
        compiling = self.grammars is not None and request_id in self.grammars
        return compiling or (self.lane is not None and request_id in self.lane)

    def next_deadline_s(self) -> float | None:
        """When the next request is late, of those that have a deadline."""
        waiting = self.scheduler.line.next_deadline_s()
        generating = None if self.lane is None else self.lane.next_deadline_s()
        compiling = None if self.grammars is None else self.grammars.next_deadline_s()
        return min((d for d in (waiting, generating, compiling) if d is not None), default=None)

    def check_integrity(self) -> None:
        """Nothing is held that no request has; called by tests when idle."""
        if self.lane is not None:
            self.lane.check_integrity()
        if not self.busy and self.scheduler.chunking is not None:
            self.scheduler.chunking.pool.check_integrity()

    def step(self) -> list[Outcome]:
        """One turn: let go of what is late, collect what is done, launch what fits."""
        outcomes = self._expire()
        outcomes += self._compiled()
        outcomes += self._collect()
        outcomes += self._compared()
        if self.broken is not None:
            return outcomes + self._give_up(self.broken)
        self._launch()
        return outcomes

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()
        self.runner.close()

    def _expire(self) -> list[Outcome]:
        now = self.clock()
        outcomes: list[Outcome] = []
        for request in self.scheduler.expire(now):
            error = DeadlineExceeded(f"not finished {now - request.arrival_s:.3f} s after arrival")
            if (progress := self._progress.get(request.id)) is not None:
                outcomes += self._fail(progress, error)
        for request in () if self.lane is None else self.lane.expired(now):
            error = DeadlineExceeded(f"not finished {now - request.arrival_s:.3f} s after arrival")
            outcomes.append(Failure(request.id, error))
        for request, why in () if self.grammars is None else self.grammars.expired(now):
            outcomes.append(Failure(request.id, why))
        return outcomes + self._let_go_broken()

    def _let_go_broken(self) -> list[Outcome]:
        """Requests of the lane that cannot go on."""
        broken = {} if self.lane is None else self.lane.let_go()
        return [Failure(request_id, why) for request_id, why in broken.items()]

    def _compiled(self) -> list[Outcome]:
        """Requests whose grammars are ready join the lane."""
        outcomes: list[Outcome] = []
        for request, found in () if self.grammars is None else self.grammars.ready():
            assert self.lane is not None
            try:
                if isinstance(found, PenstockError):
                    raise found
                self.lane.add(request, found)
            except PenstockError as error:
                outcomes.append(Failure(request.id, error))
        return outcomes

    def _launch(self) -> None:
        while self._may_launch():
            suspected = self._suspecting
            if (step := self._next_step()) is None:
                return
            (plan, shares), now = step, self.clock()
            generates = isinstance(plan, GeneratePlan)
            estimate = self._turns.launched(generates, plan.num_tokens, others=self._has_work(not generates))
            try:
                future = self.runner.launch(plan)
            except Exception as error:
                future = Future()
                future.set_exception(error)
            apart = not self._flights
            self._flights.append(_Flight(plan, shares, future, now, apart, suspected, estimate))
            future.add_done_callback(lambda _: self.wake())

    @property
    def _suspecting(self) -> bool:
        """Whether rows of failed steps are to be run, before all else and apart."""
        return bool(self._suspects or self.scheduler.apart)

    def _may_launch(self) -> bool:
        """Parts of a failed step run one at a time: the next may need what the one before it wrote. So does
        whatever would follow a step that has just failed."""
        if not self._flights:
            return True
        last = self._flights[-1]
        if self._suspecting or last.suspected or len(self._flights) >= self.depth:
            return False
        return not last.future.done() or last.future.exception() is None

    @property
    def starving(self) -> bool:
        """Whether enough is waiting to fill a step that could be launched now."""
        return self.scheduler.line.tokens >= self.scheduler.budget.tokens and self._may_launch()

    def _next_step(self) -> tuple[StepPlan, list[Share]] | None:
        """Steps that pool and steps that generate take turns where both have work: tokens of a model may
        see each other in one and not in the other, and each kind keeps its fastest attention."""
        if self.lane is None:
            return self._pooling_step()
        turns = (self._pooling_step, self._generation_step)
        pool_first = self._suspecting or not self._turns.generates  # parts of a failed step before all else
        for next_of in turns if pool_first else reversed(turns):
            if (step := next_of()) is not None:
                return step
        return None

    def _has_work(self, generates: bool) -> bool:
        if generates:
            return self.lane is not None and self.lane.busy
        return bool(len(self.scheduler.line))

    def _generation_step(self) -> tuple[StepPlan, list[Share]] | None:
        assert self.lane is not None
        # Rows that run apart and find no memory get what others leave.
        plan = self.lane.schedule(self.clock(), begin=not self.scheduler.apart)
        return None if plan is None else (plan, [])

    def _pooling_step(self) -> tuple[StepPlan, list[Share]] | None:
        if not (shares := self._next_shares()):
            return None
        now = self.clock()
        for share in shares:
            progress = self._progress.get(share.request.id)
            if progress is not None and progress.first_launch_s is None:
                progress.first_launch_s = now
        return build_plan(shares, self._block_size), shares

    def _next_shares(self) -> list[Share]:
        while self._suspects:
            shares = [s for s in self._suspects.popleft() if s.tables or self._wanted(s.request)]
            if shares:
                return shares
        return self.scheduler.schedule()

    def _collect(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while self._flights and self._flights[0].future.done():
            flight = self._flights.popleft()
            error = flight.future.exception()
            generates = isinstance(flight.plan, GeneratePlan)
            if error is not None:
                self._turns.failed(generates, flight.estimate)
                outcomes += self._recover(flight, error)
                continue
            result = flight.future.result()
            self._turns.ended(generates, flight.plan.num_tokens, flight.estimate, result.device_s)
            if self._pressure.now < self._pressure.full:
                self._pressure.went_well()
                self._set_budget()
            if isinstance(flight.plan, GeneratePlan) and isinstance(result, SampledResult):
                outcomes += self._collect_tokens(flight.plan, result)
            elif isinstance(flight.plan, PoolPlan) and isinstance(result, PooledResult):
                outcomes += self._hand_out(flight, flight.plan, result)
            self.observe(self._stats(flight, result))
        return outcomes

    def _collect_tokens(self, plan: GeneratePlan, result: SampledResult) -> list[Outcome]:
        assert self.lane is not None
        self._lane_pressure.went_well()
        self._set_lane_budget(self.lane)
        return [*self.lane.collect(plan, result), *self._let_go_broken()]

    def _compared(self) -> list[Outcome]:
        done = [key for key, (_, future) in self._comparisons.items() if future.done()]
        outcomes: list[Outcome] = []
        for key in done:
            comparison, future = self._comparisons.pop(key)
            if (error := future.exception()) is not None:
                outcomes.append(
                    Failure(key, RowFailed(f"the comparison failed: {type(error).__name__}: {error}"))
                )
                continue
            waited = max(0.0, self.clock() - comparison.arrival_s)
            outcomes.append(PooledOutput(key, future.result(), Timings(device_s=waited)))
        return outcomes

    def _hand_out(self, flight: _Flight, plan: PoolPlan, result: PooledResult) -> list[Outcome]:
        """Give each request its rows; those that are complete become answers."""
        outcomes: list[Outcome] = []
        unsound = self._unsound(flight, plan, result)
        for piece, values in self._sound_rows(flight, plan, result.outputs):
            progress = self._progress.get(piece.request.id)
            if progress is None or progress.job is not piece.request:
                continue  # cancelled meanwhile
            if unsound and piece.request.id in unsound:
                outcomes += self._fail(progress, RowFailed("the model gave values that are not finite"))
                continue
            progress.store(piece, values)
            progress.device_s += result.device_s
            if progress.complete:
                outcomes += self._finish(progress)
        return outcomes

    @staticmethod
    def _sound_rows(
        flight: _Flight, plan: PoolPlan, arrays: tuple[Array, ...]
    ) -> list[tuple[RowSlice, tuple[Part, ...]]]:
        """What each slice of a step gets, but for the rows that stood on a step that failed."""
        rows = rows_of(plan, arrays)
        if not flight.lost:
            return rows
        left = (sound_rows(piece, parts, flight.lost) for piece, parts in rows)
        return [each for each in left if each is not None]

    @classmethod
    def _unsound(cls, flight: _Flight, plan: PoolPlan, result: PooledResult) -> set[str]:
        """The requests that have values which are not finite: asked of the whole step first."""
        checked, flags = result.finite or result.outputs, bool(result.finite)
        if sound(checked, flags):
            return set()
        rows = cls._sound_rows(flight, plan, checked)
        return {piece.request.id for piece, parts in rows if not sound(parts, flags)}

    def _finish(self, progress: Progress) -> list[Outcome]:
        """The answer of a complete request, and of those that waited for nothing but its rows."""
        progress.spread()
        self._forget(progress, well=True)
        outcomes: list[Outcome] = [] if progress.hidden else [self._answer(progress)]
        for follower in progress.leave():
            other = follower.progress
            if self._progress.get(other.request.id) is not other:
                continue
            other.receive(progress, follower)
            if other.complete:
                outcomes += self._finish(other)
        return outcomes

    @staticmethod
    def _answer(progress: Progress) -> PooledOutput:
        request = progress.request
        first, *more = progress.values
        assert first is not None and progress.first_launch_s is not None
        timings = Timings(max(0.0, progress.first_launch_s - request.arrival_s), progress.device_s)
        return PooledOutput(request.id, first, timings, tuple(array for array in more if array is not None))

    def _recover(self, flight: _Flight, error: BaseException) -> list[Outcome]:
        if isinstance(error, DeviceFailed):
            self.broken = error
            return []
        if isinstance(flight.plan, GeneratePlan):
            return self._relieve(flight.plan, error)
        behind = self._spoil(flight)
        if isinstance(error, DeviceOutOfMemory):
            self._ran_out(flight.plan, error)
            if flight.plan.kv is None or not self._flights:
                self._begin_again([behind])
                return self._divide(flight, error)
            self.scheduler.retract(flight.shares)
            self._begin_again([without(flight.shares, flight.lost) + behind])
            return []
        self.scheduler.retract(flight.shares)
        return self._isolate(flight, behind, error)

    def _spoil(self, flight: _Flight) -> list[Share]:
        """Rows of the steps in flight that stood on one that failed: what they give is dropped."""
        spoiled = Spoiled(flight.shares, self._block_size)
        found: list[Share] = []
        for later in self._flights:
            shares = without(spoiled.of(later.shares), later.lost)
            for share in shares:
                stored = () if share.stored is None else share.stored.tolist()
                later.lost.update((share.request, row) for row in (*share.rows.tolist(), *stored))
            found += shares
        self.scheduler.retract(found)
        return found

    def _begin_again(self, groups: list[list[Share]]) -> None:
        """Run rows once more from their beginning, apart from all others; each row once."""
        seen: Rows = set()
        wanted: list[list[Share]] = []
        for group in groups:
            wanted.append([])
            for share in group:
                if self._wanted(share.request) and (left := without([share], seen)):
                    wanted[-1] += left
                    stored = () if left[0].stored is None else left[0].stored.tolist()
                    seen.update((share.request, row) for row in (*left[0].rows.tolist(), *stored))
        self.scheduler.again([group for group in wanted if group])

    def _wanted(self, request: Request) -> bool:
        """Whether a request still waits for rows: it has neither ended nor been cancelled."""
        progress = self._progress.get(request.id)
        return progress is not None and progress.job is request

    def _ran_out(self, plan: StepPlan, error: DeviceOutOfMemory) -> None:
        self._pressure.ran_out(plan.num_tokens)
        log.warning("a step of %d tokens ran out of memory: %s", plan.num_tokens, error.message)
        self._set_budget()

    def _divide(self, flight: _Flight, error: DeviceOutOfMemory) -> list[Outcome]:
        """Memory ran out: run the rows again in two parts. A row that cannot be divided gets the device for
        itself before it is given up.

        Rows that go on over steps keep their memory meanwhile: nothing is planned before the parts have run.
        Of cancelled ones the same is true, and others may have found the beginning that they were to write.
        """
        shares = [s for s in without(flight.shares, flight.lost) if s.tables or self._wanted(s.request)]
        if not shares:
            return []
        if (parts := halves(shares)) is not None:
            self._suspects.extendleft(part for part in reversed(parts) if part)
            return []
        if not flight.apart:
            self._suspects.appendleft(shares)
            return []
        self.scheduler.retract(shares)
        outcomes: list[Outcome] = []
        for share in shares:
            tokens = int(share.request.lengths[share.rows].sum())
            message = f"a row of {tokens} tokens needs more memory than the device has: {error.message}"
            if (progress := self._progress.get(share.request.id)) is not None:
                outcomes += self._fail(progress, RowFailed(message))
        return outcomes

    def _set_budget(self) -> None:
        self.scheduler.budget = replace(self.scheduler.budget, tokens=self._pressure.now)

    def _give_up(self, error: DeviceFailed) -> list[Outcome]:
        """Every request fails; whoever owns this engine has to build another."""
        outcomes: list[Outcome] = [
            Failure(progress.request.id, error) for progress in self._progress.values() if not progress.hidden
        ]
        for progress in list(self._progress.values()):
            self.scheduler.cancel(progress.request.id)
            self._forget(progress, well=False)
            progress.leave()
        outcomes += [Failure(key, error) for key in self._comparisons]
        self._comparisons.clear()
        if self.lane is not None:
            outcomes += [Failure(key, error) for key in self.lane.clear()]
        if self.grammars is not None:
            outcomes += [Failure(key, error) for key in self.grammars.clear()]
        self._flights.clear()
        self._suspects.clear()
        return outcomes

    def _isolate(self, flight: _Flight, behind: list[Share], error: BaseException) -> list[Outcome]:
        """A step failed: run its requests again in halves until the one at fault stands alone. Rows that
        stood on it go with their request, or after all others."""
        shares = [s for s in without(flight.shares, flight.lost) if self._wanted(s.request)]
        outcomes: list[Outcome] = []
        if len(shares) == 1 and len(flight.shares) == 1:
            failed = self._progress[shares.pop().request.id]
            outcomes += self._fail(failed, RowFailed(f"the step failed: {type(error).__name__}: {error}"))
        middle = len(shares) // 2
        suspects = [shares[:middle], shares[middle:]]
        for group in suspects:
            names = {share.request.id for share in group}
            group += [share for share in behind if share.request.id in names]
        self._begin_again([*suspects, behind])
        return outcomes

    def _relieve(self, plan: GeneratePlan, error: BaseException) -> list[Outcome]:
        """A step that generates failed. Where memory ran out its rows begin again in smaller steps; else, or
        if it cannot be smaller, the request at fault is looked for."""
        assert self.lane is not None
        full = isinstance(error, DeviceOutOfMemory)
        if full:
            self._lane_pressure.ran_out(plan.num_tokens)
            self._set_lane_budget(self.lane)
            log.warning("a step of %d tokens ran out of memory: %s", plan.num_tokens, error)
        why = RowFailed(f"the step failed: {type(error).__name__}: {error}")
        blame = not full or plan.num_tokens == 1
        return [Failure(request.id, why) for request in self.lane.failed(plan, blame=blame)]

    def _set_lane_budget(self, lane: GenerationScheduler) -> None:
        if lane.limits.tokens != self._lane_pressure.now:
            lane.limits = replace(lane.limits, tokens=self._lane_pressure.now)

    def _fail(self, progress: Progress, error: PenstockError) -> list[Outcome]:
        """End a request with an error. What others wanted of it is run for them."""
        outcomes: list[Outcome] = [] if progress.hidden else [Failure(progress.request.id, error)]
        return outcomes + self._let_go(progress, error)

    def _let_go(self, progress: Progress, error: PenstockError | None = None) -> list[Outcome]:
        self.scheduler.cancel(progress.request.id)
        self._forget(progress, well=False)
        outcomes: list[Outcome] = []
        for follower in progress.leave():
            other = follower.progress
            if self._progress.get(other.request.id) is not other:
                continue
            if progress.hidden and error is not None:  # its rows were run for this one alone
                outcomes += self._fail(other, error)
            else:
                self._run_instead(follower)
        return outcomes

    def _run_instead(self, follower: Follower) -> None:
        """The request that had these rows has gone: run them for the one that waits for them. It was
        admitted long ago, so the line takes them however long it is."""
        other, rows = follower.progress, follower.rows
        self._relays += 1
        job = some_rows(other.request, rows, f"{other.request.id}~{self._relays}")
        self.scheduler.line.join(job)
        relay = Progress.of(job)
        relay.hidden = True
        relay.followers.append(Follower(other, rows, np.arange(len(rows), dtype=np.int32)))
        self._begin(relay)

    def _forget(self, progress: Progress, *, well: bool) -> None:
        del self._progress[progress.request.id]
        self.scheduler.ended(progress.request, well=well)
        if self.twins is not None:
            self.twins.forget(progress)

    def _stats(self, flight: _Flight, result: StepResult) -> StepStats:
        plan = flight.plan
        return StepStats(
            tokens=plan.num_tokens,
            rows=plan.num_rows,
            requests=len(plan.slices) if isinstance(plan, PoolPlan) else plan.num_rows,
            fill=min(1.0, plan.num_tokens / self.scheduler.budget.tokens),
            step_s=self.clock() - flight.launched_s,
            device_s=result.device_s,
        )
