"""Background rows run in device time that other requests leave free. No request waits for more than one
background step."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count

import numpy as np
import pytest

from penstock.engine.loop import EngineCore
from penstock.errors import QueueFull
from penstock.scheduler.background import MAX_PASSED, MAX_PASSED_HELD, QUIET_S, BackgroundLane
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.scheduler.vector_cache import VectorCache
from penstock.types import Failure, PooledOutput, PooledResult, PoolPlan, Request, StepPlan, StepResult
from tests.engine.fakes import (
    Clock,
    ManualRunner,
    PoisonedRunner,
    compute,
    expected_values,
    make_core,
    run_to_the_end,
)
from tests.helpers import make_request


def background(name: str, lengths: list[int], **options: object) -> Request:
    request = make_request(name, lengths, **options)  # type: ignore[arg-type]
    request.is_background = True
    return request


def names_of(plan: StepPlan) -> list[str]:
    return [each.request.id for each in plan.slices]  # type: ignore[union-attr]


def test_background_rows_never_share_a_step_with_others() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    core.add(background("batch", [3, 3]))
    core.add(make_request("user", [3]))
    core.step()
    assert names_of(runner.launched[0]) == ["user"]
    runner.finish()
    core.step()
    assert names_of(runner.launched[1]) == ["batch"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_waits_for_one_background_step_at_most(depth: int) -> None:
    runner = ManualRunner()
    core = make_core(runner, depth=depth)
    core.add(background("batch", [60, 60, 60]))
    core.step()
    assert len(runner.flights) == 1, "no second background step is launched behind the first"
    core.add(make_request("user", [5]))
    core.step()
    runner.finish()
    core.step()
    assert names_of(runner.launched[1]) == ["user"]


def test_steps_are_full_when_nobody_else_has_come_for_a_while_and_short_otherwise() -> None:
    clock, runner = Clock(), ManualRunner()
    core = make_core(runner, tokens=160, clock=clock)
    core.add(background("batch", [4] * 100))
    core.step()
    assert runner.launched[0].num_tokens == 160
    core.add(make_request("user", [4]))
    runner.finish()
    core.step()
    runner.finish()
    core.step()
    assert names_of(runner.launched[2]) == ["batch"]
    assert runner.launched[2].num_tokens < 80
    clock.now_s += QUIET_S
    runner.finish()
    core.step()
    assert runner.launched[3].num_tokens == 160


def test_a_background_row_runs_at_last_though_others_always_wait() -> None:
    runner = ManualRunner()
    core = make_core(runner)
    core.add(background("batch", [3]))
    for number in range(MAX_PASSED + 2):
        core.add(make_request(f"user-{number}", [3]))
        core.step()
        runner.finish()
    assert ["batch"] in [names_of(plan) for plan in runner.launched]


def test_an_equal_interactive_row_does_not_wait_for_a_background_row() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    core.add(make_request("first", [3]))
    core.step()
    batch = background("batch", [2])
    core.add(batch)
    core.add(user := make_request("user", [2]))
    assert user.token_ids.tolist() == batch.token_ids.tolist()
    runner.finish()
    core.step()
    assert names_of(runner.launched[1]) == ["user"]


def test_a_background_row_follows_an_equal_interactive_row() -> None:
    runner = ManualRunner()
    core = make_core(runner, share_identical=True)
    core.add(make_request("user", [2]))
    core.step()
    core.add(background("batch", [2]))
    runner.finish()
    assert {outcome.id for outcome in core.step()} == {"user", "batch"}  # type: ignore[union-attr]
    assert len(runner.launched) == 1


def test_background_rows_count_for_no_limit_of_others() -> None:
    core = make_core(ManualRunner(), queued_tokens=100)
    core.max_queue_s = 1.0
    core.add(background("batch", [50, 50]))
    core.add(make_request("user", [90]))
    assert core.backlog.num_tokens == 90
    with pytest.raises(QueueFull, match="tokens of batches are waiting"):
        core.add(background("more", [5]))


def test_cancelled_and_poisoned_background_rows_leave_nothing_behind() -> None:
    runner = PoisonedRunner({7}, "step raises")
    core = make_core(runner)
    requests = [background(f"batch-{number}", [3, 2]) for number in range(6)]
    requests[2].token_ids[1] = 7
    for request in requests:
        core.add(request)
    core.cancel("batch-4")
    outcomes = {outcome.id: outcome for outcome in run_to_the_end(core)}  # type: ignore[union-attr]
    assert set(outcomes) == {"batch-0", "batch-1", "batch-2", "batch-3", "batch-5"}
    good = [outcome for outcome in outcomes.values() if isinstance(outcome, PooledOutput)]
    assert [each.id for each in good if each.id != "batch-2"] == [each.id for each in good]
    for each in good:
        request = next(request for request in requests if request.id == each.id)
        assert each.values.tolist() == expected_values(request)
    assert core.scheduler.background.num_tokens == core.scheduler.queue.num_tokens == 0


# --- interruptible steps ------------------------------------------------------------------------------------


class ManualBackground:
    """A background runner whose steps end when the test calls `finish`. It records the loop's orders."""

    def __init__(self) -> None:
        self.flights: list[tuple[StepPlan, Future[StepResult]]] = []
        self.orders: list[str] = []

    def launch(self, plan: PoolPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.flights.append((plan, future))
        return future

    def hold(self) -> None:
        self.orders.append("hold")

    def release(self) -> None:
        self.orders.append("release")

    def advance(self) -> None:
        self.orders.append("advance")

    def finish(self) -> None:
        plan, future = self.flights.pop(0)
        future.set_result(compute(plan))


def interruptible_core(**options: int) -> tuple[EngineCore, ManualRunner, ManualBackground]:
    runner, steps = ManualRunner(), ManualBackground()
    core = make_core(runner, **options)  # type: ignore[arg-type]
    core.background = steps
    return core, runner, steps


def test_a_request_interrupts_a_background_step_and_is_answered_first() -> None:
    core, runner, steps = interruptible_core()
    core.add(background("batch", [60]))
    core.step()
    assert names_of(steps.flights[0][0]) == ["batch"] and steps.orders == ["release"]
    core.add(make_request("user", [5]))
    core.step()
    assert names_of(runner.launched[0]) == ["user"] and steps.orders[-1] == "hold"
    runner.finish()
    assert [outcome.id for outcome in core.step()] == ["user"]  # type: ignore[union-attr]
    assert steps.orders[-1] == "release" and core.busy
    steps.finish()
    assert [outcome.id for outcome in core.step()] == ["batch"]  # type: ignore[union-attr]
    assert not core.busy


def test_a_held_step_advances_now_and_then_though_others_always_wait() -> None:
    core, runner, steps = interruptible_core()
    core.add(background("batch", [60]))
    core.step()
    for number in range(3 * MAX_PASSED_HELD):
        core.add(make_request(f"user-{number}", [3]))
        core.add(make_request(f"next-{number}", [98]))
        core.step()
        runner.finish()
    assert 2 <= steps.orders.count("advance") <= 4


def test_a_step_that_fails_while_others_interrupt_it_fails_its_own_request_alone() -> None:
    core, runner, steps = interruptible_core()
    core.add(background("batch", [60]))
    core.step()
    core.add(make_request("user", [5]))
    core.step()
    steps.flights.pop()[1].set_exception(ValueError("poisoned"))
    runner.finish()
    outcomes = {outcome.id: outcome for outcome in core.step()}  # type: ignore[union-attr]
    assert isinstance(outcomes["user"], PooledOutput) and isinstance(outcomes["batch"], Failure)
    assert not core.busy


def test_a_step_that_scores_pairs_is_not_interrupted() -> None:
    request = background("batch", [4, 4, 4])
    request.pairs = np.array([0, 0], dtype=np.int32)
    runner, steps = ManualRunner(), ManualBackground()
    core = EngineCore(runner, Scheduler(Budget(100, 100, 10**9), vector_cache=VectorCache(1000)))
    core.background = steps
    core.add(request)
    core.step()
    assert len(runner.launched) == 1 and not steps.flights


# --- policy -------------------------------------------------------------------------------------------------


def test_the_size_of_short_steps_follows_the_time_that_they_take() -> None:
    lane = BackgroundLane(1024, 0.002)
    lane.saw_interactive(100.0)
    for _ in range(60):
        tokens = lane.max_tokens(100.0)
        lane.ran_background(tokens, tokens * 0.0001, 99.0, 100.0)
    assert lane.max_tokens(100.0) == pytest.approx(20, abs=2)
    assert lane.max_tokens(101.1) == 1024


def test_a_slow_model_has_longer_background_steps() -> None:
    lane = BackgroundLane(1024, 0.002)
    assert lane.target_s == 0.002
    lane.ran_interactive(0.1)
    assert lane.target_s == pytest.approx(0.02)


def test_long_rows_wait_after_one_has_delayed_a_request() -> None:
    lane = BackgroundLane(1024, 0.002)
    lane.saw_interactive(100.0)
    assert lane.may_run_long(100.0)
    lane.ran_background(500, 0.05, 100.0, 100.05)
    assert lane.waited_s(arrival_s=100.01, launched_s=100.05) == pytest.approx(0.04)
    for _ in range(2):
        lane.answered_interactive(0.04, 100.06)
    lane.saw_interactive(100.06)
    assert not lane.may_run_long(100.1)
    assert lane.next_chance_s() == pytest.approx(101.06)
    for _ in range(400):  # requests without any delay
        lane.answered_interactive(0.0, 100.21)
    lane.saw_interactive(100.2)
    assert lane.may_run_long(100.21)


class Simulation:
    """The engine's loop on a simulated clock: a step takes a fixed time, plus a time per token."""

    STEP_S, TOKEN_S = 0.002, 0.00008

    def __init__(self) -> None:
        self.now_s = 100.0
        self.latencies_s: list[float] = []
        self.num_lines = 0  # answered lines of the batch
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._pending: dict[str, tuple[Request, Callable[[], None]]] = {}
        scheduler = Scheduler(Budget(1024, 256, 10**9, is_shared=True))
        self.core = EngineCore(self, scheduler, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        seconds = self.STEP_S + self.TOKEN_S * plan.num_tokens
        values = np.zeros((plan.num_rows, 1), dtype=np.float32)
        self.after(seconds, lambda: future.set_result(PooledResult((values,), device_s=seconds)))
        return future

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), act))

    def send(self, length: int, then: Callable[[], None], *, is_background: bool = False) -> None:
        number = next(self._numbers)
        request = Request(
            f"r{number}",
            np.arange(length, dtype=np.int32) + 1000 * number,
            np.array([length], dtype=np.int32),
            arrival_s=self.now_s,
            client="batch" if is_background else str(number % 4),
            is_background=is_background,
        )
        self._pending[request.id] = request, then
        self.core.add(request)

    def run(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self._events and self.now_s < until:
            at_s, _, act = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            act()
            for outcome in self.core.step():
                request, then = self._pending.pop(outcome.id)  # type: ignore[union-attr]
                if not request.is_background:
                    self.latencies_s.append(self.now_s - request.arrival_s)
                self.num_lines += request.is_background
                then()

    def feed(self) -> None:
        """Send the next line of a batch. Most lines are longer than a short step."""
        draw = random.Random(next(self._numbers))
        self.send(min(512, max(8, int(draw.lognormvariate(4.0, 0.8)))), self.feed, is_background=True)


@pytest.mark.parametrize("kind", ["open loop", "closed loop"])
def test_the_slowest_interactive_requests_are_hardly_slower_beside_a_batch(kind: str) -> None:
    slow_s = []
    for has_batch in (False, True):
        simulation, draw = Simulation(), random.Random(5)
        if kind == "open loop":

            def arrive(simulation: Simulation = simulation, draw: random.Random = draw) -> None:
                simulation.send(25, lambda: None)
                simulation.after(draw.expovariate(150), arrive)

            arrive()
        else:

            def again(simulation: Simulation = simulation, draw: random.Random = draw) -> None:
                simulation.after(draw.uniform(0.0008, 0.002), lambda: simulation.send(25, again))

            for _ in range(4):
                again()
        for _ in range(60 if has_batch else 0):
            simulation.feed()
        simulation.run(8)
        assert bool(simulation.num_lines) is has_batch
        slow_s.append(float(np.percentile(simulation.latencies_s, 99)))
    assert slow_s[1] <= 1.2 * slow_s[0]
