from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, Machine, ModelFacts, Resolved, resolve
from penstock.engine.loop import EngineCore
from penstock.errors import BadValue, EngineUnavailable
from penstock.offline import local
from penstock.offline.local import LocalEngine
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import Outcome, PooledOutput
from tests.engine.fakes import ManualRunner, PoisonedRunner, expected_values
from tests.generation.fakes import continued, generation_request, make_core
from tests.generation.streams import QueuedTokens, read_stream
from tests.helpers import make_request, make_spec
from tests.waiting import PATIENCE_S, wait_until

SETTINGS = resolve(EngineConfig(device="null"), ModelFacts(max_model_len=16), Machine(cpus=1, cuda=False))


@pytest.fixture
def open_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[EngineCore], LocalEngine]]:
    """Return a function that makes a local engine around a core."""
    opened: list[LocalEngine] = []

    def make(core: EngineCore) -> LocalEngine:
        def build(spec: ModelSpec, settings: Resolved, wake: Callable[[], None]) -> EngineCore:
            core.wake = wake
            return core

        monkeypatch.setattr(local, "build_core", build)
        opened.append(LocalEngine(make_spec(), SETTINGS))
        return opened[-1]

    yield make
    for engine in opened:
        engine._closing = True
        engine._inbox.put(None)


@pytest.fixture
def open_engine(
    open_core: Callable[[EngineCore], LocalEngine],
) -> Callable[[ManualRunner | PoisonedRunner], LocalEngine]:
    """Return a function that makes a local engine around a fake runner, with up to 100 tokens per step."""
    return lambda runner: open_core(EngineCore(runner, Scheduler(Budget(100, 100, 10**9))))


def at_once() -> PoisonedRunner:
    return PoisonedRunner(set(), "never")


def values(future: Future[PooledOutput]) -> list[list[float]]:
    return future.result(PATIENCE_S).values.tolist()


