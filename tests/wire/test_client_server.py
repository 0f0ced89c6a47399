"""An engine server and its clients: the owner of each request, its cancellation when the owner disconnects,
and which request fails when a message cannot be read."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from penstock.errors import BadValue, EngineError, EngineUnavailable
from penstock.inputs.vectors import make_comparison
from penstock.types import Array, Comparison, Failure, Outcome, PooledOutput, Request, SamplerParams, Timings
from penstock.wire import client as module
from penstock.wire.client import EngineClient
from penstock.wire.messages import (
    Cancel,
    Hello,
    Outcomes,
    Ready,
    Submit,
    decode_from_engine,
    encode,
    pack_comparison,
    pack_outcomes,
    pack_requests,
    unpack_each,
    unpack_outcomes,
)
from penstock.wire.server import EngineServer
from penstock.wire.status import EngineStatus, StatusReader, StatusWriter, create_status_page
from tests.engine.fakes import ManualRunner, expected_values, make_core
from tests.helpers import make_request
from tests.waiting import PATIENCE_S, wait_until


class HeldRunner(ManualRunner):
    """A runner whose steps and comparisons end when the test completes them."""

    def __init__(self) -> None:
        super().__init__()
        self.comparisons: list[tuple[Comparison, Future[Array]]] = []

    def compare(self, comparison: Comparison) -> Future[Array]:
        future: Future[Array] = Future()
        self.comparisons.append((comparison, future))
        return future


class Served:
    """An engine server on a thread, and raw connections to it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/engine"
        self.runner = HeldRunner()
        self.core = make_core(self.runner)
        self.server = EngineServer(self.address)
        self.core.wake = self.server.wake
        arguments = (self.core, Ready(1, {}), lambda core: True)
        self.thread = threading.Thread(target=self.server.serve, args=arguments)
        self.thread.start()
        self.context = zmq.Context()

    def connect(self, name: str, pid: int | None = None) -> zmq.Socket[bytes]:
        """Open a connection and send its greeting."""
        socket = self.context.socket(zmq.DEALER)
        socket.connect(self.address)
        socket.send_multipart([encode(Hello(name, os.getpid() if pid is None else pid))])
        return socket

    def ready(self, name: str, pid: int | None = None) -> zmq.Socket[bytes]:
        socket = self.connect(name, pid)
        assert socket.poll(int(PATIENCE_S * 1000))
        assert isinstance(decode_from_engine(socket.recv_multipart()[0]), Ready)
        return socket

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or not self.thread.is_alive())
        assert self.thread.is_alive(), "the engine's loop has ended"

    def close(self) -> None:
        self.wait_for(lambda: True)
        self.server.stop()
        wait_until(self._has_ended)
        self.context.destroy(linger=0)

    def _has_ended(self) -> bool:
        """Finish everything that the engine runs; the server exits when nothing is left."""
        while self.runner.flights:
            self.runner.finish()
        for _, future in self.runner.comparisons:
            if not future.done():
                future.set_result(np.zeros((1, 1), dtype=np.float32))
        self.server.wake()
        return not self.thread.is_alive()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    running = Served(tmp_path)
    yield running
    running.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that the test can kill, and that the engine takes for an API process."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


def received(socket: zmq.Socket[bytes]) -> list[Outcome]:
    assert socket.poll(int(PATIENCE_S * 1000)), "no outcome came"
    header, *frames = socket.recv_multipart()
    message = decode_from_engine(header)
    assert isinstance(message, Outcomes)
    return unpack_outcomes(message.items, frames)


def submit(socket: zmq.Socket[bytes], *requests: Request) -> None:
    socket.send_multipart(pack_requests(requests))


def comparison(name: str) -> Comparison:
    return make_comparison(name, [[[1.0, 2.0]]], [[[3.0, 4.0]]])


