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
from penstock.wire import shared_memory
from penstock.wire.client import EngineClient
from penstock.wire.messages import Ready
from penstock.wire.server import EngineServer
from penstock.wire.shared_memory import (
    MIN_SHARED_BYTES,
    MappedMemory,
    Region,
    SharedMemory,
    open_shared_memory,
)
from tests.helpers import make_request
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")
WIDTH = MIN_SHARED_BYTES // 4  # values of the smallest row that is shared
BYTES = np.dtype(np.uint8)


def simulate_exit(memory: SharedMemory, connection: bytes) -> None:
    """Make the engine see that the process of a connection has exited."""
    reading, writing = os.pipe()
    os.close(writing)
    process = memory._readers[connection].process
    process.close()
    process.pidfd = reading


Step = tuple[str, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "drop", "share", "release", "exit"]), st.integers(0, 99)),
        max_size=60,
    )
)
def test_no_block_is_reused_while_a_process_can_read_it_and_all_are_freed(steps: list[Step]) -> None:
    memory = SharedMemory(12 * MIN_SHARED_BYTES)
    released: list[int] = []
    mapped = MappedMemory(memory.info, lambda name, block: released.append(block))
    names = [b"one", b"two"]
    for name in names:
        memory.add_reader(name, name.decode(), os.getpid())
    own: list[tuple[Array, int]] = []  # the engine's arrays, and the value written to each
    shared: dict[bytes, list[tuple[Region, Array, int]]] = {name: [] for name in names}
    stamp = 0

    def check() -> None:
        for array, number in own:
            assert (array == number).all()
        for held in shared.values():
            for _, view, number in held:
                assert (view == number).all() and not view.flags.writeable

    for what, which in steps:
        name = names[which % 2]
        if what == "allocate":
            stamp = stamp % 250 + 1
            array = memory.empty((MIN_SHARED_BYTES + which * 10_000,), BYTES)
            array[:] = stamp
            own.append((array, stamp))
            del array
        elif what == "drop" and own:
            own.pop(which % len(own))
        elif what == "share" and own:
            array, number = own[which % len(own)]
            if (region := memory.share(array, name)) is not None:
                shared[name].append((region, mapped.read(region), number))
            del array
        elif what == "release" and shared[name]:
            region, *_ = shared[name].pop(which % len(shared[name]))
            memory.release(name, [region.start])
        elif what == "exit":
            simulate_exit(memory, name)
            shared[name].clear()
            memory._remove_exited_readers()
            assert memory.share(np.empty(1, BYTES), name) is None
            memory.add_reader(name, name.decode(), os.getpid())
        check()
    own.clear()
    for name in names:
        memory.release(name, [region.start for region, *_ in shared[name]])
        shared[name].clear()
    assert memory.used_bytes == 0
    assert (memory._free.starts, memory._free.sizes) == ([0], [memory.size])
    memory.close()


def test_releasing_blocks_that_a_process_was_not_given_changes_nothing() -> None:
    memory = SharedMemory(4 * MIN_SHARED_BYTES)
    memory.add_reader(b"a", "a", os.getpid())
    array = memory.empty((WIDTH,), np.dtype(np.float32))
    region = memory.share(array, b"a")
    assert region is not None
    memory.release(b"stranger", [region.start])
    memory.release(b"a", [region.start + 1, 7 * MIN_SHARED_BYTES])
    assert memory.used_bytes == MIN_SHARED_BYTES
    memory.release(b"a", [region.start, region.start, region.start])
    assert memory.used_bytes == MIN_SHARED_BYTES, "the engine's own array is still there"
    del array
    assert memory.used_bytes == 0
    memory.close()


def test_only_whole_large_arrays_with_a_reader_are_shared() -> None:
    memory = SharedMemory(8 * MIN_SHARED_BYTES)
    assert memory.empty((WIDTH,), np.dtype(np.float32)).base is None, "no process has mapped it"
    memory.add_reader(b"a", "a", os.getpid())
    assert memory.empty((WIDTH - 1,), np.dtype(np.float32)).base is None
    array = memory.empty((2, WIDTH), np.dtype(np.float32))
    assert memory.share(array, b"b") is None
    assert memory.share(array[1:], b"a") is None and memory.share(array.T, b"a") is None
    assert memory.share(array, b"a") == (0, 2 * MIN_SHARED_BYTES)
    memory.close()


def test_a_process_that_reconnects_keeps_its_blocks() -> None:
    memory = SharedMemory(2 * MIN_SHARED_BYTES)
    memory.add_reader(b"a", "one", os.getpid())
    array = memory.empty((WIDTH,), np.dtype(np.float32))
    assert memory.share(array, b"a") is not None
    memory.add_reader(b"b", "one", os.getpid())
    del array
    assert memory.used_bytes == MIN_SHARED_BYTES
    memory.release(b"b", [0])
    assert memory.used_bytes == 0
    memory.close()


