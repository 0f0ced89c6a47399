from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.loop import EngineCore
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import Array, PooledResult, Request, StepPlan, StepResult
from penstock.wire import shared_memory as arenas
from penstock.wire.client import EngineClient
from penstock.wire.messages import Ready
from penstock.wire.server import EngineServer
from penstock.wire.shared_memory import SHARED_FROM, Arena, Place, Window, open_arena
from tests.helpers import make_request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
WIDTH = SHARED_FROM // 4  # numbers of a row that is large enough alone
BYTES = np.dtype(np.uint8)


def dies(arena: Arena, connection: bytes) -> None:
    """As the engine sees it when the process behind a connection has ended."""
    reading, writing = os.pipe()
    os.close(writing)
    reader = arena._readers[connection]
    reader.close()
    reader.life = reading


Step = tuple[str, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["make", "drop", "lend", "give", "die"]), st.integers(0, 99)), max_size=60
    )
)
def test_no_block_is_used_again_while_somebody_can_read_it_and_all_come_back(steps: list[Step]) -> None:
    arena = Arena(12 * SHARED_FROM)
    given_back: list[int] = []
    window = Window(arena.shared, lambda name, block: given_back.append(block))
    names = [b"one", b"two"]
    for name in names:
        arena.attach(name, name.decode(), os.getpid())
    own: list[tuple[Array, int]] = []  # the engine's arrays, and what was written to each
    lent: dict[bytes, list[tuple[Place, Array, int]]] = {name: [] for name in names}
    stamp = 0

    def check() -> None:
        for array, number in own:
            assert (array == number).all()
        for held in lent.values():
            for _, view, number in held:
                assert (view == number).all() and not view.flags.writeable

    for what, which in steps:
        name = names[which % 2]
        if what == "make":
            stamp = stamp % 250 + 1
            array = arena.empty((SHARED_FROM + which * 10_000,), BYTES)
            array[:] = stamp
            own.append((array, stamp))
            del array
        elif what == "drop" and own:
            own.pop(which % len(own))
        elif what == "lend" and own:
            array, number = own[which % len(own)]
            if (place := arena.lend(array, name)) is not None:
                lent[name].append((place, window.block(place), number))
            del array
        elif what == "give" and lent[name]:
            (start, _), *_ = lent[name].pop(which % len(lent[name]))
            arena.give_back(name, [start])
        elif what == "die":
            dies(arena, name)
            lent[name].clear()
            arena._bury()
            assert arena.lend(np.empty(1, BYTES), name) is None
            arena.attach(name, name.decode(), os.getpid())
        check()
    own.clear()
    for name in names:
        arena.give_back(name, [start for (start, _), *_ in lent[name]])
        lent[name].clear()
    assert arena.used == 0
    assert (arena._free.starts, arena._free.sizes) == ([0], [arena.size])
    arena.close()


def test_what_is_not_its_to_give_changes_nothing() -> None:
    arena = Arena(4 * SHARED_FROM)
    arena.attach(b"a", "a", os.getpid())
    array = arena.empty((WIDTH,), np.dtype(np.float32))
    place = arena.lend(array, b"a")
    assert place is not None
    arena.give_back(b"stranger", [place[0]])
    arena.give_back(b"a", [place[0] + 1, 7 * SHARED_FROM])
    assert arena.used == SHARED_FROM
    arena.give_back(b"a", [place[0], place[0], place[0]])
    assert arena.used == SHARED_FROM, "the engine's own array is still there"
    del array
    assert arena.used == 0
    arena.close()


def test_only_whole_large_arrays_for_somebody_who_can_read_lie_there() -> None:
    arena = Arena(8 * SHARED_FROM)
    assert arena.empty((WIDTH,), np.dtype(np.float32)).base is None, "nobody has mapped it"
    arena.attach(b"a", "a", os.getpid())
    assert arena.empty((WIDTH - 1,), np.dtype(np.float32)).base is None
    array = arena.empty((2, WIDTH), np.dtype(np.float32))
    assert arena.lend(array, b"b") is None
    assert arena.lend(array[1:], b"a") is None and arena.lend(array.T, b"a") is None
    assert arena.lend(array, b"a") == (0, 2 * SHARED_FROM)
    arena.close()


def test_a_process_that_comes_by_another_connection_keeps_its_blocks() -> None:
    arena = Arena(2 * SHARED_FROM)
    arena.attach(b"a", "one", os.getpid())
    array = arena.empty((WIDTH,), np.dtype(np.float32))
    assert arena.lend(array, b"a") is not None
    arena.attach(b"b", "one", os.getpid())
    del array
    assert arena.used == SHARED_FROM
    arena.give_back(b"b", [0])
    assert arena.used == 0
    arena.close()


def test_where_there_is_no_such_memory_nothing_is_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_arena(0) is None and not caplog.records

    def refuse(*_: Any) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert open_arena(1 << 20) is None
    assert [record.getMessage() for record in caplog.records] == [
        "no memory is shared with API processes, answers are sent: not here"
    ]