class TestClientsThatGo:
    def test_a_killed_process_loses_its_requests_and_comparisons_and_nobody_else_does(
        self, served: Served, process: subprocess.Popen[bytes]
    ) -> None:
        killed, other = served.ready("killed", process.pid), served.ready("other")
        kept = make_request("kept", [3])
        submit(other, kept)
        served.wait_for(lambda: served.runner.flights)
        submit(killed, make_request("a", [4]), make_request("b", [5]))
        for name in ("c", "d"):
            killed.send_multipart(pack_comparison(comparison(name)))
        served.wait_for(lambda: served.core.num_comparisons == 2 and len(served.core.pending) == 3)
        process.kill()
        served.wait_for(lambda: served.core.num_comparisons == 0 and len(served.core.pending) == 1)
        assert served.runner.comparisons[0][1].cancelled(), "the running comparison must end"
        served.runner.finish()
        served.server.wake()
        (outcome,) = received(other)
        assert isinstance(outcome, PooledOutput) and outcome.values.tolist() == expected_values(kept)
        served.wait_for(lambda: not served.core.busy)

    def test_what_a_process_sent_before_it_was_killed_is_not_run_afterwards(
        self, served: Served, process: subprocess.Popen[bytes]
    ) -> None:
        killed = served.ready("killed", process.pid)
        process.kill()
        process.wait()
        served.wait_for(lambda: len(served.server._clients) == 0)
        submit(killed, make_request("late", [4]))
        killed.send_multipart(pack_comparison(comparison("later")))
        served.connect("killed", process.pid)  # the greeting also arrives after the process has died
        witness = served.ready("witness")
        submit(witness, make_request("kept", [3]))
        served.wait_for(lambda: served.runner.flights)
        assert [plan.num_tokens for plan in served.runner.launched] == [3]
        assert len(served.core.pending) == 1 and not served.runner.comparisons

    def test_a_client_that_connects_again_loses_the_work_of_its_former_connection(
        self, served: Served
    ) -> None:
        former = served.ready("same")
        submit(former, make_request("a", [4]))
        served.wait_for(lambda: served.runner.flights)
        again = served.ready("same")
        served.wait_for(lambda: not served.core.pending)
        request = make_request("a", [2])
        submit(again, request)  # the id is free again
        served.wait_for(lambda: served.core.pending)
        served.runner.finish()
        served.server.wake()
        served.wait_for(lambda: served.runner.flights)
        served.runner.finish()
        served.server.wake()
        (outcome,) = received(again)
        assert isinstance(outcome, PooledOutput) and outcome.values.tolist() == expected_values(request)
        assert not former.poll(0)


class TestOwnership:
    def test_an_id_of_another_connection_is_refused_and_the_first_request_is_answered(
        self, served: Served
    ) -> None:
        first, second = served.ready("first"), served.ready("second")
        request = make_request("same", [4])
        submit(first, request)
        served.wait_for(lambda: served.core.pending)
        submit(second, make_request("same", [2]))
        second.send_multipart(pack_comparison(comparison("same")))
        for _ in range(2):
            (refused,) = received(second)
            assert isinstance(refused, Failure) and "already in use" in refused.error.message
        served.runner.finish()
        served.server.wake()
        (outcome,) = received(first)
        assert isinstance(outcome, PooledOutput) and outcome.values.tolist() == expected_values(request)

    def test_only_the_connection_of_a_request_can_cancel_it(self, served: Served) -> None:
        first, second = served.ready("first"), served.ready("second")
        submit(first, make_request("a", [4]))
        served.wait_for(lambda: served.core.pending)
        second.send_multipart([encode(Cancel(["a"]))])
        submit(second, make_request("b", [2]))
        served.wait_for(lambda: len(served.core.pending) == 2)
        first.send_multipart([encode(Cancel(["a"]))])
        served.wait_for(lambda: len(served.core.pending) == 1)
        assert "b" in served.core.pending