def test_nothing_is_shared_where_the_system_has_no_such_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_shared_memory(0) is None and not caplog.records

    def refuse(*_: Any) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert open_shared_memory(1 << 20) is None
    assert [record.getMessage() for record in caplog.records] == [
        "no memory is shared with API processes, large outputs are sent instead: not here"
    ]


class WideRunner:
    """A runner whose values count up from each row's first token. Steps wait while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.launched = threading.Event()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()

        gate = self.gate

        def run() -> None:
            gate.wait(PATIENCE_S)
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
    def memory(self) -> SharedMemory:
        assert self.server.memory is not None
        return self.server.memory

    def num_references(self) -> list[int]:
        """The number of blocks that each connected process holds, in ascending order."""
        return sorted(reader.references.total() for reader in self.memory._readers.values())

    def stop(self) -> None:
        self.runner.gate.set()
        self.server.stop()
        self.thread.join(PATIENCE_S)
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
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def connected(address: str) -> EngineClient:
    client = EngineClient(address)
    client.start()
    await until(lambda: client.ready)
    return client


def is_shared(client: EngineClient, array: Array) -> bool:
    """Whether the array is in the engine's memory rather than in a message."""
    assert client._memory is not None
    memory = np.frombuffer(client._memory._memory, dtype=np.uint8)
    return 0 <= array.ctypes.data - memory.ctypes.data < memory.nbytes


@pytest.mark.parametrize("shared_bytes", [0, 32 * MIN_SHARED_BYTES])
def test_outputs_are_the_same_whether_shared_or_sent(tmp_path: Path, shared_bytes: int) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        requests = [make_request(f"r{n}", [2] * (1 + n % 3), first_token=10 * n) for n in range(12)]
        answers = await asyncio.gather(*map(client.run, requests))
        for request, answer in zip(requests, answers, strict=True):
            np.testing.assert_array_equal(answer.values, expected(request))
            if shared_bytes:
                assert is_shared(client, answer.values) and not answer.values.flags.writeable
        if shared_bytes:
            assert served.memory.used_bytes == 24 * MIN_SHARED_BYTES
            kept = answers[3].values[0, 5:]  # a view keeps the whole block alive
            del answer, answers
            await until(lambda: served.memory.used_bytes == MIN_SHARED_BYTES)
            np.testing.assert_array_equal(kept, expected(requests[3])[0, 5:])
            del kept
            await until(lambda: served.memory.used_bytes == 0)
        client.close()

    with serve(tmp_path, shared_bytes) as (address, served):
        asyncio.run(scene(address, served))


