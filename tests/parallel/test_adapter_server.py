"""LoRA adapters in a server whose engine has two ranks: vLLM's routes, eviction, and the death of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock import Engine
from tests.e2e.server import Server, serving
from tests.lora_models import TEXTS, Adapted, adapted_embedder
from tests.parallel.rank_processes import own_ranks

pytestmark = pytest.mark.parallel
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
    flags = ["--device", "cpu", "--threads", "1", "--tensor-parallel-size", "2", "--admin-key", "operator"]
    flags += ["--served-model-name", "bert", "--enable-lora", "--max-loras", "1", "--max-cpu-loras", "1"]
    with serving(str(bert.base), *flags, "--lora-modules", f"a={bert.adapters['a']}") as started:
        yield started


def load(server: Server, name: str, path: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def unload(server: Server, name: str) -> httpx.Response:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def embed(server: Server, name: str) -> Vectors:
    answer = server.http.post("/v1/embeddings", json={"input": TEXTS, "model": name})
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], dtype=np.float32)


def assert_answers(server: Server, expected: dict[str, Vectors], *names: str) -> None:
    for name in names:
        wanted = expected["base" if name == "bert" else name]
        np.testing.assert_allclose(embed(server, name), wanted, atol=1e-4)


def test_adapters_are_loaded_evicted_and_unloaded_while_the_server_runs(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    assert_answers(server, expected, "a", "bert")
    assert load(server, "b", bert.adapters["b"]).status_code == 200
    assert load(server, "c", bert.adapters["c"]).status_code == 200
    assert_answers(server, expected, "b", "c", "bert", "a", "c", "b")  # memory holds one at a time
    refused = load(server, "broken", bert.base)
    assert refused.status_code in (400, 404)
    assert unload(server, "b").status_code == 200
    gone = server.http.post("/v1/embeddings", json={"input": TEXTS, "model": "b"})
    assert gone.status_code == 404
    replaced = load(server, "c", bert.adapters["b"], load_inplace=True)
    assert replaced.status_code == 200, replaced.text
    np.testing.assert_allclose(embed(server, "c"), expected["b"], atol=1e-4)
    assert load(server, "c", bert.adapters["c"], load_inplace=True).status_code == 200
    assert_answers(server, expected, "a", "bert", "c")


def test_an_engine_that_starts_again_has_all_adapters_on_all_ranks(
    server: Server, bert: Adapted, expected: dict[str, Vectors]
) -> None:
    assert load(server, "b", bert.adapters["b"]).status_code == 200
    (engine,), (rank,) = server.engines(), own_ranks(server)
    os.kill(rank, signal.SIGKILL)
    server.wait_for(lambda: server.engines() not in ([], [engine]))
    server.wait_ready()
    assert_answers(server, expected, "a", "b", "bert")
