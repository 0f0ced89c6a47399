"""Infinity's dialect."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.api.dialects.infinity import (
    InfinityClassifyAnswer,
    InfinityEmbeddingsAnswer,
    InfinityModelsAnswer,
    InfinityRerankAnswer,
)
from tests.api.answers import checked
from tests.api.local_app import local_app
from tests.checkpoints import write_bert, write_cross_encoder, write_json

TEXTS = ["water finds a way", "the oil is long"]
DOCUMENTS = ["the oil", "water", "a way"]
LONG = "water " * 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder, aliases=("other",)) as (client, _):
        yield client


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("cross"))) as (client, _):
        yield client


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("labels"), labels=3)) as (client, _):
        yield client


def refused(http: TestClient, path: str, status: int = 400, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and {"message", "type", "param"} <= error.keys()
    return str(error["message"])


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings"])
def test_embeddings_are_those_of_v1(http: TestClient, path: str) -> None:
    expected = http.post("/v1/embeddings", json={"input": TEXTS}).json()
    body: dict[str, Any] = {"input": TEXTS, "modality": "text", "dimensions": 0}
    answer = checked(http.post(path, json=body), InfinityEmbeddingsAnswer)
    assert [item["embedding"] for item in answer["data"]] == [each["embedding"] for each in expected["data"]]
    assert answer["usage"] == expected["usage"] and answer["id"].startswith("infinity-")
    packed = http.post(path, json={**body, "encoding_format": "base64", "dimensions": 8}).json()["data"]
    found = np.frombuffer(base64.b64decode(packed[0]["embedding"]), dtype="<f4")
    assert found.shape == (8,) and np.linalg.norm(found) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings"])
@pytest.mark.parametrize("modality", ["image", "audio"])
def test_other_modalities_are_refused(http: TestClient, path: str, modality: str) -> None:
    words = refused(http, path, input="https://example.org/cat.png", modality=modality)
    assert ("reads texts, not images" if modality == "image" else "embeds no audio") in words


def test_long_texts_are_cut(http: TestClient, folder: Path) -> None:
    answer = http.post("/embeddings", json={"input": [LONG, "a"]})
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    assert http.post("/embeddings", json={"input": LONG, "chunking": "mean"}).status_code == 200
    with local_app(folder, server={"default_chunking": "mean"}) as (chunking, _):
        vectors = [
            chunking.post("/embeddings", json={"input": LONG, **more}).json()["data"][0]["embedding"]
            for more in ({}, {"chunking": "mean"}, {"truncate_prompt_tokens": -1})
        ]
        assert vectors[0] == vectors[1] != vectors[2]


def test_scores_are_between_0_and_1_unless_they_are_raw(reranker: TestClient) -> None:
    plain: dict[str, Any] = {"query": "water", "documents": DOCUMENTS}
    raw = reranker.post("/rerank", json={**plain, "use_activation": False}).json()["results"]
    logits = {row["index"]: row["relevance_score"] for row in raw}
    answer = checked(reranker.post("/rerank", json={**plain, "raw_scores": True}), InfinityRerankAnswer)
    assert {row["index"]: row["relevance_score"] for row in answer["results"]} == pytest.approx(logits)
    assert all(row["document"] is None for row in answer["results"])
    body: dict[str, Any] = {**plain, "raw_scores": False, "return_documents": True, "top_n": 2}
    answer = checked(reranker.post("/rerank", json=body), InfinityRerankAnswer)
    assert len(answer["results"]) == 2
    for row in answer["results"]:
        assert row["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logits[row["index"]])), abs=1e-6)
        assert row["document"] == DOCUMENTS[row["index"]]


def test_a_model_that_gives_logits_by_default_gives_scores_here(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path)
    identity = {"activation_fn": "torch.nn.modules.linear.Identity", "version": {}}
    write_json(folder / "config_sentence_transformers.json", identity)
    with local_app(folder) as (http, _):
        plain = {"query": "water", "documents": DOCUMENTS}
        logits = http.post("/rerank", json=plain).json()["results"]
        scores = http.post("/rerank", json={**plain, "raw_scores": False}).json()["results"]
        assert [row["index"] for row in logits] == [row["index"] for row in scores]
        for row, score in zip(logits, scores, strict=True):
            expected = 1 / (1 + np.exp(-row["relevance_score"]))
            assert score["relevance_score"] == pytest.approx(expected, abs=1e-6)


def test_rerank_cuts_long_texts_and_names_what_is_wrong(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": "water", "documents": [LONG, "a"], "raw_scores": False}
    answer = reranker.post("/rerank", json=body)
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    assert "top_n is 0" in refused(reranker, "/rerank", **body, top_n=0)
    assert "no-such" in refused(reranker, "/rerank", **body, model="no-such")
    assert "empty text" in refused(reranker, "/rerank", **{**body, "query": " "})


def test_texts_in_the_dialect_of_tei_stay_its_own(reranker: TestClient) -> None:
    answer = reranker.post("/rerank", json={"query": "water", "texts": DOCUMENTS, "raw_scores": True}).json()
    assert isinstance(answer, list) and len(answer) == 3


def test_all_labels_come_with_their_scores(classifier: TestClient) -> None:
    plain = classifier.post("/classify", json={"input": TEXTS}).json()["data"]
    body: dict[str, Any] = {"input": TEXTS, "raw_scores": False}
    answer = checked(classifier.post("/classify", json=body), InfinityClassifyAnswer)
    for row, expected in zip(answer["data"], plain, strict=True):
        scores = {f"LABEL_{index}": value for index, value in enumerate(expected["probs"])}
        assert {each["label"]: each["score"] for each in row} == pytest.approx(scores)
        assert row[0]["label"] == expected["label"]
    raw: dict[str, Any] = {"input": TEXTS, "use_activation": False}
    logits = classifier.post("/classify", json=raw).json()["data"]
    answer = classifier.post("/classify", json={"input": TEXTS, "raw_scores": True}).json()
    for row, expected in zip(answer["data"], logits, strict=True):
        assert row[0]["score"] == pytest.approx(max(expected["probs"]), abs=1e-6)
    cut = classifier.post("/classify", json={"input": LONG, "raw_scores": False})
    assert cut.status_code == 200 and cut.headers["x-truncated-rows"] == "1"


def test_a_model_without_labels_is_a_bad_request(http: TestClient) -> None:
    assert "no task 'classify'" in refused(http, "/classify", input=TEXTS, raw_scores=False)


def test_models_are_listed_with_what_they_can(
    http: TestClient, reranker: TestClient, classifier: TestClient
) -> None:
    entries = checked(http.get("/models"), InfinityModelsAnswer)["data"]
    assert [entry["id"] for entry in entries] == ["model", "other"]
    assert entries[0]["owned_by"] == "infinity" and entries[0]["stats"]["queue_absolute"] == 0
    assert entries[0]["capabilities"] == ["embed", "rerank"]
    assert "rerank" in reranker.get("/models").json()["data"][0]["capabilities"]
    assert "classify" in classifier.get("/models").json()["data"][0]["capabilities"]
