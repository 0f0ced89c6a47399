"""Penstock on a Ray cluster of two nodes: all kinds of models, errors, and lost or replaced replicas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import Engine
from tests.checkpoints import write_bert, write_cross_encoder
from tests.e2e.llama import write_llama
from tests.scale.cluster import APP, PATIENCE_S, RayCluster, kill, start_cluster, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ADMIN = "an-admin-key"
TEXTS = [f"text number {number}" for number in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    writers = {"embed": write_bert, "rerank": write_cross_encoder, "chat": write_llama}
    for name, write in writers.items():
        write(folder / name)
    return {name: folder / name for name in writers}


@pytest.fixture(scope="module")
def config(folders: dict[str, Path]) -> Callable[..., dict[str, Any]]:
    def make(**embed: Any) -> dict[str, Any]:
        few = {"cpus": 0.2}
        return {
            "device": "cpu",
            "threads": 1,
            "admin_key": [ADMIN],
            "models": [
                {"model": str(folders["embed"]), "ray": {"min_replicas": 2}, "aliases": ["e"], **embed},
                {"model": str(folders["rerank"])},
                {"model": str(folders["chat"])},
            ],
            "ray": {**few, "ingress_cpus": 0.2, "wait_for_replica_s": 60},
        }

    return make


@pytest.fixture(scope="module")
def cluster(config: Callable[..., dict[str, Any]]) -> Iterator[RayCluster]:
    with start_cluster(workers=1) as running:
        running.deploy(config())
        yield running


@pytest.fixture(scope="module")
def client(cluster: RayCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=PATIENCE_S) as made:
        wait_for(lambda: made.get("/ready").status_code == 200)
        yield made


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Any:
    with Engine(str(folders["embed"]), device="cpu", threads=1) as engine:
        return engine.embed(TEXTS)


def vectors(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.array([row["embedding"] for row in response.json()["data"]])


def embed(client: httpx.Client, texts: list[str]) -> Any:
    return vectors(client.post("/v1/embeddings", json={"model": "e", "input": texts}))


def test_vectors_are_those_of_the_engine(client: httpx.Client, expected: Any) -> None:
    np.testing.assert_allclose(embed(client, TEXTS), expected, atol=1e-5)


def test_every_model_answers_its_own_dialects(client: httpx.Client) -> None:
    assert [each["id"] for each in client.get("/v1/models").json()["data"]][:3] == ["embed", "rerank", "chat"]
    ranked = client.post("/rerank", json={"query": "q", "documents": TEXTS[:3], "model": "rerank"})
    assert sorted(row["index"] for row in ranked.json()["results"]) == [0, 1, 2]
    body = {"model": "chat", "prompt": "hello", "max_tokens": 5, "temperature": 0}
    whole = client.post("/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as streamed:
        pieces = [line for line in streamed.iter_lines() if line.startswith("data: ")]
    assert pieces[-1] == "data: [DONE]"
    text = "".join(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"] for line in pieces[:-1])
    assert text == whole.json()["choices"][0]["text"]


def test_errors_keep_the_shape_of_their_dialect(client: httpx.Client) -> None:
    unknown = client.post("/v1/embeddings", json={"model": "nobody", "input": "x"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "NotFoundError")
    regex = {"model": "chat", "prompt": "x", "structured_outputs": {"regex": "("}}
    refused = client.post("/v1/completions", json=regex)  # refused by the engine, in another process
    assert refused.status_code == 400, refused.text
    late = client.post("/v1/embeddings", json={"model": "e", "input": TEXTS * 100, "timeout": 1e-4})
    assert late.status_code == 408, late.text


def test_orders_for_models_are_refused_with_a_reason(client: httpx.Client) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    refused = client.post("/v1/admin/models/unload", json={"model": "embed"}, headers=headers)
    assert refused.status_code == 501
    assert "deploy it with another configuration" in refused.text


def test_metrics_are_those_of_the_ingress(client: httpx.Client) -> None:
    page = client.get("/metrics").text
    assert re.search(r'^penstock_engine_up{.*model="embed"} 1.0$', page, re.MULTILINE)


async def under_load(cluster: RayCluster, expected: Any, event: Callable[[], None]) -> list[int]:
    """The statuses of requests that run during `event`. Every vector must be right."""
    done = asyncio.Event()
    statuses: list[int] = []

    async def client(number: int) -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            while not done.is_set():
                body = {"model": "e", "input": TEXTS[number]}
                response = await http.post("/v1/embeddings", json=body)
                statuses.append(response.status_code)
                if response.status_code == 200:
                    np.testing.assert_allclose(vectors(response)[0], expected[number], atol=1e-5)

    clients = asyncio.gather(*(client(number) for number in range(4)))
    try:
        await asyncio.to_thread(wait_for, lambda: len(statuses) >= 20)
        await asyncio.to_thread(event)
        target = len(statuses) + 20
        await asyncio.to_thread(wait_for, lambda: len(statuses) >= target)
    finally:
        done.set()
        await clients
    return statuses


def test_a_killed_replica_costs_no_answer(cluster: RayCluster, client: httpx.Client, expected: Any) -> None:
    def event() -> None:
        kill(cluster.pids("engine-embed")[0])
        wait_for(lambda: cluster.num_running("engine-embed") < 2)
        wait_for(lambda: cluster.num_running("engine-embed") == 2)

    assert set(asyncio.run(under_load(cluster, expected, event))) == {200}


def test_a_killed_ingress_costs_only_what_it_had(
    cluster: RayCluster, client: httpx.Client, expected: Any
) -> None:
    def event() -> None:
        (pid,) = cluster.pids("ingress")
        kill(pid)
        wait_for(lambda: cluster.pids("ingress") not in ([], [pid]) and cluster.num_running("ingress") == 1)

    statuses = asyncio.run(under_load(cluster, expected, event))
    failed = [status for status in statuses if status != 200]
    assert len(failed) <= 4 and set(failed) <= {500, 503}  # at most one per client


def test_an_update_costs_no_answer(
    cluster: RayCluster, client: httpx.Client, config: Callable[..., dict[str, Any]], expected: Any
) -> None:
    before = set(cluster.pids("engine-embed"))

    def event() -> None:
        cluster.deploy(config(max_num_seqs=16), wait=False)
        wait_for(lambda: cluster.status() == "RUNNING" and not cluster.is_stopping(), cluster.explain)

    assert set(asyncio.run(under_load(cluster, expected, event))) == {200}
    assert before.isdisjoint(cluster.pids("engine-embed"))


def test_a_serve_config_builds_the_application(
    cluster: RayCluster, client: httpx.Client, config: Callable[..., dict[str, Any]], expected: Any
) -> None:
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": APP,
        "route_prefix": "/",
        "import_path": "penstock.scale.serve:build_app",
        "args": config(max_num_seqs=32),
    }
    schema = ServeDeploySchema.model_validate(
        {"http_options": {"host": "127.0.0.1", "port": cluster.port}, "applications": [application]}
    )
    _get_global_client().deploy_apps(schema)
    wait_for(lambda: cluster.status() == "RUNNING" and not cluster.is_stopping(), cluster.explain)
    np.testing.assert_allclose(embed(client, TEXTS), expected, atol=1e-5)
