"""The unmodified `infinity_client` package."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import LABELS
from tests.e2e.server import Server

infinity = pytest.importorskip("infinity_client")
TEXTS = ["Water finds its level.", "A penstock feeds the turbine."]
LONG = "water " * 1000


def api(name: str) -> Any:
    return importlib.import_module(f"infinity_client.api.default.{name}")


def body(kind: str, **fields: Any) -> Any:
    return getattr(importlib.import_module("infinity_client.models"), kind)(**fields)


def client_of(server: Server) -> Any:
    return infinity.Client(base_url=server.url)


@pytest.fixture(scope="module")
def name(embedder: Server) -> str:
    return str(api("models").sync(client=client_of(embedder)).data[0].id)


def embed(server: Server, **fields: Any) -> Any:
    given = body("OpenAIEmbeddingInputText", **fields)
    return api("embeddings").sync_detailed(client=client_of(server), body=given)


def test_embeddings_equal_the_reference(embedder: Server, name: str, reference: Any) -> None:
    answer = embed(embedder, input_=[*TEXTS, LONG], model=name).parsed
    found = [item.embedding for item in answer.data]
    np.testing.assert_allclose(found, reference.encode([*TEXTS, LONG]), atol=1e-5)
    assert answer.usage.prompt_tokens > 0
    short = embed(embedder, input_=TEXTS, model=name, dimensions=64).parsed
    assert {len(item.embedding) for item in short.data} == {64}


def test_models_tell_what_they_can(embedder: Server, name: str) -> None:
    (entry,) = api("models").sync(client=client_of(embedder)).data
    assert "embed" in entry.capabilities and entry.stats["queue_absolute"] == 0
    assert api("health").sync_detailed(client=client_of(embedder)).status_code == 200


def test_rerank(reranker: Server) -> None:
    documents = ["A cat sleeps.", "A penstock feeds water to a turbine.", LONG]
    query = "What feeds a turbine?"
    raw = reranker.post(
        "/rerank", query=query, documents=documents, use_activation=False, truncate_prompt_tokens=-1
    ).json()["results"]
    given = body("RerankInput", query=query, documents=documents, return_documents=True)
    answer = api("rerank").sync(client=client_of(reranker), body=given)
    assert [row.index for row in answer.results] == [row["index"] for row in raw]
    for row, expected in zip(answer.results, raw, strict=True):
        assert row.relevance_score == pytest.approx(1 / (1 + np.exp(-expected["relevance_score"])), abs=1e-5)
        assert row.document == documents[row.index]


def test_classify(classifier: Server) -> None:
    answer = api("classify").sync(client=client_of(classifier), body=body("ClassifyInput", input_=TEXTS))
    assert {each.label for each in answer.data[0]} == set(LABELS)
    assert sum(each.score for each in answer.data[0]) == pytest.approx(1, abs=1e-5)


def test_wrong_requests_are_refused(embedder: Server, name: str) -> None:
    answer = embed(embedder, input_=TEXTS, model="no-such")
    assert answer.status_code == 400 and b"no-such" in answer.content
    image = body("OpenAIEmbeddingInputImage", input_="https://example.org/cat.png", model=name)
    refused = api("embeddings").sync_detailed(client=client_of(embedder), body=image)
    assert refused.status_code == 400 and b"embeds text only" in refused.content
