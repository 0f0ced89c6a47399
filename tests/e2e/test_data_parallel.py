"""Several engines for one model: what clients see when one dies or hangs, and orders to all engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.checkpoint.find import default_folder
from penstock.wire.status import EngineSleep, EngineStatus, StatusReader
from tests.e2e.gates import Gates
from tests.e2e.server import Server, serving
from tests.waiting import PATIENCE_S

ADMIN = {"Authorization": "Bearer operator"}
ROUTE = "/v1/embeddings"


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Gates:
    return Gates(tmp_path_factory.mktemp("gates"))


@pytest.fixture(scope="module")
def server(gates: Gates, llama_folder: Path) -> Iterator[Server]:
    flags = ("--device", "null", "--data-parallel-size", "2", "--served-model-name", "model")
    environment = gates.environment | {"PENSTOCK_ADMIN_KEY": "operator"}
    with serving(str(llama_folder), *flags, environment=environment) as started:
        yield started


def engines(server: Server, model: int = 0) -> list[EngineStatus]:
    """The status of both engines of a model."""
    folder = server.runtime_folder / str(model)
    return [StatusReader(folder / name).read() for name in ("engine.status", "engine1.status")]


def entry(server: Server, name: str = "model") -> dict[str, Any]:
    return next(each for each in server.http.get("/v1/models").json()["data"] if each["id"] == name)


def order(server: Server, action: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/admin/models/{action}", json=body, headers=ADMIN)


def embed_both(server: Server, pool: ThreadPoolExecutor) -> list[Any]:
    """Submit requests and wait until both engines run some of them."""
    waiting = [pool.submit(server.post, ROUTE, input=f"text {number}") for number in range(6)]
    server.wait_for(lambda: all(page.step_began_s for page in engines(server)))
    return waiting


def wait_whole(server: Server) -> None:
    server.wait_for(lambda: entry(server)["engines_ready"] == 2)


def test_requests_of_a_killed_engine_are_answered_by_the_other(server: Server, gates: Gates) -> None:
    assert entry(server)["engines"] == entry(server)["engines_ready"] == 2
    with ThreadPoolExecutor(6) as pool:
        with gates.no_step_finishes():
            waiting = embed_both(server, pool)
            os.kill(engines(server)[0].pid, signal.SIGKILL)
            server.wait_for_metric("penstock_engine_up", 1)
            assert server.http.get("/ready").status_code == 200
        assert {each.result(PATIENCE_S).status_code for each in waiting} == {200}
    assert server.metric("penstock_retried_requests_total") >= 1
    wait_whole(server)
    assert server.metric("penstock_restarts_total") == 1
    server.wait_for_log("engine 0 of model was killed by SIGKILL")


def test_a_stream_whose_engine_is_killed_before_its_first_token_begins_again(
    server: Server, gates: Gates
) -> None:
    prompt = {"prompt": "the water", "max_tokens": 4, "stream": True, "ignore_eos": True}

    def running(besides: int = 0) -> list[int]:
        return [page.pid for page in engines(server) if page.step_began_s and page.pid != besides]

    with ThreadPoolExecutor(1) as pool:
        with gates.no_step_finishes():
            waiting = pool.submit(server.post, "/v1/completions", **prompt)
            server.wait_for(running)
            (first,) = running()
            os.kill(first, signal.SIGKILL)
            server.wait_for(lambda: running(besides=first))
        answer = waiting.result(PATIENCE_S)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    assert answer.text.count('"text"') == 4 and "error" not in answer.text
    wait_whole(server)


def test_requests_of_a_stopped_engine_are_answered_by_the_other(server: Server, gates: Gates) -> None:
    with ThreadPoolExecutor(6) as pool:
        with gates.no_step_finishes():
            waiting = embed_both(server, pool)
            stopped = engines(server)[1].pid
            os.kill(stopped, signal.SIGSTOP)
            server.wait_for_metric("penstock_engine_up", 1)
        assert {each.result(PATIENCE_S).status_code for each in waiting} == {200}
        assert server.post(ROUTE, input="more").status_code == 200
        os.kill(stopped, signal.SIGCONT)
    wait_whole(server)


def test_a_model_sleeps_when_all_its_engines_do(server: Server) -> None:
    assert order(server, "sleep", model="model").json()["state"] == "asleep"
    assert {page.sleep_state for page in engines(server)} == {EngineSleep.ASLEEP}
    assert entry(server)["state"] == "asleep"
    assert server.post(ROUTE, input="a").status_code == 200, "a request wakes an engine"
    assert entry(server)["state"] == "awake"
    assert order(server, "wake", model="model").json()["state"] == "awake"
    assert {page.sleep_state for page in engines(server)} == {EngineSleep.AWAKE}


def test_an_order_may_load_and_unload_a_model_with_several_engines(server: Server) -> None:
    settings = {"data_parallel_size": 2}
    loaded = order(server, "load", model=str(default_folder()), served_model_name="other", settings=settings)
    assert loaded.status_code == 200, loaded.text
    assert entry(server, "other")["engines_ready"] == 2 and len(server.engines()) == 4
    assert server.post(ROUTE, input="a", model="other").status_code == 200
    assert order(server, "unload", model="other").json()["state"] == "unloaded"
    assert len(server.engines()) == 2
    refused = order(server, "load", model=str(default_folder()), settings={"data_parallel_size": 0})
    assert refused.status_code == 400 and "use auto or a number from 1" in refused.text


def test_one_large_call_uses_all_engines(server: Server, gates: Gates) -> None:
    with ThreadPoolExecutor(1) as pool:
        with gates.no_step_finishes():
            waiting = pool.submit(server.post, ROUTE, input=["some words of a text"] * 2000)
            server.wait_for(lambda: all(page.step_began_s for page in engines(server)))
        assert len(waiting.result(PATIENCE_S).json()["data"]) == 2000
