"""An engine server that sleeps, as its clients and its status page show it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig
from penstock.engine.build import build_core
from penstock.errors import ModelAsleep, PenstockError
from penstock.runner.load import settle
from penstock.types import EngineSleep, Request
from penstock.wire.client import EngineClient
from penstock.wire.messages import Ready
from penstock.wire.server import EngineServer
from penstock.wire.status import EngineStatus, StatusReader, StatusWriter, create_status_page
from tests.checkpoints import write_bert
from tests.helpers import make_request
from tests.waiting import PATIENCE_S, wait_until


class Sleeping:
    """A server of a small model, on a thread."""

    def __init__(self, folder: Path) -> None:
        model, page = folder / "model", folder / "status"
        model.mkdir()
        config = EngineConfig(model=str(write_bert(model)), device="cpu", threads=1)
        spec = describe(config)
        create_status_page(page)
        self.status, self.address = StatusReader(page), f"ipc://{folder}/engine"
        self.server = EngineServer(self.address, status=StatusWriter(page))
        self.core = build_core(spec, settle(config, spec), self.server.wake)
        self.may_wake = threading.Event()
        self.may_wake.set()
        self.rooms: list[int] = []
        self.server.make_room = self._make_room
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        self.server.serve(self.core, Ready(1, {}), lambda core: True)

    def _make_room(self, num_bytes: int) -> None:
        self.rooms.append(num_bytes)
        assert self.may_wake.wait(PATIENCE_S)

    def start(self) -> None:
        self.thread.start()

    def fall_asleep(self, level: int | None = None) -> None:
        self.command(lambda done: self.server.sleep(level, done))

    def wake_up(self) -> None:
        self.command(self.server.wake_up)

    def command(self, give: Callable[[Callable[[str | None], None]], None]) -> None:
        ended: list[str | None] = []
        give(ended.append)
        wait_until(lambda: ended)
        assert ended == [None]

    def read(self) -> EngineStatus:
        return self.status.read()

    def until_state(self, state: EngineSleep) -> None:
        wait_until(lambda: self.read().state == state)

    def run(self, *requests: Request, during: Callable[[], None] = lambda: None) -> list[object]:
        """The vectors or the error of each request; `during` is called once all are submitted."""

        async def main() -> list[object]:
            client = EngineClient(self.address)
            client.start()
            async with asyncio.timeout(PATIENCE_S):
                while not client.ready:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                tasks = [asyncio.create_task(client.run(each)) for each in requests]
                await asyncio.sleep(0)
                await asyncio.to_thread(during)
                found = await asyncio.gather(*tasks, return_exceptions=True)
            client.close()
            return [each if isinstance(each, BaseException) else each.values for each in found]

        return asyncio.run(main())

    def close(self) -> None:
        self.may_wake.set()
        self.server.stop()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[Sleeping]:
    made = Sleeping(tmp_path)
    yield made
    made.close()


def requests(prefix: str, count: int = 6) -> list[Request]:
    return [make_request(f"{prefix}{n}", [3 + n, 2], first_token=5 + n) for n in range(count)]


def test_requests_wake_the_engine_and_get_the_answers_they_got_before(sleeping: Sleeping) -> None:
    sleeping.start()
    before = sleeping.run(*requests("a"))
    for level in (None, 1, 2):
        sleeping.fall_asleep(level)
        sleeping.until_state(EngineSleep.ASLEEP)
        woken = sleeping.run(*requests("b"))
        for one, other in zip(before, woken, strict=True):
            np.testing.assert_array_equal(one, other)
        sleeping.until_state(EngineSleep.AWAKE)
    assert sleeping.rooms == [sleeping.read().device_bytes] * 3


def test_the_status_page_is_current_when_an_order_is_done(sleeping: Sleeping) -> None:
    sleeping.server.STATUS_INTERVAL_S = 10 * PATIENCE_S  # no periodic update during the test
    sleeping.start()
    for _ in range(3):
        sleeping.fall_asleep()
        assert sleeping.read().state == EngineSleep.ASLEEP
        sleeping.wake_up()
        assert sleeping.read().state == EngineSleep.AWAKE


def test_held_requests_run_as_soon_as_the_engine_is_awake(
    sleeping: Sleeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineServer, "IDLE_POLL_MS", int(10_000 * PATIENCE_S))  # the loop does not poll
    sleeping.start()
    sleeping.fall_asleep()
    assert all(isinstance(each, np.ndarray) for each in sleeping.run(*requests("a")))


def test_the_status_page_tells_what_is_held_and_the_loop_turns_meanwhile(sleeping: Sleeping) -> None:
    sleeping.start()
    sleeping.fall_asleep()
    sleeping.until_state(EngineSleep.ASLEEP)
    idle_since_s = sleeping.read().last_request_s
    sleeping.may_wake.clear()

    def look() -> None:
        wait_until(lambda: sleeping.read().queued_rows == 12)
        status = sleeping.read()
        assert status.state == EngineSleep.WAKING
        assert status.queued_tokens == sum(each.num_tokens for each in requests("c"))
        assert status.last_request_s > idle_since_s
        wait_until(lambda: sleeping.read().heartbeat_s > status.heartbeat_s)
        sleeping.may_wake.set()

    assert all(isinstance(each, np.ndarray) for each in sleeping.run(*requests("c"), during=look))
    wait_until(lambda: sleeping.read().queued_rows == 0)


def test_a_client_that_goes_takes_its_held_requests_along(sleeping: Sleeping) -> None:
    sleeping.start()
    sleeping.fall_asleep()
    sleeping.may_wake.clear()

    async def leave() -> None:
        client = EngineClient(sleeping.address)
        client.start()
        async with asyncio.timeout(PATIENCE_S):
            while not client.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task = asyncio.create_task(client.run(make_request("left", [4])))
            while sleeping.read().queued_rows != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            while sleeping.read().queued_rows != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client.close()

    asyncio.run(leave())
    sleeping.may_wake.set()
    sleeping.until_state(EngineSleep.AWAKE)
    assert not sleeping.core.busy


def test_a_request_that_may_not_wait_fails_and_the_next_finds_the_engine_awake(sleeping: Sleeping) -> None:
    sleeping.server.wake_timeout_s = 0
    sleeping.start()
    sleeping.fall_asleep()
    (first,) = sleeping.run(make_request("first", [4]))
    assert isinstance(first, ModelAsleep)
    sleeping.until_state(EngineSleep.AWAKE)
    assert isinstance(sleeping.run(make_request("second", [4]))[0], np.ndarray)


def test_a_deadline_ends_a_held_request(sleeping: Sleeping) -> None:
    sleeping.start()
    sleeping.fall_asleep()
    sleeping.may_wake.clear()
    now_s = time.monotonic()
    (found,) = sleeping.run(make_request("short", [4], arrival_s=now_s, deadline_s=now_s + 0.05))
    assert isinstance(found, PenstockError)
    assert found.code == "deadline_exceeded"


def test_a_server_that_stops_answers_what_it_holds(sleeping: Sleeping) -> None:
    sleeping.start()
    sleeping.fall_asleep()
    sleeping.may_wake.clear()

    def stop() -> None:
        wait_until(lambda: sleeping.read().queued_rows == 12)
        sleeping.server.stop()
        sleeping.may_wake.set()

    assert all(isinstance(each, np.ndarray) for each in sleeping.run(*requests("d"), during=stop))


def test_answers_that_arrived_before_the_engine_closed_are_read_after_it(sleeping: Sleeping) -> None:
    sleeping.start()
    sleeping.fall_asleep()
    sleeping.may_wake.clear()

    async def main() -> list[object]:
        client = EngineClient(sleeping.address)
        client.start()
        async with asyncio.timeout(PATIENCE_S):
            while not client.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            tasks = [asyncio.create_task(client.run(each)) for each in requests("e")]
            while sleeping.read().queued_rows != 12:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            sleeping.server.stop()
            sleeping.may_wake.set()
            sleeping.thread.join(PATIENCE_S)  # the client reads nothing until the connection is closed
            found = [(await each).values for each in tasks]
            while client.ready:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client.close()
        return found

    assert len(asyncio.run(main())) == 6


def test_commands_before_the_engine_serves_run_when_it_does(sleeping: Sleeping) -> None:
    ended: list[str | None] = []
    sleeping.server.sleep(None, ended.append)
    sleeping.server.wake_up(ended.append)
    sleeping.start()
    wait_until(lambda: len(ended) == 2)
    assert ended == [None, None]
    assert sleeping.rooms == [sleeping.read().device_bytes]


def test_the_turn_to_take_memory_ends_when_the_status_page_shows_the_end(sleeping: Sleeping) -> None:
    seen: list[EngineSleep] = []
    sleeping.server.leave_room = lambda: seen.append(sleeping.read().sleep_state)
    sleeping.start()
    sleeping.fall_asleep()
    sleeping.wake_up()
    assert seen == [EngineSleep.AWAKE, EngineSleep.ASLEEP, EngineSleep.AWAKE]
