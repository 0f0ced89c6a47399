"""LoRA adapters in a server with two engines and two API processes: vLLM's routes, names and restarts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from penstock import Engine
from penstock.wire.status import EngineStatus, StatusReader
from tests.e2e.server import API, Server, serving
from tests.lora_models import TEXTS, Adapted, adapted_embedder
from tests.waiting import PATIENCE_S

ADMIN = {"Authorization": "Bearer operator"}
Vectors = NDArray[np.float32]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted_embedder(tmp_path_factory.mktemp("bert"), "a", "b", "c")


@pytest.fixture(scope="module")
def expected(bert: Adapted) -> dict[str, Vectors]:
    """Vectors of each adapter, computed with checkpoints merged by PEFT; `base` is without an adapter."""
    found = {}
    for name, folder in {"base": bert.base, **bert.merged}.items():
        with Engine(str(folder), device="cpu", threads=1) as engine:
            found[name] = engine.embed(TEXTS)
    return found


@pytest.fixture(scope="module")
def server(bert: Adapted) -> Iterator[Server]:
    flags = ["--device", "cpu", "--threads", "1", "--data-parallel-size", "2", "--api-server-count", "2"]
    flags += ["--served-model-name", "bert", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"]
    flags += ["--max-cpu-loras", "2", "--lora-root", str(bert.base.parent), "--result-cache-mb", "16"]
    modules = ["--lora-modules", f"tenant-a={bert.adapters['a']}"]
    environment = {**os.environ, "PENSTOCK_ADMIN_KEY": "operator"}
    with serving(str(bert.base), *flags, *modules, environment=environment) as started:
        yield started


def load(server: Server, name: str, path: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(server: Server, name: str, **more: Any) -> httpx.Response:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **more}, headers=ADMIN)


def embed(server: Server, *, is_cached: bool = True, **body: Any) -> Vectors:
    headers = {} if is_cached else {"cache-control": "no-store"}
    answer = server.http.post("/v1/embeddings", json={"input": TEXTS, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], dtype=np.float32)


def entries(server: Server) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in server.http.get("/v1/models").json()["data"]}


def close(found: Vectors, wanted: Vectors) -> bool:
    return bool(np.abs(found - wanted).max() < 1e-4)


def pages(server: Server) -> list[EngineStatus]:
    names = ("engine.status", "engine1.status")
    return [StatusReader(server.runtime_folder / "0" / name).read() for name in names]


def has_run_adapters(page: EngineStatus) -> bool:
    """Whether an engine holds two adapters in host memory, and has run steps with at least one."""
    return page.adapters_on_host >= 2 and page.adapters_on_device > 0


def test_a_request_chooses_an_adapter_in_three_ways(server: Server, expected: dict[str, Vectors]) -> None:
    for body in (
        {"model": "tenant-a"},
        {"model": "bert:tenant-a"},
        {"model": "bert", "adapter": "tenant-a"},
        {"adapter": "tenant-a"},
        {"model": "tenant-a", "adapter": "tenant-a"},
    ):
        assert close(embed(server, **body), expected["a"]), body
    assert close(embed(server, model="bert"), expected["base"])
    assert server.post("/v1/embeddings", model="tenant-a", input="x").json()["model"] == "tenant-a"


def test_an_adapter_is_loaded_everywhere_before_the_answer_and_gone_after_it(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    answer = load(server, "tenant-b", bert.adapters["b"])
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    assert answer.text == "Success: LoRA adapter 'tenant-b' added successfully."
    for _ in range(4):  # new connections reach both API processes, and their rows both engines
        with server.client() as client:
            body = {"model": "tenant-b", "input": TEXTS}
            rows = client.post("/v1/embeddings", json=body).json()["data"]
            assert close(np.array([each["embedding"] for each in rows]), expected["b"])
    listed = entries(server)["tenant-b"]
    assert (listed["parent"], listed["root"]) == ("bert", str(bert.adapters["b"]))
    assert set(entries(server)["bert"]["adapters"]) >= {"tenant-a", "tenant-b"}
    assert server.http.get("/v1/models/tenant-b").json()["parent"] == "bert"
    again = load(server, "tenant-b", bert.adapters["b"])
    assert again.status_code == 400 and "already been loaded" in again.json()["error"]["message"]
    gone = unload(server, "tenant-b")
    assert gone.status_code == 200 and gone.text == "Success: LoRA adapter 'tenant-b' removed successfully."
    assert "tenant-b" not in entries(server)
    for _ in range(4):
        with server.client() as client:
            refused = client.post("/v1/embeddings", json={"adapter": "tenant-b", "input": TEXTS})
            assert refused.status_code == 404
            assert "is not loaded; model bert has: tenant-a" in refused.json()["error"]["message"]
    assert unload(server, "tenant-b").status_code == 404


def test_orders_need_the_admin_key_and_stay_below_the_root(server: Server, bert: Adapted) -> None:
    body = {"lora_name": "x", "lora_path": str(bert.adapters["b"])}
    assert server.http.post("/v1/load_lora_adapter", json=body).status_code == 401
    assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": "tenant-a"}).status_code == 401
    for path in ("/etc", str(bert.base.parent / "../../.."), "/"):
        refused = load(server, "x", Path(path))
        assert refused.status_code == 400 and "--lora-root" in refused.text, refused.text
    missing = load(server, "x", bert.base.parent / "nothing")
    assert missing.status_code == 404 and "there is no folder" in missing.text
    for body in ({"lora_name": "x"}, {"lora_path": "y"}, {}):
        refused = server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        assert refused.status_code == 400 and "must be provided" in refused.text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bert", "a model has this name"),
        ("query", "names a prompt"),
        ("latest", "names a prompt or a version"),
        ("a:b", "a colon stands between"),
        ("a\nb", "printable"),
    ],
)
def test_a_name_that_could_mean_two_things_is_refused(
    server: Server, bert: Adapted, name: str, why: str
) -> None:
    refused = load(server, name, bert.adapters["b"])
    assert refused.status_code == 400 and why in refused.json()["error"]["message"]


def test_an_adapter_that_one_engine_cannot_load_is_on_none(
    server: Server, bert: Adapted, tmp_path: Path
) -> None:
    bad = bert.base.parent / "bad"
    shutil.copytree(bert.adapters["b"], bad)
    weights = bad / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    refused = load(server, "bad", bad)
    assert refused.status_code == 400 and "adapter_model.safetensors" in refused.text
    assert "bad" not in entries(server)
    assert load(server, "bad", bert.adapters["b"]).status_code == 200, "the name is free"
    assert unload(server, "bad").status_code == 200


def test_a_reload_in_place_gives_the_new_weights_and_no_cached_result(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    folder = bert.base.parent / "changing"
    shutil.copytree(bert.adapters["b"], folder)
    assert load(server, "changing", folder).status_code == 200
    for _ in range(3):
        assert close(embed(server, model="changing"), expected["b"])
    shutil.rmtree(folder)
    shutil.copytree(bert.adapters["c"], folder)
    assert load(server, "changing", folder, load_inplace=True).status_code == 200
    for _ in range(3):
        assert close(embed(server, model="changing"), expected["c"])
    assert unload(server, "changing").status_code == 200


def test_more_adapters_than_fit_are_served_from_their_files(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    names = {"one": "a", "two": "b", "three": "c", "four": "b"}
    for name, source in names.items():
        assert load(server, name, bert.adapters[source]).status_code == 200
    for _ in range(2):
        for name, source in names.items():
            assert close(embed(server, model=name, is_cached=False), expected[source])
    lora = server.http.get("/server_info").json()["models"][0]["lora"]
    assert lora["max_loras"] == 2 and lora["device_loads"] > len(names)
    assert lora["on_device"] <= 4 and set(names) < set(lora["adapters"])
    server.wait_for(lambda: server.metric("penstock_lora_device_loads") >= lora["device_loads"])
    assert server.metric("penstock_lora_adapters") >= len(names)
    for name in names:
        assert unload(server, name).status_code == 200


def test_a_killed_engine_comes_back_with_every_adapter_while_clients_see_nothing(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    assert load(server, "kept", bert.adapters["c"]).status_code == 200
    stop, wanted = Event(), {"kept": expected["c"], "tenant-a": expected["a"], "bert": expected["base"]}

    def client(name: str) -> int:
        count = 0
        while not stop.is_set():
            assert close(embed(server, model=name, is_cached=False), wanted[name])
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(client, name) for name in wanted]
        try:
            before = set(server.engines())
            os.kill(min(before), signal.SIGKILL)
            server.wait_for_log(" of bert is ready at ")  # every API process is connected again
            server.wait_for(
                lambda: any(has_run_adapters(page) for page in pages(server) if page.pid not in before)
            )
        finally:
            stop.set()
        assert all(each.result(PATIENCE_S) for each in running)
    assert unload(server, "kept").status_code == 200


def test_a_killed_api_process_comes_back_with_every_adapter(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    assert load(server, "kept", bert.adapters["b"]).status_code == 200
    killed = server.children(API)[0]
    os.kill(killed, signal.SIGKILL)
    server.wait_for(lambda: killed not in server.children(API) and len(server.children(API)) == 2)
    server.wait_ready()
    for _ in range(4):
        with server.client() as http:
            rows = http.post("/v1/embeddings", json={"model": "kept", "input": TEXTS}).json()["data"]
            assert close(np.array([each["embedding"] for each in rows]), expected["b"])
    assert unload(server, "kept").status_code == 200


def test_a_model_that_sleeps_wakes_with_its_adapters(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    body = {"model": "bert", "level": 2}
    slept = server.http.post("/v1/admin/models/sleep", json=body, headers=ADMIN)
    assert slept.status_code == 200, slept.text
    assert load(server, "late", bert.adapters["b"]).status_code == 200, "it is woken for that"
    assert close(embed(server, model="late"), expected["b"])
    assert server.http.post("/v1/admin/models/sleep", json=body, headers=ADMIN).status_code == 200
    assert close(embed(server, model="tenant-a"), expected["a"])
    assert unload(server, "late").status_code == 200


def test_the_openai_package_uses_an_adapter_as_a_model(server: Server, expected: dict[str, Vectors]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert "tenant-a" in [model.id for model in client.models.list()]
    answer = client.embeddings.create(model="tenant-a", input=TEXTS)
    assert answer.model == "tenant-a"
    assert close(np.array([each.embedding for each in answer.data]), expected["a"])
    extra = client.embeddings.create(model="bert", input=TEXTS, extra_body={"adapter": "tenant-a"})
    assert close(np.array([each.embedding for each in extra.data]), expected["a"])
    with pytest.raises(openai.NotFoundError, match="tenant-z"):
        client.embeddings.create(model="tenant-z", input=TEXTS)
