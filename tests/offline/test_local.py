from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, Machine, Resolved, resolve
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, Cancelled, EngineUnavailable
from penstock.offline import local
from penstock.offline.local import LocalEngine
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import Outcome, PooledOutput, Request
from tests.engine.fakes import ManualRunner, PoisonedRunner, expected_values
from tests.helpers import make_request, make_spec

SETTINGS = resolve(EngineConfig(device="null"), model_limit=16, machine=Machine(cpus=1, cuda=False))
WAIT_S = 5


@pytest.fixture
def open_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[ManualRunner | PoisonedRunner], LocalEngine]]:
    """Makes a local engine around a fake runner; steps hold up to 100 tokens."""
    opened: list[LocalEngine] = []

    def make(runner: ManualRunner | PoisonedRunner) -> LocalEngine:
        def build(spec: ModelSpec, settings: Resolved, wake: Callable[[], None]) -> EngineCore:
            return EngineCore(runner, Scheduler(Budget(100, 100, 10**9)), wake=wake)

        monkeypatch.setattr(local, "build_core", build)
        opened.append(LocalEngine(make_spec(), SETTINGS))
        return opened[-1]

    yield make
    for engine in opened:
        engine._closing = True
        engine._inbox.put(None)


def at_once() -> PoisonedRunner:
    return PoisonedRunner(set(), "never")


def values(future: Future[PooledOutput]) -> list[list[float]]:
    return future.result(WAIT_S).values.tolist()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never happened")


def test_threads_that_submit_together_each_get_their_own_answer(
    open_engine: Callable[[PoisonedRunner], LocalEngine],
) -> None:
    engine = open_engine(at_once())
    wrong: list[str] = []

    def work(thread: int) -> None:
        for number in range(50):
            request = make_request(
                f"{thread}-{number}", [1 + number % 7, 3], first_token=1000 * thread + number
            )
            if values(engine.submit(request)) != expected_values(request):
                wrong.append(request.id)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_a_cancelled_request_is_told_so_and_others_go_on(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    gone = engine.submit(make_request("gone", [4]))
    wait_until(lambda: bool(runner.flights))
    kept = engine.submit(make_request("kept", [2]))
    engine.cancel("gone")
    with pytest.raises(Cancelled):
        gone.result(WAIT_S)
    runner.finish()
    wait_until(lambda: bool(runner.flights))
    runner.finish()
    assert kept.result(WAIT_S).id == "kept"


def test_closing_finishes_what_was_submitted(open_engine: Callable[[ManualRunner], LocalEngine]) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    future = engine.submit(make_request("a", [4]))
    wait_until(lambda: bool(runner.flights))
    closing = threading.Thread(target=engine.close)
    closing.start()
    runner.finish()
    assert future.result(WAIT_S).id == "a"
    closing.join(WAIT_S)
    assert runner.closed
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.submit(make_request("b", [4]))


def test_a_request_that_arrives_just_before_the_end_is_answered_or_refused(
    open_engine: Callable[[PoisonedRunner], LocalEngine],
) -> None:
    engine = open_engine(at_once())
    step, late = engine._core.step, list[Future[PooledOutput]]()

    def step_with_a_late_arrival() -> list[Outcome]:
        outcomes = step()
        if not late:
            late.append(engine.submit(make_request("late", [2])))
            engine._closing = True  # as `close` on another thread would
        return outcomes

    engine._core.step = step_with_a_late_arrival  # type: ignore[method-assign]
    engine._inbox.put(None)
    wait_until(lambda: bool(late))
    engine._thread.join(1)
    assert late[0].done()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_caller_that_gives_up_while_its_answer_is_handed_over_does_not_end_the_engine(
    open_engine: Callable[[PoisonedRunner], LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    class GivesUp(Future[PooledOutput]):
        """Cancelled by its caller right after the engine looked whether it is done."""

        def done(self) -> bool:
            was_done = super().done()
            self.cancel()
            return was_done

    engine = open_engine(at_once())
    monkeypatch.setattr(local, "Future", GivesUp)
    engine.submit(make_request("first", [2]))
    monkeypatch.setattr(local, "Future", Future)
    threading.Event().wait(0.1)
    request = make_request("second", [3])
    assert values(engine.submit(request)) == expected_values(request)


def test_an_id_that_is_in_use_is_refused_and_the_first_caller_is_answered(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    first = engine.submit(make_request("same", [4]))
    wait_until(lambda: bool(runner.flights))
    with pytest.raises(BadValue, match="already in use"):
        engine.submit(make_request("same", [2])).result(WAIT_S)
    runner.finish()
    assert first.result(1).id == "same"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_breaks_all_who_wait_are_told_why(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    futures = [engine.submit(make_request(str(i), [4])) for i in range(3)]
    wait_until(lambda: len(engine._core.pending) == 3)

    def broken(request: Request) -> None:
        raise RuntimeError("the core is broken")

    engine._core.add = broken  # type: ignore[method-assign]
    futures.append(engine.submit(make_request("last", [4])))
    for future in futures:
        with pytest.raises(EngineUnavailable, match="the core is broken"):
            future.result(WAIT_S)
    with pytest.raises(EngineUnavailable):
        engine.submit(make_request("later", [4]))
