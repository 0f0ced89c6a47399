"""Sparse embeddings, and several tasks in one request, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import Engine
from tests.checkpoints import write_lexical, write_m3, write_splade
from tests.e2e.server import serving, serving_here

TEXTS = ["the water of the people", "a long search", "the the the oil"]


@pytest.fixture(scope="module", params=["splade", "lexical", "m3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = {"splade": write_splade, "lexical": write_lexical, "m3": write_m3}[request.param]
    return write(tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def sparse_http(folder: Path) -> Iterator[httpx.Client]:
    if folder.name == "m3":  # in separate processes, so that all its outputs cross the wire
        with serving(str(folder), "--device", "cpu", "--threads", "1") as server:
            yield server.http
    else:
        with serving_here(folder) as http:
            yield http


def terms(row: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    return [(term["token_id"], term["token"], pytest.approx(term["weight"], abs=1e-5)) for term in row]


def test_both_routes_give_the_terms_of_the_offline_engine(sparse_http: httpx.Client, folder: Path) -> None:
    with Engine(str(folder), device="cpu", threads=1) as engine:
        expected = engine.sparse_terms(TEXTS, top_k=4, min_weight=0.01)
    body = {"input": TEXTS, "top_k": 4, "min_weight": 0.01}
    answer = sparse_http.post("/v1/sparse", json=body).json()
    assert answer["object"] == "list" and answer["id"].startswith("sparse-") and answer["created"] > 0
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 10
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    assert all(row["object"] == "sparse" for row in answer["data"])
    assert any(expected)
    assert [[tuple(term) for term in row] for row in expected] == [terms(r["sparse"]) for r in answer["data"]]
    pooled = sparse_http.post("/pooling", json={"task": "sparse", **body}).json()["data"]
    assert [row["data"] for row in pooled] == [row["sparse"] for row in answer["data"]]
    assert all(row["object"] == "pooling" for row in pooled)


def test_dense_vectors_come_from_the_same_server(sparse_http: httpx.Client) -> None:
    rows = sparse_http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    assert len(rows[0]["embedding"]) == 32


def test_several_tasks_come_in_one_answer(sparse_http: httpx.Client, folder: Path) -> None:
    tasks = ["embed", "sparse", "token_embed"]
    with Engine(str(folder), device="cpu", threads=1) as engine:
        expected = engine.outputs(TEXTS, tasks, top_k=4, dimensions=8)
        np.testing.assert_allclose(expected["embed"], engine.embed(TEXTS, dimensions=8), atol=1e-6)
        assert expected["sparse"] == engine.sparse(TEXTS, top_k=4)
        tokenized = engine.tokenize(TEXTS)
    body = {"input": TEXTS, "task": tasks, "top_k": 4, "dimensions": 8}
    answer = sparse_http.post("/pooling", json=body).json()
    rows = [row["data"] for row in answer["data"]]
    np.testing.assert_allclose([row["embed"] for row in rows], expected["embed"], atol=1e-5)
    for row, tokens, weights in zip(rows, expected["token_embed"], expected["sparse"], strict=True):
        np.testing.assert_allclose(row["token_embed"], tokens, atol=1e-5)
        assert {
            term["token_id"]: pytest.approx(term["weight"], abs=1e-5) for term in row["sparse"]
        } == weights
    tokens = sum(len(row) for row in tokenized)
    assert answer["usage"]["prompt_tokens"] == tokens, "each text ran once"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"task": []}, 400),
        ({"task": ["embed", "embed"]}, 400),
        ({"task": ["embed", "classify"]}, 422),
        ({"task": ["embed", "sparse"], "encoding_format": "bytes"}, 400),
        ({"task": ["embed", "sparse"], "chunking": "mean"}, 400),
    ],
)
def test_bad_combinations_of_tasks_are_refused(
    sparse_http: httpx.Client, change: dict[str, Any], status: int
) -> None:
    answer = sparse_http.post("/pooling", json={"input": TEXTS, **change})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] in change


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "top_k zero": ("/v1/sparse", {"top_k": 0}, "top_k"),
    "top_k negative": ("/v1/sparse", {"top_k": -2}, "top_k"),
    "top_k huge": ("/v1/sparse", {"top_k": 2**40}, "top_k"),
    "top_k as text": ("/v1/sparse", {"top_k": "3"}, "top_k"),
    "negative weight": ("/v1/sparse", {"min_weight": -1}, "min_weight"),
    "no vector to cut": ("/v1/sparse", {"dimensions": 4}, "dimensions"),
    "pooled top_k": ("/pooling", {"task": "sparse", "top_k": 0}, "top_k"),
    "pooled dimensions": ("/pooling", {"task": "sparse", "dimensions": 4}, "dimensions"),
    "pooled bytes": ("/pooling", {"task": "sparse", "encoding_format": "bytes"}, "encoding_format"),
    "pooled dtype": ("/pooling", {"task": "sparse", "embed_dtype": "int8"}, "embed_dtype"),
    "pooled normalize": ("/pooling", {"task": "sparse", "normalize": True}, "normalize"),
    "top_k of a vector": ("/pooling", {"task": "embed", "top_k": 3}, "top_k"),
    "weight of a vector": ("/pooling", {"task": "embed", "min_weight": 0.5}, "min_weight"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_a_400_that_names_the_field(sparse_http: httpx.Client, name: str) -> None:
    path, body, param = BAD[name]
    response = sparse_http.post(path, json={"input": "the water", **body})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_model_without_sparse_weights_names_its_tasks(http: httpx.Client) -> None:
    response = http.post("/v1/sparse", json={"input": "a"})
    assert response.status_code == 422
    assert "embed, token_embed" in response.json()["error"]["message"]
