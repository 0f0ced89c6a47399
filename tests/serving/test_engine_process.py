"""How many messages of a burst the engine server reads before it launches a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from penstock.engine.loop import EngineCore
from penstock.wire.messages import Cancel, Hello, Ready, encode, pack_requests
from penstock.wire.server import EngineServer
from tests.engine.fakes import ManualRunner, make_core
from tests.helpers import make_request
from tests.waiting import PATIENCE_S


class Burst:
    """A server that the test steps manually, and a client that has sent all its messages."""

    def __init__(self, address: str, core: EngineCore) -> None:
        self.core = core
        self.server = EngineServer(address)
        self.server._attach(core, Ready(1, {}))
        self.server._socket.bind(address)
        self.context = zmq.Context()
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(address)
        self.client.send_multipart([encode(Hello("client", os.getpid()))])
        assert self.server._socket.poll(30_000)
        self.server._receive()

    def send(self, count: int, tokens: int) -> None:
        for number in range(count):
            self.client.send_multipart(pack_requests([make_request(f"r{number}", [tokens])]))

    def receive(self) -> int:
        """Handle messages as in one iteration of the server, and return the number of tokens they queued."""
        assert self.server._socket.poll(30_000)
        before = self.core.scheduler.queue.num_tokens
        self.server._receive()
        return self.core.scheduler.queue.num_tokens - before

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.server._context.destroy(linger=0)


@pytest.fixture
def open_burst(tmp_path: Path) -> Iterator[Callable[[EngineCore], Burst]]:
    made: list[Burst] = []

    def make(core: EngineCore) -> Burst:
        made.append(Burst(f"ipc://{tmp_path}/engine{len(made)}", core))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_full_step_does_not_wait_for_the_rest_of_a_burst(open_burst: Callable[[EngineCore], Burst]) -> None:
    runner = ManualRunner()
    core = make_core(runner, tokens=100, depth=2)
    burst = open_burst(core)
    burst.send(60, 10)
    for steps in (1, 2):
        taken = 0
        while taken < 100:  # messages may arrive one by one
            taken += burst.receive()
        assert taken == 100
        core.step()
        assert len(runner.launched) == steps and runner.launched[-1].num_tokens == 100
    taken = 200
    while taken < 600:  # two steps are in flight, so the server reads all messages
        taken += burst.receive()
    assert taken == 600 and core.scheduler.queue.num_tokens == 400
    assert not core.can_fill_step
    runner.finish()
    assert not core.can_fill_step  # the step has not been collected yet
    core.step()
    assert len(runner.launched) == 3


def test_every_iteration_handles_a_message_even_if_no_step_can_be_launched(
    open_burst: Callable[[EngineCore], Burst], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for memory must not block its own cancellation."""
    runner = ManualRunner()
    core = make_core(runner, tokens=10)
    burst = open_burst(core)
    burst.send(1, 30)
    burst.client.send_multipart([encode(Cancel(["r0"]))])
    monkeypatch.setattr(core, "_launch_step", lambda: False)
    deadline_s = time.monotonic() + PATIENCE_S
    while core.scheduler.queue.num_tokens == 0 and time.monotonic() < deadline_s:
        burst.receive()
    assert core.can_fill_step
    while core.scheduler.queue.num_tokens and time.monotonic() < deadline_s:
        burst.receive()
        core.step()
    assert not core.busy