def test_an_output_that_does_not_fit_is_sent(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        first = await client.run(make_request("a", [1], first_token=5))
        second = await client.run(make_request("b", [1], first_token=9))
        assert is_shared(client, first.values) and not is_shared(client, second.values)
        assert first.values[0, 0] == 5 and second.values[0, 0] == 9
        del first
        await until(lambda: served.memory.used_bytes == 0)
        third = await client.run(make_request("c", [1], first_token=7))
        assert is_shared(client, third.values) and third.values[0, 0] == 7
        client.close()

    with serve(tmp_path, MIN_SHARED_BYTES) as (address, served):
        asyncio.run(scene(address, served))


def test_deduplicated_requests_share_a_block_until_the_last_process_releases_it(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        one, two = await connected(address), await connected(address)
        served.runner.gate.clear()
        tasks = [
            asyncio.ensure_future(client.run(make_request(name, [3], first_token=5)))
            for client, name in ((one, "a"), (one, "b"), (two, "c"))
        ]
        await until(lambda: len(served.core.pending) == 3)
        served.runner.gate.set()
        a, b, c = await asyncio.gather(*tasks)
        tasks.clear()
        assert served.memory.used_bytes == MIN_SHARED_BYTES
        for client, answer in ((one, a), (one, b), (two, c)):
            assert is_shared(client, answer.values) and answer.values[0, 0] == 5
        del a, answer
        assert served.num_references() == [1, 1] and c.values[0, 0] == 5
        del b
        await until(lambda: served.num_references() == [0, 1])
        assert served.memory.used_bytes == MIN_SHARED_BYTES and c.values[0, 0] == 5
        del c
        await until(lambda: served.memory.used_bytes == 0)
        one.close()
        two.close()

    with serve(tmp_path, 4 * MIN_SHARED_BYTES) as (address, served):
        asyncio.run(scene(address, served))


@pytest.mark.parametrize("computed", [False, True])
def test_the_block_of_a_cancelled_request_is_freed(tmp_path: Path, computed: bool) -> None:
    """Cancel before the engine has computed the values, or while the output is in flight."""

    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        served.runner.gate.clear()
        task = asyncio.ensure_future(client.run(make_request("a", [1, 1], first_token=5)))
        await until(served.runner.launched.is_set)
        if computed:
            served.runner.gate.set()
            while served.core.busy:  # spins without running the event loop, which would receive the output
                pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        served.runner.gate.set()
        await until(lambda: not served.core.busy and served.memory.used_bytes == 0)
        client.close()

    with serve(tmp_path, 4 * MIN_SHARED_BYTES) as (address, served):
        asyncio.run(scene(address, served))


def test_a_request_cancelled_while_it_receives_deduplicated_rows_holds_no_block(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        served.core.scheduler.budget = Budget(1, 64, 1 << 20)  # one row per step
        served.runner.gate.clear()
        leader = asyncio.ensure_future(client.run(make_request("a", [1], first_token=5)))
        await until(served.runner.launched.is_set)
        follower = asyncio.ensure_future(client.run(make_request("b", [1, 1], first_token=5)))
        await until(lambda: len(served.core.pending) == 2)
        gate, served.runner.gate = served.runner.gate, threading.Event()  # holds the next step
        gate.set()
        await leader
        assert served.core.pending["b"].received and not served.core.pending["b"].complete
        del leader
        follower.cancel()
        with pytest.raises(asyncio.CancelledError):
            await follower
        await until(lambda: "b" not in served.core.pending)
        served.runner.gate.set()
        await until(lambda: not served.core.busy and served.memory.used_bytes == 0)
        client.close()

    gc.disable()  # blocks must be freed without the garbage collector
    try:
        with serve(tmp_path, 4 * MIN_SHARED_BYTES) as (address, served):
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
    while not client.ready:
        await asyncio.sleep(0.01)
    answer = await client.run(make_request("theirs", [1], first_token=3))
    print(answer.values[0, 0], flush=True)
    await asyncio.Event().wait()

asyncio.run(hold(sys.argv[1]))
"""


def test_blocks_of_a_killed_process_are_freed_and_not_before(tmp_path: Path) -> None:
    async def scene(address: str, served: Served) -> None:
        client = await connected(address)
        command = [sys.executable, "-c", HOLDER, address]
        holder = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None
            assert await asyncio.to_thread(holder.stdout.readline) == "3.0\n"
            assert served.memory.used_bytes == MIN_SHARED_BYTES
            answer = await client.run(make_request("a", [1], first_token=5))
            assert not is_shared(client, answer.values) and answer.values[0, 0] == 5
        finally:
            holder.kill()
            holder.wait(PATIENCE_S)
            holder.stdout.close()
        answer = await client.run(make_request("b", [1], first_token=6))
        assert is_shared(client, answer.values) and answer.values[0, 0] == 6
        client.close()

    with serve(tmp_path, MIN_SHARED_BYTES) as (address, served):
        asyncio.run(scene(address, served))


def test_outputs_of_a_former_engine_stay_readable_after_a_restart(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"

    async def scene() -> None:
        first = await asyncio.to_thread(Served, address, 4 * MIN_SHARED_BYTES)
        client = await connected(address)
        old = await client.run(make_request("a", [1], first_token=5))
        assert is_shared(client, old.values)
        await asyncio.to_thread(first.stop)
        await until(lambda: not client.ready)
        second = await asyncio.to_thread(Served, address, 4 * MIN_SHARED_BYTES)
        await until(lambda: client.ready)
        new = await client.run(make_request("b", [1], first_token=8))
        assert is_shared(client, new.values) and not is_shared(client, old.values)
        np.testing.assert_array_equal(old.values, wide(np.array([5])))
        np.testing.assert_array_equal(new.values, wide(np.array([8])))
        del old
        await until(lambda: not client._released)
        again = await client.run(
            make_request("c", [1], first_token=9)
        )  # the engine has processed earlier releases on this connection
        assert second.memory.used_bytes == 2 * MIN_SHARED_BYTES, (
            "an old block frees nothing of the new memory"
        )
        del again
        del new
        await until(lambda: second.memory.used_bytes == 0)
        client.close()
        await asyncio.to_thread(second.stop)

    asyncio.run(scene())


def test_a_process_that_cannot_map_the_memory_gets_its_outputs_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(address: str, served: Served) -> None:
        able = await connected(address)
        with monkeypatch.context() as patch:
            patch.setattr(
                shared_memory.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError("not yours"))
            )
            unable = await connected(address)
        assert unable._memory is None and "large outputs are sent instead: not yours" in caplog.text
        answers = await asyncio.gather(
            able.run(make_request("a", [1], first_token=5)), unable.run(make_request("b", [1], first_token=6))
        )
        assert is_shared(able, answers[0].values)
        assert [answer.values[0, 0] for answer in answers] == [5, 6]
        del answers
        await until(lambda: served.memory.used_bytes == 0)
        able.close()
        unable.close()

    with serve(tmp_path, 8 * MIN_SHARED_BYTES) as (address, served):
        asyncio.run(scene(address, served))