def test_threads_that_submit_at_the_same_time_get_their_own_outputs(
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
        thread.join(PATIENCE_S)
    assert wrong == []


def test_close_finishes_submitted_requests(open_engine: Callable[[ManualRunner], LocalEngine]) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    future = engine.submit(make_request("a", [4]))
    wait_until(lambda: bool(runner.flights))
    closing = threading.Thread(target=engine.close)
    closing.start()
    runner.finish()
    assert future.result(PATIENCE_S).id == "a"
    closing.join(PATIENCE_S)
    assert runner.closed
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.submit(make_request("b", [4]))


def test_a_request_submitted_during_the_last_step_is_answered(
    open_engine: Callable[[PoisonedRunner], LocalEngine],
) -> None:
    engine = open_engine(at_once())
    step, late = engine.core.step, list[Future[PooledOutput]]()

    def step_with_a_late_arrival() -> list[Outcome]:
        outcomes = step()
        if not late:
            late.append(engine.submit(make_request("late", [2])))
            engine._closing = True  # as `close` on another thread does
        return outcomes

    engine.core.step = step_with_a_late_arrival  # type: ignore[method-assign]
    engine._inbox.put(None)
    wait_until(lambda: bool(late))
    engine._thread.join(PATIENCE_S)
    assert late[0].done()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_engine_survives_a_caller_that_cancels_its_future_during_delivery(
    open_engine: Callable[[PoisonedRunner], LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    class CancelledDuringDelivery(Future[PooledOutput]):
        """A future that its caller cancels right after the engine has checked `done`."""

        def done(self) -> bool:
            was_done = super().done()
            self.cancel()
            return was_done

    engine = open_engine(at_once())
    monkeypatch.setattr(local, "Future", CancelledDuringDelivery)
    engine.submit(make_request("first", [2]))
    monkeypatch.setattr(local, "Future", Future)
    request = make_request("second", [3])
    assert values(engine.submit(request)) == expected_values(request)


def test_a_request_id_in_use_is_refused_and_the_first_request_is_answered(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    first = engine.submit(make_request("same", [4]))
    wait_until(lambda: bool(runner.flights))
    with pytest.raises(BadValue, match="already in use"):
        engine.submit(make_request("same", [2])).result(PATIENCE_S)
    runner.finish()
    assert first.result(PATIENCE_S).id == "same"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_all_requests_fail_with_the_reason_when_the_engine_stops(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    futures = [engine.submit(make_request(str(i), [4])) for i in range(3)]
    wait_until(lambda: len(engine.core.pending) == 3)

    def broken() -> list[Outcome]:
        raise RuntimeError("the core is broken")

    engine.core.step = broken  # type: ignore[method-assign]
    futures.append(engine.submit(make_request("last", [4])))
    for future in futures:
        with pytest.raises(EngineUnavailable, match="the core is broken"):
            future.result(PATIENCE_S)
    with pytest.raises(EngineUnavailable):
        engine.submit(make_request("later", [4]))
    engine._thread.join(PATIENCE_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_event_loops_of_several_threads_get_their_own_outputs(
    open_engine: Callable[[PoisonedRunner], LocalEngine],
) -> None:
    engine = open_engine(at_once())
    wrong: list[str] = []

    async def run_all(thread: int) -> None:
        requests = [
            make_request(f"{thread}-{number}", [1 + number % 7, 3], first_token=1000 * thread + number)
            for number in range(50)
        ]
        outputs = await asyncio.gather(*map(engine.run, requests))
        wrong.extend(
            request.id
            for request, output in zip(requests, outputs, strict=True)
            if output.id != request.id or output.values.tolist() != expected_values(request)
        )

    threads = [threading.Thread(target=lambda i=i: asyncio.run(run_all(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert wrong == [] and engine.stats().num_requests == 0


def test_an_engine_is_ready_until_it_is_closed(open_engine: Callable[[PoisonedRunner], LocalEngine]) -> None:
    engine = open_engine(at_once())
    assert engine.ready and engine.unavailable_reason == ""
    engine.close()
    assert not engine.ready and engine.unavailable_reason == "the engine is closed"
    with pytest.raises(EngineUnavailable, match="the engine is closed"):
        asyncio.run(engine.run(make_request("a", [4])))


def test_outputs_of_deduplicated_requests_may_be_written_to(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)

    async def scene() -> None:
        tasks = [asyncio.create_task(engine.run(make_request(name, [4]))) for name in ("a", "b")]
        await until(lambda: len(engine.core.pending) == 2)
        runner.finish()
        first, second = await asyncio.gather(*tasks)
        first.values[:] = -1.0
        assert second.values.tolist() == expected_values(make_request("b", [4]))

    asyncio.run(scene())
    assert len(runner.launched) == 1


def test_cancelling_a_task_cancels_its_request_alone_and_frees_the_id(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)

    async def scene() -> None:
        task = asyncio.create_task(engine.run(make_request("same", [4])))
        await until(lambda: bool(runner.flights))
        other = asyncio.create_task(engine.run(make_request("other", [2])))
        await until(lambda: engine.stats().num_requests == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats().num_requests == 1)
        runner.finish()
        await until(lambda: bool(runner.flights))
        runner.finish()
        assert (await other).id == "other"
        again = make_request("same", [2], first_token=50)
        output = asyncio.create_task(engine.run(again))
        await until(lambda: bool(runner.flights))
        runner.finish()
        assert (await output).values.tolist() == expected_values(again)

    asyncio.run(scene())


def test_the_id_of_a_cancelled_request_stays_in_use_until_the_engine_confirms(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    """Otherwise an output that is already in flight would reach the next request with the same id."""
    runner = ManualRunner()
    engine = open_engine(runner)

    async def scene() -> None:
        task = asyncio.create_task(engine.run(make_request("same", [4])))
        await until(lambda: bool(runner.flights))
        runner.finish()
        wait_until(lambda: engine.stats().num_requests == 0)  # the output is queued; this loop has not run
        task.cancel()
        while not task.done():
            with pytest.raises(BadValue, match="already in use"):
                await engine.run(make_request("same", [2]))
            await asyncio.sleep(0)
        (recipient,) = engine._loops.values()
        await until(lambda: "same" not in recipient)

    asyncio.run(scene())


def test_a_stream_gives_every_token_and_one_left_early_frees_its_blocks(
    open_core: Callable[[EngineCore], LocalEngine],
) -> None:
    core = make_core(blocks=60)
    engine = open_core(core)

    async def read(name: str, prompts: list[list[int]], count: int) -> None:
        tokens: list[list[int]] = [[] for _ in prompts]
        async for part in read_stream(engine, generation_request(name, prompts, count)):
            tokens[part.row] += part.token_ids.tolist()
        assert tokens == [continued(prompt, count) for prompt in prompts]

    async def leave(name: str) -> None:
        stream = read_stream(engine, generation_request(name, [[9, 9], [8]], 50))
        await anext(stream)
        await stream.aclose()

    async def scene() -> None:
        async with asyncio.timeout(PATIENCE_S):
            reads = [read(f"r{i}", [[i], [i, 5]], 8 + 5 * i) for i in range(6)]
            await asyncio.gather(*reads, *(leave(f"l{i}") for i in range(4)))
        with pytest.raises(BadValue, match="max_tokens is 0"):
            await anext(read_stream(engine, generation_request("refused", [[6]], 0)))
        await until(lambda: not core.busy and engine.stats().num_requests == 0)

    asyncio.run(scene())
    core.check_integrity()
    assert core.generation is not None
    core.generation.pool.check_integrity()


def test_a_step_reaches_all_streams_of_a_loop_with_one_wakeup(
    open_core: Callable[[EngineCore], LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(blocks=60)
    steps_with_outcomes = 0
    step = core.step

    def counted_step() -> list[Outcome]:
        nonlocal steps_with_outcomes
        outcomes = step()
        steps_with_outcomes += bool(outcomes)
        return outcomes

    core.step = counted_step  # type: ignore[method-assign]
    engine = open_core(core)
    wakeups: list[str] = []

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counted(callback: Any, *args: Any) -> Any:
            wakeups.append(threading.current_thread().name)
            return call_soon_threadsafe(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        requests = [generation_request(f"r{i}", [[i], [i, 5]], 20) for i in range(3)]
        listeners = [QueuedTokens(request) for request in requests]
        leaves = [engine.stream(*each) for each in zip(requests, listeners, strict=True)]
        await until(lambda: all(listener.finished for listener in listeners))
        for leave in leaves:
            leave()

    asyncio.run(scene())
    assert 0 < wakeups.count("penstock-engine") == steps_with_outcomes


def test_a_closed_event_loop_does_not_stop_the_engine(
    open_engine: Callable[[ManualRunner], LocalEngine],
) -> None:
    runner = ManualRunner()
    engine = open_engine(runner)
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.run(make_request("orphan", [4])))
    loop.run_until_complete(until(lambda: bool(runner.flights)))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    runner.finish()
    future = engine.submit(make_request("next", [2]))
    wait_until(lambda: bool(runner.flights))
    runner.finish()
    assert future.result(PATIENCE_S).id == "next"
