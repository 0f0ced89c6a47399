"""LoRA adapters of a configuration on a Ray cluster: requests can choose them on every replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import Engine
from tests.lora_models import TEXTS, Adapted, adapted_embedder
from tests.scale.cluster import PATIENCE_S, RayCluster, kill, start_cluster, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ADMIN = {"Authorization": "Bearer an-admin-key"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted_embedder(tmp_path_factory.mktemp("bert"), "a", "b")


@pytest.fixture(scope="module")
def cluster(bert: Adapted) -> Iterator[RayCluster]:
    config = {
        "device": "cpu",
        "threads": 1,
        "admin_key": ["an-admin-key"],
        "models": [{"model": str(bert.base), "served_model_name": "bert", "ray": {"min_replicas": 2}}],
        "enable-lora": True,
        "max-loras": 1,
        "lora-modules": [f"{name}={path}" for name, path in bert.adapters.items()],
        "ray": {"cpus": 0.2, "ingress_cpus": 0.2, "wait_for_replica_s": 60},
    }
    with start_cluster(workers=1) as running:
        running.deploy(config)
        yield running


@pytest.fixture(scope="module")
def client(cluster: RayCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=PATIENCE_S) as made:
        wait_for(lambda: made.get("/ready").status_code == 200)
        yield made


def check(client: httpx.Client, bert: Adapted) -> None:
    """Check the vectors of the model and every adapter, often enough to reach both replicas."""
    for name, folder in {"bert": bert.base, **bert.merged}.items():
        with Engine(str(folder), device="cpu", threads=1) as engine:
            expected = engine.embed(TEXTS)
        for _ in range(4):
            answer = client.post("/v1/embeddings", json={"model": name, "input": TEXTS})
            assert answer.status_code == 200, answer.text
            found: Any = np.array([row["embedding"] for row in answer.json()["data"]])
            np.testing.assert_allclose(found, expected, atol=1e-4)


def test_requests_choose_adapters_on_every_replica(
    cluster: RayCluster, client: httpx.Client, bert: Adapted
) -> None:
    check(client, bert)
    listed = {each["id"]: each.get("parent") for each in client.get("/v1/models").json()["data"]}
    assert listed["a"] == listed["b"] == "bert"
    assert client.post("/v1/embeddings", json={"model": "c", "input": "x"}).status_code == 404
    before = cluster.pids("engine-bert")
    kill(before[0])
    wait_for(lambda: len(set(cluster.pids("engine-bert")) - {before[0]}) == 2)
    check(client, bert)  # the new replica has the adapters too


def test_run_time_loads_are_refused_with_a_reason(client: httpx.Client, bert: Adapted) -> None:
    body = {"lora_name": "c", "lora_path": str(bert.adapters["a"])}
    refused = client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
    assert refused.status_code == 501 and "deploy it with other lora_modules" in refused.text
    refused = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=ADMIN)
    assert refused.status_code == 501