class WideRunner:
    """A row's values count up from its first token; steps wait while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.launched = threading.Event()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()

        gate = self.gate

        def run() -> None:
            gate.wait(20)
            firsts = plan.token_ids[plan.cu_lengths[:-1]].astype(np.float32)
            outputs = tuple(
                wide(firsts if variant.rows is None else firsts[variant.rows]) for variant in plan.variants
            )
            future.set_result(PooledResult(outputs))

        threading.Thread(target=run).start()
        self.launched.set()
        return future

    def close(self) -> None:
        return None


def wide(firsts: Array) -> Array:
    values: Array = firsts[:, None].astype(np.float32) + np.arange(WIDTH, dtype=np.float32)
    return values


def expected(request: Request) -> Array:
    return wide(request.token_ids[request.starts].astype(np.float32))


class Served:
    """An engine behind a socket, on a thread."""

    def __init__(self, address: str, shared_bytes: int) -> None:
        self.runner = WideRunner()
        self.server = EngineServer(address, shared_bytes)
        self.core = EngineCore(self.runner, Scheduler(Budget(4096, 64, 1 << 20)), wake=self.server.wake)  # type: ignore[arg-type]
        self.thread = threading.Thread(
            target=self.server.serve, args=(self.core, Ready(1, {}), lambda core: True)
        )
        self.thread.start()

    @property
    def arena(self) -> Arena:
        assert self.server.arena is not None
        return self.server.arena

    def stop(self) -> None:
        self.runner.gate.set()
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


@contextmanager
def serve(folder: Path, shared_bytes: int) -> Iterator[tuple[str, Served]]:
    address = f"ipc://{folder}/engine"
    served = Served(address, shared_bytes)
    try:
        yield address, served
    finally:
        served.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def connected(address: str) -> EngineClient:
    client = EngineClient(address)
    client.start()
    await until(lambda: client.ready is not None)
    return client


def is_shared(client: EngineClient, array: Array) -> bool:
    """Whether the array lies in the engine's memory rather than in a message."""
    assert client._window is not None
    memory = np.frombuffer(client._window._memory, dtype=np.uint8)
    return 0 <= array.ctypes.data - memory.ctypes.data < memory.nbytes


@pytest.mark.parametrize("shared_bytes", [0, 32 * SHARED_FROM])
def test_answers_are_the_same_whether_they_are_shared_or_sent(tmp_path: Path, shared_bytes: int) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        requests = [make_request(f"r{n}", [2] * (1 + n % 3), first_token=10 * n) for n in range(12)]
        answers = await asyncio.gather(*map(client.run, requests))
        for request, answer in zip(requests, answers, strict=True):
            np.testing.assert_array_equal(answer.values, expected(request))
            if shared_bytes:
                assert is_shared(client, answer.values) and not answer.values.flags.writeable
        if shared_bytes:
            assert served.arena.used == 24 * SHARED_FROM
            kept = answers[3].values[0, 5:]  # a part of an answer keeps all of it
            del answer, answers
            await until(lambda: served.arena.used == SHARED_FROM)
            np.testing.assert_array_equal(kept, expected(requests[3])[0, 5:])
            del kept
            await until(lambda: served.arena.used == 0)
        client.close()

    with serve(tmp_path, shared_bytes) as (address, served):
        asyncio.run(scene(address, served))


