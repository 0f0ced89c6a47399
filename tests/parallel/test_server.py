"""A server whose engine has two ranks: how it starts, fails and stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serving
from tests.parallel.checkpoints import LLAMA, write_checkpoint
from tests.parallel.rank_processes import own_ranks, ranks
from tests.waiting import wait_until

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_checkpoint(tmp_path_factory.mktemp("server") / "llama", LLAMA)
    flags = ("--model", str(folder), "--device", "cpu", "-tp", "2", "--kv-cache-gb", "0.05")
    with serving(*flags, "--admin-key", "secret") as started:
        yield started


def complete(server: Server) -> str:
    body = {"prompt": "water and oil", "max_tokens": 5, "temperature": 0}
    reply = server.post("/v1/completions", model="llama", **body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_the_server_shows_its_ranks(server: Server) -> None:
    settings = server.http.get("/server_info").text
    assert '"tensor_parallel_size":2' in settings.replace(" ", "")
    assert len(own_ranks(server)) == 1


def test_the_engine_refuses_to_sleep_with_a_reason(server: Server) -> None:
    headers = {"Authorization": "Bearer secret"}
    reply = server.http.post("/v1/admin/models/sleep", json={"model": "llama"}, headers=headers)
    assert reply.status_code == 409
    assert "an engine of 2 tensor-parallel ranks cannot sleep" in reply.text


def test_a_dead_rank_restarts_the_whole_engine(server: Server) -> None:
    text = complete(server)
    (engine,), (rank,) = server.engines(), own_ranks(server)
    os.kill(rank, signal.SIGKILL)
    server.wait_for(lambda: server.engines() not in ([], [engine]))
    server.wait_for(lambda: own_ranks(server) not in ([], [rank]))
    server.wait_ready()
    assert complete(server) == text
    assert any("was killed by signal 9" in line for line in server.log)


def test_ranks_end_with_an_engine_that_is_killed(server: Server) -> None:
    server.wait_ready()
    (engine,), (rank,) = server.engines(), own_ranks(server)
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: rank not in ranks())
    server.wait_for(lambda: server.engines() not in ([], [engine]))
    server.wait_ready()
    assert complete(server)


def test_ranks_end_with_the_server(server: Server) -> None:
    server.wait_ready()
    held = own_ranks(server)
    assert held and server.terminate() == 0
    wait_until(lambda: not set(held) & set(ranks()))
