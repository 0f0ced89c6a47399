"""Ollama's dialect."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock import __version__
from penstock.api.dialects.ollama.embed import (
    EmbedAnswer,
    EmbeddingAnswer,
    OllamaRerankAnswer,
    ProcessesAnswer,
    ShowAnswer,
    TagsAnswer,
    VersionAnswer,
    tagged,
)
from tests.api.answers import checked
from tests.api.local_app import local_app
from tests.checkpoints import BERT_CONFIG, bert_tensors, write_bert, write_cross_encoder, write_json

TEXTS = ["water finds a way", "the oil is long"]
LONG = "water " * 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "find: "}})
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder, aliases=("org/other", "tagged:v1")) as (client, _):
        yield client


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("cross"))) as (client, _):
        yield client


def vectors(http: TestClient, **body: Any) -> np.ndarray:
    answer = checked(http.post("/api/embed", json={"input": TEXTS, **body}), EmbedAnswer)
    return np.array(answer["embeddings"])


def plain(http: TestClient, **body: Any) -> np.ndarray:
    answer = http.post("/v1/embeddings", json={"input": TEXTS, **body}).json()
    return np.array([item["embedding"] for item in answer["data"]])


def refused(http: TestClient, path: str, status: int = 400, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


def test_vectors_are_those_of_v1(http: TestClient) -> None:
    np.testing.assert_array_equal(vectors(http), plain(http))
    np.testing.assert_array_equal(vectors(http, input=TEXTS[0]), plain(http)[:1])
    np.testing.assert_array_equal(vectors(http, dimensions=8), plain(http, dimensions=8))
    np.testing.assert_array_equal(vectors(http, dimensions=0, truncate=None, options=None), plain(http))


def test_names_have_tags_and_may_choose_a_prompt(http: TestClient) -> None:
    for name in ("model", "model:latest", "org/other:latest", "tagged:v1"):
        answer = http.post("/api/embed", json={"model": name, "input": TEXTS}).json()
        assert answer["model"] == name
        np.testing.assert_array_equal(answer["embeddings"], plain(http))
    np.testing.assert_array_equal(vectors(http, model="model:query"), plain(http, input_type="query"))
    np.testing.assert_array_equal(vectors(http, prompt_name="query"), plain(http, prompt_name="query"))


def test_the_answer_tells_tokens_and_nanoseconds(http: TestClient) -> None:
    answer = http.post("/api/embed", json={"input": TEXTS}).json()
    usage = http.post("/v1/embeddings", json={"input": TEXTS}).json()["usage"]
    assert answer["prompt_eval_count"] == usage["prompt_tokens"]
    assert answer["total_duration"] > 10_000 and answer["load_duration"] == 0


def test_nothing_to_embed_has_no_vectors(http: TestClient) -> None:
    bodies: list[dict[str, Any]] = [{}, {"input": ""}, {"input": []}]
    for body in bodies:
        assert checked(http.post("/api/embed", json=body), EmbedAnswer)["embeddings"] == []
    assert vectors(http, input=[""]).shape == (1, 32)
    assert checked(http.post("/api/embeddings", json={}), EmbeddingAnswer) == {"embedding": []}
    assert "not found" in refused(http, "/api/embed", 404, model="no-such")


def test_long_texts_are_cut_unless_truncate_is_false(http: TestClient, folder: Path) -> None:
    answer = http.post("/api/embed", json={"input": [LONG, "a"]})
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    assert "truncate: true" in refused(http, "/api/embed", input=LONG, truncate=False)
    assert "use /api/embed with truncate: true" in refused(http, "/api/embeddings", prompt=LONG)
    with local_app(folder, server={"auto_truncate": True}) as (cutting, _):
        assert cutting.post("/api/embeddings", json={"prompt": LONG}).status_code == 200


def test_num_ctx_cuts_texts(http: TestClient) -> None:
    short = vectors(http, options={"num_ctx": 8, "temperature": 0.5, "num_gpu": 1}, input=LONG)
    np.testing.assert_array_equal(short, plain(http, input=LONG, truncate_prompt_tokens=8))
    np.testing.assert_array_equal(vectors(http, options={"num_ctx": 4096}), plain(http))
    for options in ({"num_ctx": -4}, {"num_ctx": "many"}):
        assert "num_ctx" in refused(http, "/api/embed", input="a", options=options)
    words = refused(http, "/api/embed", input="a", truncate=False, options={"num_ctx": 8})
    assert "leave num_ctx out" in words
    unknown = http.post("/api/embed", json={"input": "a", "options": {"no_such": 1}, "keep_alive": "5m"})
    assert unknown.status_code == 200 and unknown.headers["x-ignored-fields"] == "options.no_such"


def test_the_older_route_does_not_normalise(http: TestClient) -> None:
    answer = checked(http.post("/api/embeddings", json={"prompt": TEXTS[0]}), EmbeddingAnswer)
    np.testing.assert_array_equal(answer["embedding"], plain(http, normalize=False)[0])


def test_rerank_has_the_scores_of_the_other_routes(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": "water", "documents": ["the oil", "water", "a way"]}
    expected = reranker.post("/rerank", json=body).json()["results"]
    answer = checked(reranker.post("/api/rerank", json={**body, "model": "model"}), OllamaRerankAnswer)
    assert [(row["index"], row["relevance_score"]) for row in answer["results"]] == [
        (row["index"], row["relevance_score"]) for row in expected
    ]
    assert answer["results"][0]["document"] == body["documents"][expected[0]["index"]]
    short: dict[str, Any] = {**body, "top_n": 1, "return_documents": False}
    answer = checked(reranker.post("/api/rerank", json=short), OllamaRerankAnswer)
    assert len(answer["results"]) == 1 and "document" not in answer["results"][0]


def test_rerank_cuts_long_texts_unless_truncate_is_false(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": "water", "documents": [LONG]}
    answer = reranker.post("/api/rerank", json=body)
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    assert "takes at most" in refused(reranker, "/api/rerank", **body, truncate=False)
    assert "top_n is 0" in refused(reranker, "/api/rerank", **body, top_n=0)


def test_models_are_listed_with_tags(http: TestClient, folder: Path) -> None:
    entries = checked(http.get("/api/tags"), TagsAnswer)["models"]
    assert [entry["name"] for entry in entries] == ["model:latest", "org/other:latest", "tagged:v1"]
    first = entries[0]
    assert first["name"] == first["model"] and len(first["digest"]) == 64
    assert first["size"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert datetime.fromisoformat(first["modified_at"]).tzinfo is not None
    details = first["details"]
    assert (details["family"], details["format"]) == ("bert", "safetensors")
    assert details["quantization_level"] == "F32" and details["parameter_size"].endswith("K")
    assert http.head("/api/tags").status_code == 200


def test_loaded_models_do_not_expire(http: TestClient) -> None:
    entries = checked(http.get("/api/ps"), ProcessesAnswer)["models"]
    assert entries[0]["context_length"] == 64
    assert datetime.fromisoformat(entries[0]["expires_at"]).year > 2100


@pytest.mark.parametrize("field", ["model", "name"])
def test_a_model_is_described(http: TestClient, field: str) -> None:
    answer = checked(http.post("/api/show", json={field: "model:latest"}), ShowAnswer)
    info = answer["model_info"]
    assert info["general.architecture"] == "bert"
    assert (info["bert.context_length"], info["bert.embedding_length"]) == (64, 32)
    num_parameters = sum(tensor.numel() for tensor in bert_tensors(BERT_CONFIG).values())
    assert info["general.parameter_count"] == num_parameters
    assert answer["capabilities"] == ["embedding"]
    assert "not found" in refused(http, "/api/show", 404, model="no-such")


def test_the_version_is_ours(http: TestClient) -> None:
    assert checked(http.get("/api/version"), VersionAnswer) == {"version": __version__}
    assert http.head("/").status_code == 200


def test_models_cannot_be_changed(http: TestClient) -> None:
    for path in ("/api/pull", "/api/push", "/api/create", "/api/copy"):
        assert "penstock serve MODEL" in refused(http, path, 501, model="no-such")
    gone = http.request("DELETE", "/api/delete", json={"model": "model"})
    assert gone.status_code == 501


def test_errors_have_the_shape_of_ollama(http: TestClient, reranker: TestClient) -> None:
    assert "input" in refused(http, "/api/embed", input=[1, 2])
    assert "not valid JSON" in http.post("/api/embed", content=b"{").json()["error"]
    assert "cannot score" not in refused(reranker, "/api/rerank", query=" ", documents=["a"])


def test_a_tag_is_added_to_names_without_one() -> None:
    assert tagged("org/name") == "org/name:latest" and tagged("host:80/name") == "host:80/name:latest"
    assert tagged("name:v1") == "name:v1"
