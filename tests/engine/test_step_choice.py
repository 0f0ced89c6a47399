"""Which step is chosen next, without an engine that launches it."""

from __future__ import annotations

from concurrent.futures import Future

from penstock.engine.admission import Admission
from penstock.engine.inflight import InFlightStep, StepsInFlight
from penstock.engine.pending import PendingRequests
from penstock.engine.recovery.failed_steps import StepRecovery
from penstock.engine.step_choice import MAX_LONG_ROW, NextStep, StepChooser
from penstock.scheduler.background import BackgroundLane
from penstock.scheduler.scheduler import Budget, Scheduler
from tests.helpers import make_request

MAX_TOKENS = 1600
SHORT_TOKENS = 100  # of a background step, before anything is measured


class Chosen:
    """A chooser whose clock stands still, just after interactive work was seen."""

    def __init__(self) -> None:
        scheduler = Scheduler(Budget(MAX_TOKENS, 100, 10**9))
        lane = BackgroundLane(MAX_TOKENS, 0.002)
        lane.saw_interactive(0.0)
        self.pending = PendingRequests(scheduler, None)
        self.in_flight = StepsInFlight()
        self.chooser = StepChooser(
            scheduler,
            self.pending,
            None,
            in_flight=self.in_flight,
            recovery=StepRecovery(scheduler, self.pending, None),
            admission=Admission(scheduler, None),
            lane=lane,
            clock=lambda: 0.0,
        )

    def add(self, name: str, lengths: list[int], *, is_background: bool = False) -> None:
        request = make_request(name, lengths)
        request.is_background = is_background
        self.pending.add(request)

    def next_step(self, *, can_interrupt: bool = False) -> NextStep | None:
        return self.chooser.next_step(can_interrupt=can_interrupt)

    def launch(self, step: NextStep) -> None:
        flight = InFlightStep(step.plan, step.scheduled, Future(), 0.0, True, False, 0.0)
        self.in_flight.steps.append(flight)


def test_no_step_is_chosen_when_nothing_waits() -> None:
    assert Chosen().next_step() is None


def test_background_rows_are_chosen_when_nothing_else_waits_or_runs() -> None:
    chosen = Chosen()
    chosen.add("batch", [50, 50], is_background=True)
    chosen.add("user", [10])
    first = chosen.next_step()
    assert first is not None and not first.is_background and first.plan.num_tokens == 10
    chosen.launch(first)
    assert chosen.next_step() is None, "an interactive step runs"
    chosen.in_flight.clear()
    second = chosen.next_step()
    assert second is not None and second.is_background and second.plan.num_tokens == SHORT_TOKENS


def test_a_row_that_is_too_long_for_a_short_step_runs_if_others_may_interrupt_it() -> None:
    chosen = Chosen()
    chosen.add("batch", [MAX_LONG_ROW * SHORT_TOKENS], is_background=True)
    assert chosen.next_step() is None
    step = chosen.next_step(can_interrupt=True)
    assert step is not None and step.is_background and step.is_interruptible


def test_interactive_steps_are_never_interruptible() -> None:
    chosen = Chosen()
    chosen.add("user", [10])
    step = chosen.next_step(can_interrupt=True)
    assert step is not None and not step.is_interruptible


def test_background_rows_that_wait_have_a_next_chance_only_while_nothing_runs() -> None:
    chosen = Chosen()
    assert chosen.chooser.next_chance_s() is None
    chosen.add("batch", [MAX_TOKENS], is_background=True)
    assert chosen.chooser.next_chance_s() is not None
    chosen.add("user", [10])
    step = chosen.next_step()
    assert step is not None
    chosen.launch(step)
    assert chosen.chooser.next_chance_s() is None
