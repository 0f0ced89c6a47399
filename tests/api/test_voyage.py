"""Voyage's dialect."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock.api.dialects.voyage import (
    ContextualizedAnswer,
    MultimodalAnswer,
    VoyageEmbeddingsAnswer,
    VoyageRerankAnswer,
)
from tests.api.answers import checked
from tests.api.local_app import local_app
from tests.checkpoints import write_bert, write_cross_encoder, write_json, write_late

TEXTS = ["water finds a way", "the oil is long"]
LONG = "water " * 400
TYPES = {"float": "<f4", "int8": "i1", "uint8": "u1", "binary": "i1", "ubinary": "u1"}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    prompts = {"query": "find: ", "document": "text: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    with local_app(folder) as (client, _):
        yield client


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("cross"))) as (client, _):
        yield client


def vectors(http: TestClient, **body: Any) -> np.ndarray:
    answer = http.post("/v1/embeddings", json={"input": TEXTS, "truncation": True, **body})
    return np.array([item["embedding"] for item in checked(answer, VoyageEmbeddingsAnswer)["data"]])


def plain(http: TestClient, **body: Any) -> np.ndarray:
    answer = http.post("/v1/embeddings", json={"input": TEXTS, **body})
    assert "id" in answer.json()  # only OpenAI's answer has an id
    return np.array([item["embedding"] for item in answer.json()["data"]])


def refused(http: TestClient, path: str, status: int = 400, **body: Any) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["detail"]
    return str(answer.json()["detail"])


@pytest.mark.parametrize("kind", TYPES)
def test_output_types_are_those_of_embed_dtype(http: TestClient, kind: str) -> None:
    expected = plain(http, embed_dtype="float32" if kind == "float" else kind)
    np.testing.assert_array_equal(vectors(http, output_dtype=kind), expected)
    body: dict[str, Any] = {"input": TEXTS, "output_dtype": kind, "encoding_format": "base64"}
    items = http.post("/v1/embeddings", json=body).json()["data"]
    found = [np.frombuffer(base64.b64decode(item["embedding"]), TYPES[kind]) for item in items]
    np.testing.assert_allclose(np.stack(found), expected, atol=1e-6)


def test_prompts_dimensions_and_nulls(http: TestClient) -> None:
    np.testing.assert_array_equal(vectors(http, output_dtype=None, output_dimension=None), plain(http))
    for kind in ("query", "document"):
        np.testing.assert_array_equal(vectors(http, input_type=kind), plain(http, input_type=kind))
    np.testing.assert_array_equal(vectors(http, output_dimension=8), plain(http, dimensions=8))
    np.testing.assert_array_equal(vectors(http, model="model:query"), plain(http, input_type="query"))
    assert "output_dimension is 64" in refused(http, "/v1/embeddings", input="a", output_dimension=64)


def test_usage_counts_tokens(http: TestClient) -> None:
    usage = http.post("/v1/embeddings", json={"input": TEXTS, "truncation": True}).json()["usage"]
    expected = http.post("/v1/embeddings", json={"input": TEXTS}).json()["usage"]["total_tokens"]
    assert usage == {"total_tokens": expected}


def test_long_texts_are_cut_unless_truncation_is_false(http: TestClient) -> None:
    answer = http.post("/v1/embeddings", json={"input": [LONG, "a"], "output_dtype": "float"})
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    words = refused(http, "/v1/embeddings", input=LONG, truncation=False)
    assert "set truncation to true" in words


def test_errors_have_the_shape_of_voyage(http: TestClient) -> None:
    assert "no-such" in refused(http, "/v1/embeddings", input="a", truncation=True, model="no-such")
    assert "ubinary" in refused(http, "/v1/embeddings", input="a", output_dtype="int4")
    assert "input" in refused(http, "/v1/embeddings", input=[1, 2], truncation=True)


def test_a_model_without_text_vectors_is_a_bad_request(tmp_path: Path) -> None:
    with local_app(write_late(tmp_path)) as (late, _):
        assert "no task 'embed'" in refused(late, "/v1/embeddings", input="a", truncation=True)


def test_contextualized_chunks_are_late_chunks_of_their_document(http: TestClient) -> None:
    documents = [["water finds", "a way", "in time"], ["the oil"]]
    answer = checked(
        http.post("/v1/contextualizedembeddings", json={"inputs": documents}), ContextualizedAnswer
    )
    assert [[item["index"] for item in each["data"]] for each in answer["data"]] == [[0, 1, 2], [0]]
    for chunks, found in zip(documents, answer["data"], strict=True):
        ends = np.cumsum([len(chunk) + 1 for chunk in chunks]).tolist()
        spans = [[end - 1 - len(chunk), end - 1] for chunk, end in zip(chunks, ends, strict=True)]
        body = {"input": " ".join(chunks), "chunking": "late", "chunk_spans": [spans]}
        expected = http.post("/v1/embeddings", json=body).json()["data"][0]["chunks"]
        np.testing.assert_allclose(
            [item["embedding"] for item in found["data"]], [each["embedding"] for each in expected], atol=1e-6
        )


def test_contextualized_types_and_prompts(http: TestClient) -> None:
    body: dict[str, Any] = {"inputs": ["water finds a way"], "input_type": "query"}
    (document,) = checked(http.post("/v1/contextualizedembeddings", json=body), ContextualizedAnswer)["data"]
    expected = plain(http, input="water finds a way", input_type="query")
    np.testing.assert_allclose(document["data"][0]["embedding"], expected[0], atol=1e-5)
    packed: dict[str, Any] = {
        **body,
        "output_dtype": "ubinary",
        "output_dimension": 16,
        "encoding_format": "base64",
    }
    (document,) = http.post("/v1/contextualizedembeddings", json=packed).json()["data"]
    assert len(base64.b64decode(document["data"][0]["embedding"])) == 2


def test_documents_are_chunked_where_the_client_asks_for_it(http: TestClient) -> None:
    text = "water finds a way in time, the oil is long."
    body: dict[str, Any] = {"inputs": [[text]], "enable_auto_chunking": True, "chunk_size": 4}
    (document,) = checked(http.post("/v1/contextualizedembeddings", json=body), ContextualizedAnswer)["data"]
    parts = [item["text"] for item in document["data"]]
    assert len(parts) == 4 and "".join(parts) == text
    expected = http.post("/v1/embeddings", json={"input": text, "chunking": "late", "chunk_size": 4}).json()
    found = [item["embedding"] for item in document["data"]]
    chunks = [each["embedding"] for each in expected["data"][0]["chunks"]]
    np.testing.assert_allclose(found, chunks, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": []}, "at least one document"),
        ({"inputs": [[]]}, "at least one chunk"),
        ({"inputs": [["a", ""]]}, "empty chunk at index 1"),
        ({"inputs": [[LONG]]}, "divide the document"),
        ({"inputs": [["a"]], "chunk_size": 4}, "enable_auto_chunking"),
        ({"inputs": [["a", "b"]], "enable_auto_chunking": True}, "one text a document"),
        ({"inputs": [["a"]], "enable_auto_chunking": True, "chunk_overlap": 2}, "do not overlap"),
        ({"inputs": [["a"]], "model": "no-such"}, "no-such"),
        ({"inputs": [[1]]}, "inputs"),
    ],
)
def test_what_contextualized_embeddings_refuse(http: TestClient, body: dict[str, Any], words: str) -> None:
    assert words in refused(http, "/v1/contextualizedembeddings", **body)


def test_mixed_inputs_are_their_texts(http: TestClient) -> None:
    parts = [{"type": "text", "text": "water "}, {"type": "text", "text": "finds a way"}]
    body: dict[str, Any] = {"inputs": [{"content": parts}], "input_type": "document"}
    answer = checked(http.post("/v1/multimodalembeddings", json=body), MultimodalAnswer)
    expected = plain(http, input="water finds a way", input_type="document")
    np.testing.assert_array_equal(answer["data"][0]["embedding"], expected[0])
    assert answer["usage"]["image_pixels"] == 0 and answer["usage"]["text_tokens"] > 0
    image = [{"type": "image_url", "image_url": "https://example.org/cat.png"}]
    assert "reads texts, not images" in refused(http, "/v1/multimodalembeddings", inputs=[{"content": image}])
    wrongs: list[Any] = [[], [{"content": []}], [{"content": [{"type": "text"}]}]]
    for wrong in wrongs:
        refused(http, "/v1/multimodalembeddings", inputs=wrong)


def test_rerank_has_the_scores_of_the_route(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": "water", "documents": ["the oil", "water", "a way"]}
    expected = reranker.post("/v1/rerank", json=body).json()["results"]
    for options in (
        {"top_k": 2},
        {"truncation": True, "top_k": None},
        {"return_documents": True, "top_k": 9},
    ):
        answer = checked(reranker.post("/v1/rerank", json={**body, **options}), VoyageRerankAnswer)
        wanted = expected[: options.get("top_k")]
        assert [(row["index"], row["relevance_score"]) for row in answer["data"]] == [
            (row["index"], row["relevance_score"]) for row in wanted
        ]
        assert answer["usage"]["total_tokens"] > 0
    assert answer["data"][0]["document"] == body["documents"][answer["data"][0]["index"]]


def test_rerank_cuts_long_texts_unless_truncation_is_false(reranker: TestClient) -> None:
    body: dict[str, Any] = {"query": "water", "documents": [LONG, "water"]}
    answer = reranker.post("/v1/rerank", json={**body, "truncation": True})
    assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1"
    assert "set truncation to true" in refused(reranker, "/v1/rerank", **body, truncation=False)
    assert "top_k is 0" in refused(reranker, "/v1/rerank", **body, top_k=0)
    assert "no-such" in refused(reranker, "/v1/rerank", **body, top_k=1, model="no-such")