def test_what_finds_no_room_is_sent(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        first = await client.run(make_request("a", [1], first_token=5))
        second = await client.run(make_request("b", [1], first_token=9))
        assert is_shared(client, first.values) and not is_shared(client, second.values)
        assert first.values[0, 0] == 5 and second.values[0, 0] == 9
        del first
        await until(lambda: served.arena.used == 0)
        third = await client.run(make_request("c", [1], first_token=7))
        assert is_shared(client, third.values) and third.values[0, 0] == 7
        client.close()

    with serve(tmp_path, SHARED_FROM) as (address, served):
        asyncio.run(scene(address, served))


def test_requests_that_are_alike_share_a_block_until_the_last_process_gives_it_back(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        one, two = await connected(address), await connected(address)
        served.runner.gate.clear()
        tasks = [
            asyncio.ensure_future(client.run(make_request(name, [3], first_token=5)))
            for client, name in ((one, "a"), (one, "b"), (two, "c"))
        ]
        await until(lambda: len(served.core._progress) == 3)
        served.runner.gate.set()
        a, b, c = await asyncio.gather(*tasks)
        tasks.clear()
        assert served.arena.used == SHARED_FROM
        for client, answer in ((one, a), (one, b), (two, c)):
            assert is_shared(client, answer.values) and answer.values[0, 0] == 5
        del a, answer
        await asyncio.sleep(0.1)
        assert served.arena.used == SHARED_FROM and c.values[0, 0] == 5
        del b
        await asyncio.sleep(0.1)
        assert served.arena.used == SHARED_FROM and c.values[0, 0] == 5
        del c
        await until(lambda: served.arena.used == 0)
        one.close()
        two.close()

    with serve(tmp_path, 4 * SHARED_FROM) as (address, served):
        asyncio.run(scene(address, served))


@pytest.mark.parametrize("computed", [False, True])
def test_what_is_cancelled_is_free_again(tmp_path: Path, computed: bool) -> None:
    """Before the engine has its values, and when its answer is on its way."""

    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        served.runner.gate.clear()
        task = asyncio.ensure_future(client.run(make_request("a", [1, 1], first_token=5)))
        await until(served.runner.launched.is_set)
        if computed:
            served.runner.gate.set()
            while served.core.busy:  # the loop must not see the answer
                pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        served.runner.gate.set()
        await until(lambda: not served.core.busy and served.arena.used == 0)
        client.close()

    with serve(tmp_path, 4 * SHARED_FROM) as (address, served):
        asyncio.run(scene(address, served))


def test_what_is_cancelled_halfway_through_rows_of_another_holds_nothing(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        served.core.scheduler.budget = Budget(1, 64, 1 << 20)  # a row a step
        served.runner.gate.clear()
        leader = asyncio.ensure_future(client.run(make_request("a", [1], first_token=5)))
        await until(served.runner.launched.is_set)
        follower = asyncio.ensure_future(client.run(make_request("b", [1, 1], first_token=5)))
        await until(lambda: len(served.core._progress) == 2)
        gate, served.runner.gate = served.runner.gate, threading.Event()  # the next step waits
        gate.set()
        await leader
        assert served.core._progress["b"].received and not served.core._progress["b"].complete
        del leader
        follower.cancel()
        with pytest.raises(asyncio.CancelledError):
            await follower
        await until(lambda: "b" not in served.core._progress)
        served.runner.gate.set()
        await until(lambda: not served.core.busy and served.arena.used == 0)
        client.close()

    gc.disable()  # nothing may wait for it
    try:
        with serve(tmp_path, 4 * SHARED_FROM) as (address, served):
            asyncio.run(scene(address, served))
    finally:
        gc.enable()


HOLDER = """
import asyncio, sys
from penstock.wire.client import EngineClient
from tests.helpers import make_request

async def hold(address):
    client = EngineClient(address)
    client.start()
    while client.ready is None:
        await asyncio.sleep(0.01)
    answer = await client.run(make_request("theirs", [1], first_token=3))
    print(answer.values[0, 0], flush=True)
    await asyncio.sleep(60)

asyncio.run(hold(sys.argv[1]))
"""


def test_what_a_process_held_that_was_killed_is_free_again_and_not_before(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        command = [sys.executable, "-c", HOLDER, address]
        holder = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None
            assert await asyncio.to_thread(holder.stdout.readline) == "3.0\n"
            assert served.arena.used == SHARED_FROM
            answer = await client.run(make_request("a", [1], first_token=5))
            assert not is_shared(client, answer.values) and answer.values[0, 0] == 5
        finally:
            holder.kill()
            holder.wait(10)
            holder.stdout.close()
        answer = await client.run(make_request("b", [1], first_token=6))
        assert is_shared(client, answer.values) and answer.values[0, 0] == 6
        client.close()

    with serve(tmp_path, SHARED_FROM) as (address, served):
        asyncio.run(scene(address, served))


def test_a_new_engine_has_new_memory_and_what_came_from_the_old_one_stays_readable(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"

    async def scene() -> None:
        first = await asyncio.to_thread(Served, address, 4 * SHARED_FROM)
        client = await connected(address)
        old = await client.run(make_request("a", [1], first_token=5))
        assert is_shared(client, old.values)
        await asyncio.to_thread(first.stop)
        await until(lambda: client.ready is None)
        second = await asyncio.to_thread(Served, address, 4 * SHARED_FROM)
        await until(lambda: client.ready is not None)
        new = await client.run(make_request("b", [1], first_token=8))
        assert is_shared(client, new.values) and not is_shared(client, old.values)
        np.testing.assert_array_equal(old.values, wide(np.array([5])))
        np.testing.assert_array_equal(new.values, wide(np.array([8])))
        del old
        await asyncio.sleep(0.1)
        assert second.arena.used == SHARED_FROM, "what belonged to the old one frees nothing of the new one"
        del new
        await until(lambda: second.arena.used == 0)
        client.close()
        await asyncio.to_thread(second.stop)

    asyncio.run(scene())


def test_a_process_that_cannot_map_the_memory_is_sent_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(address: str, served: Served) -> None:
        able = await connected(address)
        with monkeypatch.context() as patch:
            patch.setattr(arenas.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError("not yours")))
            unable = await connected(address)
        assert unable._window is None and "cannot be shared, answers are sent: not yours" in caplog.text
        answers = await asyncio.gather(
            able.run(make_request("a", [1], first_token=5)), unable.run(make_request("b", [1], first_token=6))
        )
        assert is_shared(able, answers[0].values)
        assert [answer.values[0, 0] for answer in answers] == [5, 6]
        del answers
        await until(lambda: served.arena.used == 0)
        able.close()
        unable.close()

    with serve(tmp_path, 8 * SHARED_FROM) as (address, served):
        asyncio.run(scene(address, served))
