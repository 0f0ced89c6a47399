"""The engine's loop: how much of a flood of messages it takes before the device gets a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from penstock.engine.loop import EngineCore
from penstock.wire.messages import Cancel, encode, pack_requests
from penstock.wire.server import EngineServer
from tests.engine.fakes import ManualRunner, make_core
from tests.helpers import make_request


class Flood:
    """A server whose turns the test takes, and a client that has sent all it had."""

    def __init__(self, address: str, core: EngineCore) -> None:
        self.core = core
        self.server = EngineServer(address)
        self.server._core = core
        self.server._socket.bind(address)
        self.context = zmq.Context()
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(address)

    def send(self, count: int, tokens: int) -> None:
        for number in range(count):
            self.client.send_multipart(pack_requests([make_request(f"r{number}", [tokens])]))

    def turn(self) -> int:
        """How many messages it took; waits for the first."""
        assert self.server._socket.poll(5000)
        before = self.core.scheduler.queue.num_tokens
        self.server._receive()
        return self.core.scheduler.queue.num_tokens - before

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.server._context.destroy(linger=0)


@pytest.fixture
def flood(tmp_path: Path) -> Iterator[Callable[[EngineCore], Flood]]:
    made: list[Flood] = []

    def make(core: EngineCore) -> Flood:
        made.append(Flood(f"ipc://{tmp_path}/engine{len(made)}", core))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_full_step_does_not_wait_for_the_rest_of_a_flood(flood: Callable[[EngineCore], Flood]) -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=100, depth=2)
    flooded = flood(core)
    flooded.send(60, 10)
    for steps in (1, 2):
        assert flooded.turn() == 100
        core.step()
        assert len(runner.launched) == steps and runner.launched[-1].num_tokens == 100
    taken = 200
    while taken < 600:  # two are in flight, so nothing keeps the loop from taking all that comes
        taken += flooded.turn()
    assert taken == 600 and core.scheduler.queue.num_tokens == 400
    assert not core.can_fill_step
    runner.finish()
    assert not core.can_fill_step  # until it has been collected
    core.step()
    assert len(runner.launched) == 3


def test_every_turn_takes_a_message_even_if_nothing_can_be_launched(
    flood: Callable[[EngineCore], Flood], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for memory must not keep its own cancellation out."""
    runner = ManualRunner()
    core = make_core(runner, tokens=10)
    flooded = flood(core)
    flooded.send(1, 30)
    flooded.client.send_multipart([encode(Cancel(["r0"]))])
    monkeypatch.setattr(core, "_next_step", lambda: None)
    until = time.monotonic() + 10
    while core.scheduler.queue.num_tokens == 0 and time.monotonic() < until:
        flooded.turn()
    assert core.can_fill_step
    while core.scheduler.queue.num_tokens and time.monotonic() < until:
        flooded.turn()
        core.step()
    assert not core.busy
