"""Jina's dialect, on `/v1/embeddings` and `/v1/rerank`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.api.dialects.jina import (
    JinaEmbeddingsAnswer,
    JinaEmbeddingsRequest,
    JinaRerankAnswer,
    choose_task,
)
from penstock.api.state import ServedModel
from penstock.errors import NotPossible
from tests.api.answers import checked
from tests.api.local_app import local_app
from tests.checkpoints import write_bert, write_cross_encoder, write_json
from tests.helpers import make_spec

TEXTS = ["water finds a way", "the oil is long"]
LONG = "water " * 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder) as (client, _):
        yield client


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("cross"))) as (client, _):
        yield client


def data(http: TestClient, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/embeddings", json={"input": TEXTS, **body})
    return checked(answer, JinaEmbeddingsAnswer)["data"]  # type: ignore[no-any-return]


def vectors(http: TestClient, **body: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in data(http, **body)])


def refused(http: TestClient, status: int = 400, path: str = "/v1/embeddings", **body: Any) -> str:
    answer = http.post(path, json={"input": TEXTS, **body} if path == "/v1/embeddings" else body)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["detail"]
    return str(answer.json()["detail"])


@pytest.fixture(scope="module")
def plain(http: TestClient) -> np.ndarray:
    answer = http.post("/v1/embeddings", json={"input": TEXTS})
    return np.array([item["embedding"] for item in answer.json()["data"]])


def test_objects_are_the_texts_that_they_hold(http: TestClient, plain: np.ndarray) -> None:
    np.testing.assert_array_equal(vectors(http, input=[{"text": text} for text in TEXTS]), plain)
    np.testing.assert_array_equal(vectors(http, input=[{"text": TEXTS[0]}, TEXTS[1]]), plain)
    np.testing.assert_array_equal(vectors(http, input={"text": TEXTS[0]}), plain[:1])


def test_an_image_is_refused(http: TestClient) -> None:
    for kind in ("image", "pdf"):
        assert "reads texts" in refused(http, input=[{kind: "https://example.org/cat.png"}])
    assert "without `text`" in refused(http, input=[{}])


def test_embedding_types(http: TestClient, plain: np.ndarray) -> None:
    np.testing.assert_array_equal(vectors(http, embedding_type="float"), plain)
    np.testing.assert_array_equal(vectors(http, embedding_type=["float"], encoding_format="base64"), plain)
    for item, expected in zip(data(http, embedding_type="base64"), plain, strict=True):
        found = np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4")
        np.testing.assert_allclose(found, expected, atol=1e-6)
    bits = np.packbits(plain > 0, axis=-1)
    np.testing.assert_array_equal(vectors(http, embedding_type="ubinary"), bits)
    np.testing.assert_array_equal(vectors(http, embedding_type="binary"), bits.astype(int) - 128)
    assert "one type" in refused(http, embedding_type=["float", "binary"])
    assert "ubinary" in refused(http, embedding_type="int4")


def test_dimensions_and_normalized(http: TestClient, plain: np.ndarray) -> None:
    raw = vectors(http, normalized=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), plain, atol=1e-6)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).max() > 1e-3
    np.testing.assert_allclose(vectors(http, normalized=True), plain, atol=1e-6)
    assert vectors(http, normalized=True, dimensions=8).shape == (2, 8)
    assert "contradict" in refused(http, normalized=True, normalize=False)


def test_a_long_text_is_refused_unless_it_is_to_be_cut(http: TestClient, folder: Path) -> None:
    assert "set truncate to true" in refused(http, input=LONG, truncate=False)
    assert "set truncate to true" in refused(http, input=LONG, embedding_type="float")
    answer = http.post("/v1/embeddings", json={"input": [LONG, "water"], "truncate": True})
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    with local_app(folder, server={"auto_truncate": True}) as (cutting, _):
        assert cutting.post("/v1/embeddings", json={"input": LONG, "normalized": True}).status_code == 200
        assert "set truncate" in refused(cutting, input=LONG, truncate=False)


def test_late_chunking_pools_the_parts_of_one_document(http: TestClient) -> None:
    """Each vector is the mean of its chunk's token vectors, computed with the whole document as context."""
    found = vectors(http, late_chunking=True)
    document = " ".join(TEXTS)
    answer = http.post("/pooling", json={"input": document, "task": "token_embed", "normalize": False})
    tokens = np.array(answer.json()["data"][0]["data"])
    cut = 1 + len(http.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]) - 2
    expected = np.stack([tokens[:cut].mean(axis=0), tokens[cut:].mean(axis=0)])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_late_chunking_of_one_chunk_is_the_embedding(http: TestClient, plain: np.ndarray) -> None:
    np.testing.assert_allclose(vectors(http, input=TEXTS[0], late_chunking=True), plain[:1], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ["water", " "]}, "empty chunk at index 1"),
        ({"input": []}, "empty"),
        ({"input": [[1, 2]]}, "not token ids"),
        ({"input": [LONG]}, "takes at most"),
        ({"truncate": True}, "leave truncate out"),
        ({"return_multivector": True}, "exclude each other"),
        ({"chunking": "mean"}, "exclude each other"),
    ],
)
def test_what_late_chunking_refuses(http: TestClient, body: dict[str, Any], words: str) -> None:
    assert words in refused(http, late_chunking=True, **body)