class TestUnreadableMessages:
    def test_messages_that_nobody_can_read_do_not_stop_the_engine(self, served: Served) -> None:
        client = served.ready("client")
        for parts in ([b"\xc1 nonsense"], [b""], [encode(["explode"])], [encode(Submit([]))]):
            client.send_multipart(parts)
        submit(client, make_request("a", [4]))
        served.wait_for(lambda: served.core.pending)

    @pytest.mark.parametrize("damage", ["lengths", "type", "more tokens than sent"])
    def test_a_damaged_request_fails_alone(self, served: Served, damage: str) -> None:
        client = served.ready("client")
        requests = [make_request(name, [4]) for name in "abc"]
        if damage == "lengths":
            requests[1].lengths = np.array([9], dtype=np.int32)
        header, ints = pack_requests(requests)
        submitted = msgspec.msgpack.decode(header, type=Submit)
        if damage == "type":
            submitted.requests[1].priority = "soon"  # type: ignore[assignment]
        if damage == "more tokens than sent":
            submitted.requests[2].num_tokens = 99
        client.send_multipart([encode(submitted), ints])
        (failed,) = received(client)
        wrong = "c" if damage == "more tokens than sent" else "b"
        assert isinstance(failed, Failure) and failed.id == wrong
        assert isinstance(failed.error, BadValue) and "cannot read" in failed.error.message
        served.wait_for(lambda: len(served.core.pending) == 2)
        assert {"a", "b", "c"} - {wrong} == {name for name in "abc" if name in served.core.pending}

    def test_requests_behind_one_without_a_size_fail_with_it(self) -> None:
        header, ints = pack_requests([make_request(name, [4]) for name in "abc"])
        submitted = msgspec.msgpack.decode(header, type=Submit)
        submitted.requests[1].num_tokens = -7
        requests, failures = unpack_each(encode(submitted), ints.tobytes())
        assert [request.id for request in requests] == ["a"]
        assert [failure.id for failure in failures] == ["b", "c"]

    def test_a_comparison_that_does_not_match_its_frames_fails_alone(self, served: Served) -> None:
        client = served.ready("client")
        for frames in (
            pack_comparison(comparison("short"))[:3],
            [*pack_comparison(comparison("wrong"))[:1], *[b"123"] * 5],
        ):
            client.send_multipart(frames)
            (failed,) = received(client)
            assert isinstance(failed, Failure) and "cannot read this comparison" in failed.error.message
        client.send_multipart(pack_comparison(comparison("right")))
        served.wait_for(lambda: served.runner.comparisons)

    def test_an_exception_of_the_core_fails_its_request_alone(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add = served.core.pending.add

        def broken(request: Request, start_by_s: float | None = None) -> None:
            add(request, start_by_s)
            if request.id == "b":
                raise KeyError("a defect")

        monkeypatch.setattr(served.core.pending, "add", broken)
        client = served.ready("client")
        submit(client, *(make_request(name, [4]) for name in "abc"))
        (failed,) = received(client)
        assert isinstance(failed, Failure) and failed.id == "b" and isinstance(failed.error, EngineError)
        served.wait_for(lambda: len(served.core.pending) == 2)

    def test_an_outcome_that_cannot_be_packed_fails_alone(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def outcomes() -> list[Outcome]:
            served.core.step = step  # type: ignore[method-assign]
            values = np.ones((1, 2), dtype=np.float32)
            return [
                PooledOutput("a", values, Timings()),
                PooledOutput("b", values, Timings(), (object(),)),  # type: ignore[arg-type]
                Failure("c", BadValue("text \ud800 that is not Unicode")),
            ]

        client = served.ready("client")
        submit(client, *(make_request(name, [4]) for name in "abc"))
        served.wait_for(lambda: len(served.core.pending) == 3)
        step = served.core.step
        monkeypatch.setattr(served.core, "step", outcomes)
        served.server.wake()
        found: dict[str, Outcome] = {}
        while len(found) < 3:
            found |= {outcome.id: outcome for outcome in received(client)}  # type: ignore[union-attr]
        assert isinstance(found["a"], PooledOutput)
        assert isinstance(found["b"], Failure) and isinstance(found["b"].error, EngineError)
        assert isinstance(found["c"], Failure) and r"text \ud800 that" in found["c"].error.message


def run(served: Served, scene: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main() -> None:
        client = EngineClient(served.address)
        client.start()
        async with asyncio.timeout(PATIENCE_S):
            while not client.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await scene(client)
        client.close()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class TestClient:
    def test_a_request_that_cannot_be_encoded_fails_alone(self, served: Served) -> None:
        """`top_k` of 2^64 once lost every request that was submitted in the same iteration."""
        good = [make_request(name, [4]) for name in "ac"]
        huge, wide = make_request("b", [4]), make_request("d", [4])
        huge.sampling = SamplerParams(top_k=2**64)
        wide.token_ids = wide.token_ids.astype(np.int64)

        async def scene(client: EngineClient) -> None:
            tasks = [asyncio.create_task(client.run(each)) for each in (good[0], huge, good[1], wide)]
            for task in (tasks[1], tasks[3]):
                with pytest.raises(BadValue, match="cannot be sent to the engine"):
                    await task
            await until(lambda: len(served.core.pending) == 2 and served.runner.flights)
            served.runner.finish()
            served.server.wake()
            for task, request in ((tasks[0], good[0]), (tasks[2], good[1])):
                assert (await task).values.tolist() == expected_values(request)

        run(served, scene)

    def test_a_request_cancelled_in_the_iteration_that_submits_it_leaves_nothing_behind(
        self, served: Served
    ) -> None:
        async def scene(client: EngineClient) -> None:
            first = asyncio.create_task(client.run(make_request("first", [4])))
            await until(lambda: served.core.pending)
            first.cancel()
            second = asyncio.create_task(client.run(make_request("second", [4])))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            third = asyncio.create_task(client.run(make_request("third", [2])))
            await until(lambda: "third" in served.core.pending)
            assert len(served.core.pending) == 1
            third.cancel()

        run(served, scene)

    def test_a_caller_that_gives_up_ends_its_comparison(self, served: Served) -> None:
        async def scene(client: EngineClient) -> None:
            tasks = [asyncio.create_task(client.compare(comparison(name))) for name in "ab"]
            await until(lambda: served.core.num_comparisons == 2)
            for task in reversed(tasks):
                task.cancel()
            await until(lambda: served.core.num_comparisons == 0)
            assert len(served.runner.comparisons) == 1, "the waiting one never ran"

        run(served, scene)

    def test_an_id_in_use_is_refused_before_it_is_sent(self, served: Served) -> None:
        async def scene(client: EngineClient) -> None:
            task = asyncio.create_task(client.run(make_request("same", [4])))
            await asyncio.sleep(0)
            with pytest.raises(BadValue, match="already in use"):
                await client.run(make_request("same", [4]))
            task.cancel()

        run(served, scene)

    def test_messages_of_another_engine_are_dropped_and_its_greeting_fails_what_was_pending(
        self, served: Served
    ) -> None:
        def outcomes(engine: int, *requests: Request) -> tuple[Any, list[Any]]:
            answers = [PooledOutput(each.id, np.full((1, 2), 7.0), Timings()) for each in requests]
            header, *frames = pack_outcomes(answers, engine=engine)
            return decode_from_engine(header), frames

        async def scene(client: EngineClient) -> None:
            request = make_request("a", [4])
            task = asyncio.create_task(client.run(request))
            await until(lambda: served.core.pending)
            number = served.server._number
            client._handle(*outcomes(number + 1, request))
            await asyncio.sleep(0)
            assert not task.done()
            client._handle(Ready(2, {}, engine=number + 1), [])
            with pytest.raises(EngineUnavailable):
                await task

        run(served, scene)


class TestFirstConnection:
    """Another API process may have seen the engine become ready before this client connects."""

    @pytest.fixture
    def page(self, tmp_path: Path) -> Path:
        create_status_page(tmp_path / "status")
        return tmp_path / "status"

    def test_requests_wait_for_an_engine_that_serves_already(self, tmp_path: Path, page: Path) -> None:
        async def main() -> None:
            client = EngineClient(f"ipc://{tmp_path}/engine", status=StatusReader(page))
            client.start()
            with pytest.raises(EngineUnavailable, match="starting"):
                await client.run(make_request("early", [4]))
            StatusWriter(page).publish(EngineStatus(pid=1))
            requests = [make_request(name, [4]) for name in ("a", "given-up", "b")]
            tasks = [asyncio.create_task(client.run(each)) for each in requests]
            await asyncio.sleep(0)
            tasks[1].cancel()
            comparing = asyncio.create_task(client.compare(comparison("c")))
            await asyncio.sleep(0)
            served = await asyncio.to_thread(Served, tmp_path)
            await until(
                lambda: "a" in served.core.pending and "b" in served.core.pending and served.runner.flights
            )
            await until(lambda: served.runner.comparisons)
            served.runner.comparisons[0][1].set_result(np.array([7.0], dtype=np.float32))
            served.runner.finish()
            served.server.wake()
            for index in (0, 2):
                assert (await tasks[index]).values.tolist() == expected_values(requests[index])
            assert (await comparing).values.tolist() == [7.0]
            client.close()
            await asyncio.to_thread(served.close)

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    def test_requests_fail_if_the_engine_is_not_reached_and_later_ones_at_once(
        self, tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MAX_CONNECTING_S", 0.05)
        StatusWriter(page).publish(EngineStatus(pid=1))

        async def main() -> None:
            client = EngineClient(f"ipc://{tmp_path}/engine", lambda: "it is gone", StatusReader(page))
            client.start()
            tasks = [asyncio.create_task(client.run(make_request(name, [4]))) for name in "ab"]
            tasks.append(asyncio.create_task(client.compare(comparison("compared"))))
            for task in tasks:
                with pytest.raises(EngineUnavailable, match="it is gone"):
                    await task
            with pytest.raises(EngineUnavailable, match="it is gone"):
                client._check("c")
            served = await asyncio.to_thread(Served, tmp_path)
            await until(lambda: client.ready)
            assert not served.core.pending and not served.runner.comparisons
            client.close()
            await asyncio.to_thread(served.close)

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_requests_of_two_processes_of_a_server_never_have_the_same_id() -> None:
    from penstock.api.state import ServerState
    from penstock.config import ServerConfig

    processes = [ServerState(ServerConfig(), {}) for _ in range(2)]
    ids = [process.next_id() for process in processes for _ in range(3)]
    assert len(set(ids)) == 6
    assert all(len(each) <= 12 for each in ids), "ids travel in every message"


class Pieces:
    """Idle work of the engine: counts its calls, and records whether the engine was busy during one."""

    min_idle_s = 0.0

    def __init__(self, served: Served) -> None:
        self.served, self.num_done = served, 0
        self.was_busy = False

    def run_idle(self) -> None:
        self.was_busy |= self.served.core.busy
        self.num_done += 1


def test_a_server_does_idle_work_between_requests_and_answers_them(served: Served) -> None:
    work = served.core.idle_work = Pieces(served)
    socket = served.ready("a")
    served.wait_for(lambda: work.num_done > 2)
    submit(socket, make_request("1", [3]))
    served.wait_for(lambda: served.runner.flights)
    before = work.num_done
    served.runner.finish()
    served.server.wake()
    (outcome,) = received(socket)
    assert isinstance(outcome, PooledOutput)
    served.wait_for(lambda: work.num_done > before)
    assert not work.was_busy
