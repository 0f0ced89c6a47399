"""Limits on the time that requests wait to start: measured rates, refusals and expiry, on a fake clock."""

from __future__ import annotations

import pytest

from penstock.backlog import Backlog, check_wait
from penstock.engine.loop import EngineCore
from penstock.engine.throughput import Throughput
from penstock.errors import QueueFull, QueueTooSlow
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import Failure, Outcome, PooledOutput
from tests.engine.fakes import Clock, ManualRunner
from tests.generation import fakes as generation_fakes
from tests.generation.fakes import generation_request
from tests.helpers import make_request

STEP_S = 0.125  # exact in binary
RATE = 800  # tokens a second, in full steps of 100 tokens
MAX_QUEUE_S = 2.0


class Device:
    """A core whose steps take `STEP_S` each on the fake clock."""

    def __init__(self, *, tokens: int = 100, share_identical: bool = False, measured: bool = True) -> None:
        self.runner, self.clock = ManualRunner(), Clock()
        scheduler = Scheduler(Budget(tokens, 1000, 10**9, is_shared=True))
        self.core = EngineCore(self.runner, scheduler, clock=self.clock, share_identical=share_identical)
        self.core.max_queue_s = MAX_QUEUE_S
        if measured:
            self.core.add(make_request("warm", [tokens] * 5))
            self.run_steps(6)

    def run_steps(self, count: int) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for _ in range(count):
            outcomes += self.core.step()
            self.clock.now_s += STEP_S
            while self.runner.flights:
                self.runner.finish()
        return outcomes + self.core.step()


def failures(outcomes: list[Outcome]) -> dict[str, str]:
    return {out.id: type(out.error).__name__ for out in outcomes if isinstance(out, Failure)}


def answered(outcomes: list[Outcome]) -> set[str]:
    return {out.id for out in outcomes if isinstance(out, PooledOutput)}


def test_the_rate_is_that_of_steps_with_a_backlog() -> None:
    assert Device().core.backlog.tokens_per_s == pytest.approx(RATE)


def test_small_steps_that_leave_nothing_waiting_do_not_lower_the_rate() -> None:
    device = Device()
    for number in range(50):
        device.core.add(make_request(str(number), [1]))
        device.run_steps(1)
    assert device.core.backlog.tokens_per_s == pytest.approx(RATE)


def test_idle_time_does_not_lower_the_rate() -> None:
    device = Device()
    device.clock.now_s += 3600
    device.core.add(make_request("a", [100] * 3))
    device.run_steps(3)
    assert device.core.backlog.tokens_per_s == pytest.approx(RATE)


def test_the_rate_follows_a_device_that_becomes_slower() -> None:
    rate = Throughput()
    now = 0.0
    for seconds in [0.1] * 50 + [0.5] * 50:
        rate.record(100, began_s=now, now_s=(now := now + seconds), has_backlog=True)
    assert 200 <= rate.tokens_per_s < 220


def test_the_rate_is_not_known_before_work_has_waited() -> None:
    rate = Throughput()
    rate.record(100, began_s=0.0, now_s=1.0, has_backlog=False)
    assert rate.tokens_per_s == 0
    assert Backlog(10**9, 10**9, 0.0).wait_s(is_large=True) == 0


def test_an_idle_engine_takes_a_request_that_runs_for_minutes() -> None:
    device = Device()
    device.core.add(make_request("huge", [100] * 3000))
    outcomes = device.run_steps(3001)
    assert answered(outcomes) == {"huge"} and not failures(outcomes)


def test_a_request_that_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    device = Device()
    device.core.add(make_request("running", [100] * 60))
    device.run_steps(1)
    with pytest.raises(QueueTooSlow, match=r"about 7\.2 s to start, and 2 s is the limit") as refused:
        device.core.add(make_request("late", [100] * 2))
    assert refused.value.retry_after_s == 6 and refused.value.status == 429
    device.run_steps(46)
    device.core.add(make_request("late", [100] * 2))


def test_a_small_request_is_not_refused_for_what_large_ones_have_left_to_run() -> None:
    device = Device()
    device.core.add(make_request("running", [100] * 600))
    device.run_steps(1)
    device.core.add(make_request("single", [10]))
    assert answered(device.run_steps(2)) == {"single"}, "it waits for the step in flight and its own"


def test_small_requests_are_refused_for_the_small_ones_before_them() -> None:
    device = Device(tokens=100)
    accepted = 0
    with pytest.raises(QueueTooSlow):
        for number in range(100):
            device.core.add(make_request(str(number), [50]))
            accepted += 1
    assert accepted == 26, "it stops once 1280 tokens wait, which take 80 % of the longest wait"


def test_without_a_known_rate_only_the_bound_on_tokens_refuses() -> None:
    device = Device(measured=False)
    for number in range(1000):
        device.core.add(make_request(str(number), [100]))
    assert device.core.backlog.num_tokens == 100_000


def test_a_request_that_has_not_started_in_time_fails_with_429() -> None:
    device = Device(measured=False)  # the rate is unknown, so everything is admitted
    for number in range(50):
        device.core.add(make_request(str(number), [100]))
    outcomes = device.run_steps(60)
    assert answered(outcomes) == {str(number) for number in range(16)}
    assert failures(outcomes) == {str(number): "QueueTooSlow" for number in range(16, 50)}
    assert not device.core.busy and device.core.scheduler.queue.num_tokens == 0