def test_multivectors_are_the_vectors_of_tokens(http: TestClient) -> None:
    found = data(http, return_multivector=True)
    answer = http.post("/pooling", json={"input": TEXTS, "task": "token_embed"}).json()["data"]
    for item, expected in zip(found, answer, strict=True):
        np.testing.assert_allclose(item["embeddings"], expected["data"], atol=1e-6)


def test_a_task_chooses_a_prompt(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "text-matching": "same: "}
    write_json(write_bert(tmp_path) / "config_sentence_transformers.json", {"prompts": prompts})
    with local_app(tmp_path) as (http, _):
        for task, words in (
            ("retrieval.query", "find: "),
            ("retrieval.passage", ""),
            ("text-matching", "same: "),
        ):
            prompted = [words + text for text in TEXTS]
            expected = http.post("/v1/embeddings", json={"input": prompted}).json()["data"]
            np.testing.assert_allclose(
                vectors(http, task=task), [item["embedding"] for item in expected], atol=1e-6
            )
        assert "it has: query, text-matching" in refused(http, task="separation")
        assert "exclude each other" in refused(http, task="retrieval.query", prompt_name="query")


def test_a_task_that_the_model_cannot_tell_apart_is_refused(http: TestClient) -> None:
    assert "leave task out" in refused(http, task="retrieval.query")
    assert vectors(http, task=None).shape == (2, 32)


@pytest.mark.parametrize(
    ("adapters", "task", "chosen"),
    [
        (("retrieval.query", "text-matching"), "retrieval.query", ("retrieval.query", None)),
        (("retrieval", "text-matching"), "retrieval.passage", ("retrieval", "document")),
        (("retrieval", "text-matching"), "text-matching", ("text-matching", None)),
        (("retrieval", "code"), "code.query", ("code", "query")),
    ],
)
def test_a_task_chooses_an_adapter(
    adapters: tuple[str, ...], task: str, chosen: tuple[str, str | None]
) -> None:
    model = cast(ServedModel, SimpleNamespace(spec=make_spec(adapters=adapters)))
    body = JinaEmbeddingsRequest(input="water", task=task)
    choose_task(body, task, model)
    assert (body.adapter, body.input_type) == chosen
    with pytest.raises(NotPossible, match="it has: retrieval"):
        choose_task(body, "separation", model) if body.adapter is None else choose_task(
            JinaEmbeddingsRequest(input="water"), "separation", model
        )


def test_errors_have_the_shape_of_jina(http: TestClient) -> None:
    assert "no-such" in refused(http, model="no-such", embedding_type="float")
    assert "/tokenize" in refused(http, return_tokenized_input=True)
    assert "late_chunking" in refused(http, late_chunking="yes")


def test_rerank_returns_documents_and_cuts_long_ones(reranker: TestClient) -> None:
    body: dict[str, Any] = {
        "query": "water",
        "documents": ["the oil", LONG, "water"],
        "truncate": True,
        "top_n": 2,
    }
    response = reranker.post("/v1/rerank", json=body)
    answer = checked(response, JinaRerankAnswer)
    assert response.headers["x-truncated-rows"] == "1"
    plain: dict[str, Any] = {"query": "water", "documents": body["documents"], "truncate_prompt_tokens": -1}
    expected = reranker.post("/v1/rerank", json=plain).json()["results"]
    for row, other in zip(answer["results"], expected[:2], strict=True):
        assert (row["index"], row["relevance_score"]) == (other["index"], other["relevance_score"])
        assert row["document"] == {"text": body["documents"][row["index"]]}


def test_rerank_takes_a_query_as_an_object(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": {"text": "water"}, "documents": [{"text": "the oil"}], "truncate": True}
    answer = checked(reranker.post("/v1/rerank", json=body), JinaRerankAnswer)
    assert answer["results"][0]["document"] == {"text": "the oil"}
    answer = checked(reranker.post("/v1/rerank", json={**body, "return_documents": False}), JinaRerankAnswer)
    assert "document" not in answer["results"][0]
    image: dict[str, Any] = {"query": {"image": "x"}, "documents": ["a"], "truncate": True}
    assert "reads texts" in refused(reranker, path="/v1/rerank", **image)


def test_rerank_refuses_vectors_and_long_texts(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": "water", "documents": [LONG]}
    assert "/v1/embeddings" in refused(reranker, path="/v1/rerank", **body, return_embeddings=True)
    assert "set truncate to true" in refused(reranker, path="/v1/rerank", **body, truncate=False)
