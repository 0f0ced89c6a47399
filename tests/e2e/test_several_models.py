"""Several models in one server: names, the operator's orders, and crashes that leave the others serving."""

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
from penstock.wire.status import StatusReader
from tests.e2e.server import ENGINE, Server, serving
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def default_model() -> Path:
    return default_folder()


ADMIN = {"Authorization": "Bearer operator"}
CONFIG = """
device: "null"
models:
  - served_model_name: first
    model: {model}
    aliases: [text-embedding-3-small]
  - served_model_name: [second, other]
    model: {model}
    max_model_len: 16
    auto_truncate: true
"""


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("config") / "models.yaml"
    file.write_text(CONFIG.format(model=default_model))
    with serving(
        "--config",
        str(file),
        "--any-model-name",
        environment={**os.environ, "PENSTOCK_ADMIN_KEY": "operator"},
    ) as started:
        yield started


def order(server: Server, action: str, **body: Any) -> httpx.Response:
    return server.http.post(f"/v1/admin/models/{action}", json=body, headers=ADMIN)


def states(server: Server) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.http.get("/v1/models").json()["data"]}


def engine_pid(server: Server, name: str) -> int:
    """The process id of a model's engine, from its status page."""
    number = {"first": 0, "second": 1}[name]
    return StatusReader(server.runtime_folder / str(number) / "engine.status").read().pid


def embed(server: Server, model: str, text: str = "water") -> httpx.Response:
    return server.post("/v1/embeddings", model=model, input=text)


def test_a_request_reaches_the_model_that_it_names(server: Server) -> None:
    for name, first in (
        ("first", "first"),
        ("text-embedding-3-small", "first"),
        ("second", "second"),
        ("other", "second"),
    ):
        assert embed(server, name).json()["model"] == first
    assert embed(server, "third").json()["model"] == "first", "as --any-model-name says"
    assert states(server) == dict.fromkeys(("first", "second", "text-embedding-3-small", "other"), "awake")


def test_each_model_has_settings_of_its_own(server: Server) -> None:
    long = "water " * 100
    assert embed(server, "first", long).json()["usage"]["prompt_tokens"] == 102
    assert embed(server, "second", long).json()["usage"]["prompt_tokens"] == 16


def test_a_model_sleeps_and_wakes_by_order_and_by_request(server: Server) -> None:
    before = embed(server, "second").json()["data"]
    slept = order(server, "sleep", model="other").json()
    assert (slept["model"], slept["state"]) == ("second", "asleep")
    assert states(server)["second"] == "asleep" and states(server)["first"] == "awake"
    assert server.http.get("/ready").status_code == 200
    assert embed(server, "second").json()["data"] == before, "a request wakes it"
    assert states(server)["second"] == "awake"
    order(server, "sleep", model="second")
    assert order(server, "wake", model="second").json()["state"] == "awake"
    assert states(server)["second"] == "awake"


def test_models_come_and_go(server: Server, default_model: Path) -> None:
    loaded = order(
        server,
        "load",
        model=str(default_model),
        served_model_name="third",
        aliases=["alias"],
        settings={"max_model_len": 8},
    )
    assert loaded.json()["state"] == "awake", loaded.text
    assert embed(server, "alias").json()["model"] == "third"
    assert list(states(server))[:3] == ["first", "second", "third"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: embed(server, "third").status_code, range(16)))
        unloaded = order(server, "unload", model="alias")
    assert set(answers) == {200} and unloaded.json()["state"] == "unloaded"
    assert embed(server, "third").json()["model"] == "first"
    server.wait_for(lambda: len(server.engines()) == 2)


@pytest.mark.parametrize(
    ("action", "body", "status", "param", "words"),
    [
        ("sleep", {"model": "nothing"}, 404, "model", "not served here"),
        ("unload", {"model": ""}, 404, "model", "not served here"),
        ("unload", {"model": "first:query"}, 404, "model", "not served here"),
        ("sleep", {"model": "first", "level": 3}, 400, "level", "level"),
        ("load", {"model": "./nowhere"}, 400, "model", "neither a folder nor a hub id"),
        (
            *("load", {"model": "DEFAULT", "served_model_name": "second"}, 400),
            *("served_model_name", "two models have the name"),
        ),
        ("load", {"model": "DEFAULT", "settings": {"dtyp": "x"}}, 400, "settings", "dtyp"),
        ("load", {"model": "DEFAULT", "settings": {"model": "x"}}, 400, "settings", "cannot have model"),
        ("load", {"model": "DEFAULT", "settings": {"threads": -1}}, 400, "settings.threads", "at least 1"),
    ],
)
def test_an_order_that_cannot_be_carried_out_says_why(
    server: Server,
    default_model: Path,
    action: str,
    body: dict[str, Any],
    status: int,
    param: str,
    words: str,
) -> None:
    if body["model"] == "DEFAULT":
        body = {**body, "model": str(default_model)}
    answer = order(server, action, **body)
    assert answer.status_code == status and words in answer.text
    assert answer.json()["error"]["param"] == param
    assert len(states(server)) == 4


def test_orders_need_the_admin_key(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = server.http.post("/v1/admin/models/sleep", json={"model": "first"}, headers=headers)
        assert answer.status_code in (401, 403)
    assert states(server)["first"] == "awake"


def test_a_crash_of_one_engine_leaves_the_others_serving(server: Server) -> None:
    pid = engine_pid(server, "second")
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(embed, server, "first", f"text {index}") for index in range(20)]
        os.kill(pid, signal.SIGKILL)
        others += [pool.submit(embed, server, "first", f"text {index}") for index in range(20, 40)]
        assert {each.result(PATIENCE_S).status_code for each in others} == {200}
    assert server.http.get("/ready").status_code == 200
    server.wait_for(lambda: embed(server, "second").status_code == 200)
    assert engine_pid(server, "second") != pid
    assert len(server.children(ENGINE)) == 2


def test_the_least_recently_used_model_sleeps_beyond_the_limit(default_model: Path, tmp_path: Path) -> None:
    models = [f"{name}={default_model}" for name in ("a", "b", "c")]
    with serving(*models, "--device", "null", "--max-awake-models", "2") as server:
        for awake, asleep in (("ab", "c"), ("bc", "a"), ("ca", "b")):
            for name in awake:
                assert embed(server, name).status_code == 200
            expected = dict.fromkeys(awake, "awake") | {asleep: "asleep"}
            server.wait_for(lambda expected=expected: states(server) == expected)


def test_an_idle_model_sleeps_and_wakes_for_the_next_request(default_model: Path) -> None:
    with serving(str(default_model), "--device", "null", "--sleep-after", "0.2") as server:
        name = next(iter(states(server)))
        server.wait_for(lambda: states(server) == {name: "asleep"})
        assert embed(server, name).status_code == 200
        server.wait_for(lambda: states(server) == {name: "asleep"})