def test_a_request_that_has_started_never_fails_for_its_wait() -> None:
    device = Device(measured=False)
    device.core.add(make_request("a", [100] * 60))
    device.core.add(make_request("b", [100] * 60))
    outcomes = device.run_steps(70)
    assert answered(outcomes) == {"a"} and failures(outcomes) == {"b": "QueueTooSlow"}


def test_the_loop_wakes_when_a_request_should_have_started() -> None:
    device = Device(measured=False)
    device.core.add(make_request("running", [100]))
    device.core.step()
    device.core.add(make_request("waiting", [100]))
    assert device.core.next_deadline_s() == pytest.approx(device.clock.now_s + MAX_QUEUE_S)
    device.run_steps(1)
    assert device.core.next_deadline_s() is None


def test_a_follower_whose_leader_has_waited_too_long_keeps_its_own_time() -> None:
    device = Device(measured=False, share_identical=True)
    core = device.core
    core.add(make_request("running", [100], first_token=1000))
    core.step()
    core.add(make_request("leader", [10]))
    device.clock.now_s += 1.5
    core.add(make_request("follower", [10]))
    device.clock.now_s += 0.5
    assert failures(core.step()) == {"leader": "QueueTooSlow"}
    device.clock.now_s += 1.4
    assert failures(core.step()) == {}
    device.clock.now_s += 0.1
    assert failures(core.step()) == {"follower": "QueueTooSlow"}


def test_no_bound_holds_where_none_is_set() -> None:
    device = Device()
    device.core.max_queue_s = 0.0
    for number in range(100):
        device.core.add(make_request(str(number), [100]))
    outcomes = device.run_steps(101)
    assert len(answered(outcomes)) == 100 and not failures(outcomes)


@pytest.mark.parametrize("rows", [1, 2, 30], ids=["small", "large", "very large"])
def test_under_four_times_the_load_accepted_requests_wait_within_the_bound_and_the_device_stays_busy(
    rows: int,
) -> None:
    device = Device()
    arrivals: dict[str, float] = {}
    outcomes: list[Outcome] = []
    tokens_before = sum(plan.num_tokens for plan in device.runner.launched)
    budget, number, num_refused, num_steps = 0.0, 0, 0, 600
    for _ in range(num_steps):
        budget += 4 * 100
        while budget >= 100 * rows:
            budget -= 100 * rows
            number += 1
            try:
                device.core.add(
                    make_request(str(number), [100] * rows, arrival_s=device.clock.now_s, first_token=number)
                )
                arrivals[str(number)] = device.clock.now_s
            except QueueFull:
                num_refused += 1
        outcomes += device.run_steps(1)
    assert num_refused > number / 2
    waits = [out.timings.queue_s for out in outcomes if isinstance(out, PooledOutput) and out.id in arrivals]
    assert max(waits) <= MAX_QUEUE_S + STEP_S
    assert not failures(outcomes), "whoever is admitted starts in time"
    run = sum(plan.num_tokens for plan in device.runner.launched) - tokens_before
    assert run >= 0.99 * 100 * num_steps, "every step is full"


def test_prompts_that_have_not_started_in_time_fail_and_those_that_have_continue() -> None:
    clock = Clock()
    core = generation_fakes.make_core(depth=1)
    core.clock, core.max_queue_s = clock, MAX_QUEUE_S
    assert core.generation is not None
    num_slots = core.generation.limits.max_rows
    for number in range(num_slots + 2):
        core.add(generation_request(str(number), [[5, 6, 7]], 30))
    for _ in range(4):
        core.step()
    assert core.generation.running == num_slots and core.generation.waiting == 2
    assert core.next_deadline_s() == pytest.approx(clock.now_s + MAX_QUEUE_S)
    clock.now_s += MAX_QUEUE_S
    assert failures(core.step()) == {str(num_slots): "QueueTooSlow", str(num_slots + 1): "QueueTooSlow"}
    assert core.generation.running == num_slots and core.generation.queued_tokens == 0
    core.check_integrity()


def test_prompts_are_refused_once_those_that_wait_are_known_to_take_too_long() -> None:
    clock = Clock()
    core = generation_fakes.make_core(depth=1)
    core.clock, core.max_queue_s = clock, MAX_QUEUE_S
    assert core.generation is not None
    core.admission.prompt_throughput.record(10, began_s=clock.now_s, now_s=clock.now_s + 1, has_backlog=True)
    for number in range(core.generation.limits.max_rows):
        core.add(generation_request(str(number), [[5, 6]], 30))
        core.step()
    for number in range(6):
        core.add(generation_request(f"waiting-{number}", [[5, 6, 7]], 30))
    with pytest.raises(QueueTooSlow, match="to start"):
        core.add(generation_request("late", [[5]], 30))


def test_a_wait_well_within_its_bound_is_allowed_and_zero_sets_no_bound() -> None:
    check_wait(1.6, 2.0)
    check_wait(1e9, 0.0)
    with pytest.raises(QueueTooSlow) as refused:
        check_wait(1e9, 2.0)
    assert refused.value.retry_after_s == 60, "nobody is sent away for days"
