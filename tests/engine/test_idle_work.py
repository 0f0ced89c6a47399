"""Idle work of a runner, such as graph captures, runs only while no request waits."""

from __future__ import annotations

from penstock.engine.loop import EngineCore
from tests.engine.fakes import Clock, ManualRunner, make_core
from tests.helpers import make_request


class Pieces:
    """Some pieces of idle work; records when each ran, and checks that the engine was idle."""

    def __init__(self, core: EngineCore, num_pieces: int, min_idle_s: float = 0.02) -> None:
        self.core, self.left, self._min_idle_s = core, num_pieces, min_idle_s
        self.ran_at_s: list[float] = []

    @property
    def min_idle_s(self) -> float | None:
        return self._min_idle_s if self.left else None

    def run_idle(self) -> None:
        assert not self.core.busy, "something is in flight or waits"
        self.left -= 1
        self.ran_at_s.append(self.core.clock())


def make(num_pieces: int = 3) -> tuple[EngineCore, ManualRunner, Clock, Pieces]:
    runner, clock = ManualRunner(), Clock()
    core = make_core(runner, clock=clock)
    work = core.idle_work = Pieces(core, num_pieces)
    return core, runner, clock, work


def test_idle_work_begins_when_nothing_has_run_for_long_enough() -> None:
    core, _, clock, work = make()
    core.run_idle_work()
    assert not work.ran_at_s and core.idle_work_due_s() == clock.now_s + 0.02
    clock.now_s += 0.021
    core.run_idle_work()
    assert len(work.ran_at_s) == 1, "one piece at a time"
    core.run_idle_work()
    assert len(work.ran_at_s) == 2


def test_no_idle_work_runs_while_a_request_waits_or_runs() -> None:
    core, runner, clock, work = make()
    clock.now_s += 1.0
    core.add(make_request("a", [5]))
    assert core.idle_work_due_s() is None
    core.run_idle_work()
    core.step()
    clock.now_s += 1.0
    core.run_idle_work()
    assert not work.ran_at_s and core.idle_work_due_s() is None
    runner.finish()
    core.step()
    core.run_idle_work()
    assert not work.ran_at_s, "the next request may come at once"
    clock.now_s += 0.021
    core.run_idle_work()
    assert len(work.ran_at_s) == 1


def test_requests_that_come_often_leave_no_time_for_idle_work() -> None:
    core, runner, clock, work = make()
    for number in range(50):
        core.add(make_request(str(number), [5]))
        core.step()
        clock.now_s += 0.005
        runner.finish()
        core.step()
        clock.now_s += 0.01
        core.step()
        core.run_idle_work()
    assert not work.ran_at_s


def test_an_engine_whose_work_is_done_waits_for_requests_alone() -> None:
    core, _, clock, work = make(num_pieces=1)
    clock.now_s += 1.0
    core.run_idle_work()
    assert work.left == 0 and core.idle_work_due_s() is None
    core.run_idle_work()
    assert len(work.ran_at_s) == 1


def test_a_launch_is_marked_while_idle_work_runs() -> None:
    """A hanging capture is noticed in the same way as a hanging step."""
    core, _, clock, _ = make()
    marks: list[float] = []
    core.mark_launch = marks.append
    clock.now_s += 1.0
    core.run_idle_work()
    assert marks == [clock.now_s, 0.0]
