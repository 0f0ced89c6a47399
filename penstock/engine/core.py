"""The engine: requests in, answers out, one step after another.

Synchronous and single-threaded; whoever owns it calls `add`, `cancel` and `step` from one thread. The
server runs it in a process of its own, offline use in a thread: the same code.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from penstock.core import (
    Answer,
    Array,
    Ints,
    Request,
    RowSlice,
    StepPlan,
    StepResult,
    Timings,
    cumulative,
    split_rows,
)
from penstock.errors import BadValue, DeadlineExceeded, PenstockError, RowFailed
from penstock.runner.base import Runner
from penstock.scheduler.plan import build_plan, ragged_arange, tokens_of
from penstock.scheduler.scheduler import Scheduler, Share


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A request that ended without a result."""

    id: str
    error: PenstockError


Outcome = Answer | Failure


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step was, for metrics."""

    tokens: int
    rows: int
    requests: int
    fill: float  # tokens over the budget
    step_s: float
    device_s: float


@dataclass(slots=True, eq=False)
class _Progress:
    """A request on its way: its rows arrive over one or more steps."""

    request: Request
    values: Array | None = None
    rows_done: int = 0
    first_launch_s: float | None = None
    device_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    plan: StepPlan
    future: Future[StepResult]
    launched_s: float


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
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.depth = depth
        self.clock = clock
        self.wake = wake  # called from another thread when a step has finished
        self.observe = observe
        self._progress: dict[str, _Progress] = {}
        self._flights: deque[_Flight] = deque()
        self._suspects: deque[list[Share]] = deque()  # shares of failed steps, to be run apart
        self._block_size = scheduler.chunking.pool.block_size if scheduler.chunking else 0

    @property
    def busy(self) -> bool:
        return bool(self._progress) or bool(self._flights)

    @property
    def running(self) -> int:
        """Rows in flight."""
        return sum(flight.plan.num_rows for flight in self._flights)

    def add(self, request: Request) -> None:
        """Take a request on; `QueueFull` or `BadValue` if it cannot be."""
        if request.id in self._progress:
            raise BadValue(f"request_id {request.id!r} is already in use", param="request_id")
        self.scheduler.add(request)
        self._progress[request.id] = _Progress(request)

    def cancel(self, request_id: str) -> None:
        """Forget a request. Rows that are in flight run to their end and are dropped."""
        self.scheduler.cancel(request_id)
        self._progress.pop(request_id, None)

    def step(self) -> list[Outcome]:
        """One turn: let go of what is late, collect what is done, launch what fits."""
        outcomes = self._expire()
        outcomes += self._collect()
        self._launch()
        return outcomes

    def close(self) -> None:
        self.runner.close()

    def _expire(self) -> list[Outcome]:
        now = self.clock()
        late = self.scheduler.expire(now)
        for request in late:
            self._progress.pop(request.id, None)
        return [
            Failure(
                request.id, DeadlineExceeded(f"not finished {now - request.arrival_s:.3f} s after arrival")
            )
            for request in late
        ]

    def _launch(self) -> None:
        while len(self._flights) < self.depth and (shares := self._next_shares()):
            plan, now = build_plan(shares, self._block_size), self.clock()
            for share in shares:
                progress = self._progress[share.request.id]
                if progress.first_launch_s is None:
                    progress.first_launch_s = now
            try:
                future = self.runner.launch(plan)
            except Exception as error:
                future = Future()
                future.set_exception(error)
            self._flights.append(_Flight(plan, future, now))
            future.add_done_callback(lambda _: self.wake())

    def _next_shares(self) -> list[Share]:
        while self._suspects:
            shares = [s for s in self._suspects.popleft() if s.request.id in self._progress]
            if shares:
                return shares
        return self.scheduler.schedule()

    def _collect(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while self._flights and self._flights[0].future.done():
            flight = self._flights.popleft()
            error = flight.future.exception()
            if error is not None:
                outcomes += self._isolate(flight.plan, error)
                continue
            result = flight.future.result()
            outcomes += self._hand_out(flight.plan, result)
            self.observe(self._stats(flight, result))
        return outcomes

    def _hand_out(self, plan: StepPlan, result: StepResult) -> list[Outcome]:
        """Give each request its rows; those that are complete become answers."""
        outcomes: list[Outcome] = []
        finite = rows_of(plan, result.finite or result.outputs)
        for (piece, values), (_, checked) in zip(rows_of(plan, result.outputs), finite, strict=True):
            progress = self._progress.get(piece.request.id)
            if progress is None or progress.request is not piece.request:
                continue  # cancelled meanwhile
            if not (checked if result.finite else np.isfinite(checked)).all():
                outcomes += self._fail(piece.request, RowFailed("the model gave values that are not finite"))
                continue
            self._store(progress, piece, values)
            progress.device_s += result.device_s
            if progress.rows_done == piece.request.num_rows:
                outcomes.append(self._answer(progress))
        return outcomes

    @staticmethod
    def _store(progress: _Progress, piece: RowSlice, values: Array) -> None:
        request, finished = piece.request, piece.finished
        per_token = request.params.per_token
        progress.rows_done += len(finished)
        if not len(values):
            return  # rows that go on in later steps
        if progress.values is None:
            rows = request.num_tokens if per_token else request.num_rows
            progress.values = np.empty((rows, *values.shape[1:]), dtype=values.dtype)
        progress.values[token_places(piece) if per_token else piece.rows[finished]] = values

    def _answer(self, progress: _Progress) -> Answer:
        request = progress.request
        del self._progress[request.id]
        assert progress.values is not None and progress.first_launch_s is not None
        timings = Timings(max(0.0, progress.first_launch_s - request.arrival_s), progress.device_s)
        return Answer(request.id, progress.values, timings)

    def _isolate(self, plan: StepPlan, error: BaseException) -> list[Outcome]:
        """A step failed: run its requests again in halves until the one at fault stands alone."""
        shares = [Share(piece.request, piece.rows) for piece in plan.slices]
        shares = [share for share in shares if share.request.id in self._progress]
        for share in shares if plan.kv is not None else ():
            self.scheduler.forget_open(share.request.id, share.rows)
        if len(shares) == 1:
            return self._fail(
                shares[0].request, RowFailed(f"the step failed: {type(error).__name__}: {error}")
            )
        middle = len(shares) // 2
        self._suspects.extend(half for half in (shares[:middle], shares[middle:]) if half)
        return []

    def _fail(self, request: Request, error: PenstockError) -> list[Outcome]:
        self.cancel(request.id)
        return [Failure(request.id, error)]

    def _stats(self, flight: _Flight, result: StepResult) -> StepStats:
        plan = flight.plan
        return StepStats(
            tokens=plan.num_tokens,
            rows=plan.num_rows,
            requests=len(plan.slices),
            fill=min(1.0, plan.num_tokens / self.scheduler.budget.tokens),
            step_s=self.clock() - flight.launched_s,
            device_s=result.device_s,
        )


def rows_of(plan: StepPlan, arrays: Sequence[Array]) -> list[tuple[RowSlice, Array]]:
    """Each slice of the plan with its rows (of per-token tasks, its tokens) of one array a variant."""
    if plan.variants and (first := plan.variants[0]).rows is None:
        values = arrays[0]
        if not first.params.per_token:
            return [(piece, values[piece.slots]) for piece in plan.slices]
        return list(zip(plan.slices, _tokens_by_slice(plan, values), strict=True))
    at = dict.fromkeys((variant.params for variant in plan.variants), 0)
    of_params = {variant.params: array for variant, array in zip(plan.variants, arrays, strict=True)}
    out = []
    for piece in plan.slices:  # a variant lists the slots of its slices in this same order
        params = piece.request.params
        per_token = params.per_token
        count = int(plan.lengths[piece.slots].sum()) if per_token else len(piece.finished)
        first_row = at.get(params, 0)
        values = of_params[params][first_row : first_row + count] if count else _NOTHING
        out.append((piece, values))
        at[params] = first_row + count
    return out


def _tokens_by_slice(plan: StepPlan, values: Array) -> list[Array]:
    """One gather for the whole step, none where its order is already that of the slices, then views."""
    slots = np.concatenate([piece.slots for piece in plan.slices])
    if (np.diff(slots) != 1).any():
        values = values[tokens_of(slots, plan.lengths, plan.cu_lengths)]
    rows = cumulative(np.array([len(piece.slots) for piece in plan.slices], dtype=np.int32))
    return split_rows(values, np.diff(cumulative(plan.lengths[slots])[rows]))


_NOTHING: Array = np.empty((0, 0), dtype=np.float32)


def token_places(piece: RowSlice) -> Ints:
    """Where the tokens of a slice stand among all tokens of its request."""
    request = piece.request
    if piece.begins is None or piece.ends is None:
        return tokens_of(piece.rows, request.lengths, request.starts)
    lengths = piece.ends - piece.begins
    return ragged_arange(request.starts[piece.rows] + piece.begins, lengths, cumulative(lengths))
