"""The state machine of an engine that sleeps and wakes: what it holds, what wakes it, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from penstock.engine.sleep import SleepCommand, SleepController, SleepReport, WakeCommand
from penstock.errors import (
    DeadlineExceeded,
    DeviceFailed,
    DeviceOutOfMemory,
    ModelAsleep,
    ModelLoadError,
    PenstockError,
    QueueFull,
)
from penstock.runner.base import MakeRoom
from penstock.types import Comparison, EngineSleep, Failure, Outcome, PooledOutput
from tests.engine.fakes import Clock, ManualRunner, make_core
from tests.helpers import ints, make_request
from tests.waiting import PATIENCE_S, wait_until


class FakeSleeper:
    """A sleeper that moves no memory and waits until the test allows it to go on."""

    default_level = 2
    num_bytes = 700

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.may_move = threading.Event()
        self.may_move.set()
        self.errors: list[Exception] = []  # raised by the next moves, one each

    def sleep(self, level: int) -> int:
        self._move(f"sleep {level}")
        return 512

    def wake(self, make_room: MakeRoom) -> None:
        make_room(self.num_bytes)
        self._move("wake")

    def _move(self, name: str) -> None:
        assert self.may_move.wait(PATIENCE_S)
        self.calls.append(name)
        if self.errors:
            raise self.errors.pop(0)


class Sleepy:
    """A core with a sleep controller; records what both report."""

    def __init__(self, *, wake_timeout_s: float = 30.0, queued_tokens: int = 10**9) -> None:
        self.clock, self.runner, self.sleeper = Clock(), ManualRunner(), FakeSleeper()
        self.core = make_core(self.runner, clock=self.clock, queued_tokens=queued_tokens)
        self.rooms: list[int] = []
        self.reports: list[SleepReport] = []
        self.ends: list[str | None] = []
        self.outcomes: list[Outcome] = []
        self.controller = SleepController(
            self.core,
            self.sleeper,
            wake_timeout_s=wake_timeout_s,
            make_room=self.rooms.append,
            observe=self.reports.append,
        )

    @property
    def state(self) -> EngineSleep:
        return self.controller.state

    def submit(self, name: str, *, tokens: int = 4, deadline_s: float | None = None) -> None:
        request = make_request(name, [tokens], deadline_s=deadline_s)
        controller = self.controller
        self.outcomes += self.core.submit(request) if controller.is_awake else controller.hold(request)

    def turn(self) -> None:
        while self.runner.flights:
            self.runner.finish()
        self.outcomes += self.core.step()
        self.outcomes += self.controller.turn()

    def turn_until(self, condition: Callable[[], object]) -> None:
        def met() -> object:
            self.turn()
            return condition()

        wait_until(met)

    def command_sleep(self, level: int | None = None) -> None:
        self.controller.commands.append(SleepCommand(level, self.ends.append))

    def command_wake(self) -> None:
        self.controller.commands.append(WakeCommand(self.ends.append))

    def fall_asleep(self, level: int | None = None) -> None:
        self.command_sleep(level)
        self.turn_until(lambda: self.state is EngineSleep.ASLEEP)

    def run_to_the_end(self) -> None:
        self.turn_until(lambda: not (self.core.busy or self.controller.busy or self.controller.commands))

    @property
    def answered(self) -> list[str]:
        return [outcome.id for outcome in self.outcomes if isinstance(outcome, PooledOutput)]

    @property
    def failures(self) -> dict[str, type[PenstockError]]:
        return {each.id: type(each.error) for each in self.outcomes if isinstance(each, Failure)}


@pytest.fixture
def sleepy() -> Sleepy:
    return Sleepy()


def test_an_engine_sleeps_and_wakes_on_command_and_reports_both(sleepy: Sleepy) -> None:
    sleepy.fall_asleep()
    sleepy.command_wake()
    sleepy.turn_until(lambda: sleepy.state is EngineSleep.AWAKE)
    assert sleepy.sleeper.calls == ["sleep 2", "wake"]
    assert sleepy.ends == [None, None]
    assert [report.state for report in sleepy.reports] == [EngineSleep.ASLEEP, EngineSleep.AWAKE]
    assert sleepy.reports[0].num_bytes == 512


def test_what_is_in_flight_ends_before_the_sleep_and_what_comes_meanwhile_wakes_the_engine(
    sleepy: Sleepy,
) -> None:
    sleepy.submit("before")
    sleepy.core.step()
    sleepy.command_sleep()
    sleepy.outcomes += sleepy.controller.turn()
    assert sleepy.state is EngineSleep.FALLING_ASLEEP
    assert not sleepy.sleeper.calls, "a step is in flight"
    sleepy.submit("meanwhile")
    assert not sleepy.core.pending.cancel("meanwhile"), "it is not with the core"
    sleepy.run_to_the_end()
    assert sleepy.answered == ["before", "meanwhile"]
    assert sleepy.sleeper.calls == ["sleep 2", "wake"]


def test_held_requests_wake_the_engine_and_run_once_in_the_order_of_their_arrival(sleepy: Sleepy) -> None:
    sleepy.fall_asleep()
    sleepy.sleeper.may_move.clear()
    for number in range(5):
        sleepy.submit(f"r{number}")
        sleepy.turn()
    assert sleepy.state is EngineSleep.WAKING
    assert sleepy.core.held.num_rows == 5
    assert sleepy.core.backlog.num_tokens == 20, "admission sees what is held"
    sleepy.sleeper.may_move.set()
    sleepy.run_to_the_end()
    assert sleepy.answered == [f"r{number}" for number in range(5)]
    assert sleepy.rooms == [700]
    assert sleepy.core.held.num_rows == sleepy.core.backlog.num_tokens == 0
    assert sleepy.controller.next_deadline_s() is None


def test_a_request_that_waits_too_long_fails_and_the_wake_goes_on(sleepy: Sleepy) -> None:
    sleepy.fall_asleep()
    sleepy.sleeper.may_move.clear()
    sleepy.submit("early")
    assert sleepy.controller.next_deadline_s() == sleepy.clock.now_s + 30
    sleepy.clock.now_s += 29
    sleepy.submit("late")
    sleepy.turn()
    assert not sleepy.failures
    sleepy.clock.now_s += 2
    sleepy.turn()
    assert sleepy.failures == {"early": ModelAsleep}
    sleepy.sleeper.may_move.set()
    sleepy.run_to_the_end()
    assert sleepy.answered == ["late"]
    assert ModelAsleep.status == 503
    assert ModelAsleep.retry_after_s > 0


def test_without_a_time_to_wait_a_request_fails_at_once_and_wakes_the_engine() -> None:
    sleepy = Sleepy(wake_timeout_s=0)
    sleepy.fall_asleep()
    sleepy.submit("first")
    assert sleepy.failures == {"first": ModelAsleep}
    sleepy.turn_until(lambda: sleepy.state is EngineSleep.AWAKE)
    sleepy.submit("second")
    sleepy.run_to_the_end()
    assert sleepy.answered == ["second"]


def test_a_request_that_may_not_wait_is_told_why_the_last_wake_failed() -> None:
    sleepy = Sleepy(wake_timeout_s=0)
    sleepy.fall_asleep()
    sleepy.sleeper.errors.append(ModelLoadError("the file is gone"))
    sleepy.command_wake()
    sleepy.turn_until(lambda: len(sleepy.ends) == 2)
    sleepy.submit("r")
    (failure,) = sleepy.outcomes
    assert isinstance(failure, Failure)
    assert "cannot be woken: the file is gone" in failure.error.message


def test_deadlines_and_cancellations_hold_for_requests_that_wait(sleepy: Sleepy) -> None:
    sleepy.fall_asleep()
    sleepy.sleeper.may_move.clear()
    sleepy.submit("short", deadline_s=sleepy.clock.now_s + 1)
    sleepy.submit("cancelled")
    sleepy.submit("kept")
    assert sleepy.controller.cancel("cancelled")
    assert not sleepy.controller.cancel("unknown")
    sleepy.clock.now_s += 1
    sleepy.turn()
    assert sleepy.failures == {"short": DeadlineExceeded}
    sleepy.sleeper.may_move.set()
    sleepy.run_to_the_end()
    assert sleepy.answered == ["kept"]


def test_an_id_that_is_used_again_does_not_inherit_the_deadline_of_its_former_request(sleepy: Sleepy) -> None:
    sleepy.fall_asleep()
    sleepy.sleeper.may_move.clear()
    sleepy.submit("same", deadline_s=sleepy.clock.now_s + 1)
    assert sleepy.controller.cancel("same")
    sleepy.submit("same")
    sleepy.clock.now_s += 2
    sleepy.turn()
    assert not sleepy.failures
    sleepy.sleeper.may_move.set()
    sleepy.run_to_the_end()
    assert sleepy.answered == ["same"]


def test_held_work_has_the_limits_of_the_queue() -> None:
    sleepy = Sleepy(queued_tokens=10)
    sleepy.fall_asleep()
    sleepy.sleeper.may_move.clear()
    for name in "abc":
        sleepy.submit(name)
    assert sleepy.failures == {"c": QueueFull}
    assert [len(sleepy.controller.hold(large_comparison(name))) for name in "de"] == [0, 1]
    sleepy.controller.cancel("d")
    sleepy.sleeper.may_move.set()
    sleepy.run_to_the_end()
    assert sleepy.answered == ["a", "b"]


def large_comparison(name: str) -> Comparison:
    """A comparison of nominally 157 million bytes; the array is broadcast, so it takes no memory."""
    documents = np.broadcast_to(np.float32(1), (1 << 17, 300))
    return Comparison(name, documents[:1], ints([1]), documents, ints([1 << 17]), ints([0]))


def test_an_id_that_is_held_is_refused_to_another_request() -> None:
    sleepy = Sleepy()
    sleepy.fall_asleep()
    sleepy.submit("a")
    sleepy.submit("a")
    (refused,) = sleepy.outcomes
    assert isinstance(refused, Failure) and "'a' is already in use" in refused.error.message
    assert sleepy.core.held.num_rows == 1
    assert sleepy.controller.cancel("a") and sleepy.core.held.num_tokens == 0


@pytest.mark.parametrize(
    "error", [DeviceOutOfMemory("no memory"), ModelLoadError("no file"), ValueError("?")]
)
def test_a_wake_that_fails_fails_what_is_held_and_the_next_request_tries_again(
    sleepy: Sleepy, error: Exception
) -> None:
    sleepy.fall_asleep()
    sleepy.sleeper.errors.append(error)
    sleepy.submit("first")
    sleepy.turn_until(lambda: sleepy.failures)
    assert sleepy.failures == {"first": ModelAsleep}
    assert sleepy.state is EngineSleep.ASLEEP
    sleepy.turn()
    assert sleepy.state is EngineSleep.ASLEEP, "nothing wants it to wake"
    sleepy.submit("second")
    sleepy.run_to_the_end()
    assert sleepy.answered == ["second"]


def test_a_sleep_that_fails_leaves_the_engine_awake_and_runs_what_was_held(sleepy: Sleepy) -> None:
    sleepy.sleeper.errors.append(ValueError("no"))
    sleepy.sleeper.may_move.clear()
    sleepy.command_sleep()
    sleepy.turn()
    sleepy.submit("held")
    sleepy.sleeper.may_move.set()
    sleepy.run_to_the_end()
    assert sleepy.state is EngineSleep.AWAKE
    assert sleepy.answered == ["held"]
    (reason,) = sleepy.ends
    assert reason is not None
    assert "cannot sleep: ValueError: no" in reason


def test_a_device_that_fails_meanwhile_ends_the_engine(sleepy: Sleepy) -> None:
    sleepy.fall_asleep()
    sleepy.sleeper.errors.append(DeviceFailed("gone"))
    sleepy.submit("held")
    sleepy.turn_until(lambda: sleepy.core.device_failure is not None)
    assert sleepy.failures == {"held": DeviceFailed}


def test_commands_run_one_after_another_and_repeated_ones_change_nothing(sleepy: Sleepy) -> None:
    for command in "wssww":
        sleepy.command_wake() if command == "w" else sleepy.command_sleep()
    sleepy.turn_until(lambda: len(sleepy.ends) == 5)
    assert sleepy.ends == [None] * 5
    assert sleepy.sleeper.calls == ["sleep 2", "wake"]


def test_an_engine_asleep_at_level_1_may_be_sent_to_level_2_but_not_back(sleepy: Sleepy) -> None:
    sleepy.fall_asleep(1)
    sleepy.command_sleep(2)
    sleepy.command_sleep(1)
    sleepy.command_sleep()
    sleepy.turn_until(lambda: len(sleepy.ends) == 4)
    assert sleepy.sleeper.calls == ["sleep 1", "sleep 2"]
    assert sleepy.controller.level == 2


def test_an_unknown_level_and_an_engine_that_cannot_sleep_are_refused(sleepy: Sleepy) -> None:
    sleepy.command_sleep(3)
    sleepy.turn()
    assert sleepy.ends == ["level 3 is unknown; use 1 or 2"]
    controller = SleepController(sleepy.core, None)
    controller.commands.append(SleepCommand(None, sleepy.ends.append))
    controller.turn()
    assert sleepy.ends[-1] == "this engine cannot sleep"
    assert controller.is_awake
