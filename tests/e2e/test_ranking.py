"""Rankings over HTTP: Cohere's client, concurrent requests and vectors in the request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import cohere
import httpx
import numpy as np
import pytest

from penstock import Engine
from tests.checkpoints import WORDS, write_cross_encoder
from tests.e2e.server import Server, serving

QUERY = "the long water"
DOCUMENTS = ["people write many words", "water", "the oil was long", "find a word in time", "how they look"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "reranker")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[Server]:
    flags = ("--device", "cpu", "--threads", "1", "--served-model-name", "reranker")
    with serving(str(folder), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def scores(folder: Path) -> dict[str, float]:
    with Engine(str(folder), device="cpu", threads=1) as engine:
        return dict(zip(DOCUMENTS, engine.score(QUERY, DOCUMENTS).tolist(), strict=True))


@pytest.mark.parametrize("version", [1, 2])
def test_the_cohere_client_reranks_unchanged(
    reranker: Server, scores: dict[str, float], version: int
) -> None:
    kind = cohere.ClientV2 if version == 2 else cohere.Client
    client = kind(api_key="none", base_url=reranker.url)
    answer = client.rerank(model="reranker", query=QUERY, documents=DOCUMENTS, top_n=3)
    order = sorted(range(5), key=lambda i: -scores[DOCUMENTS[i]])[:3]
    assert [row.index for row in answer.results] == order
    expected = [scores[DOCUMENTS[i]] for i in order]
    assert [row.relevance_score for row in answer.results] == pytest.approx(expected, abs=1e-5)
    assert answer.id is not None and answer.meta is not None and answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1


def test_the_cohere_client_understands_errors(reranker: Server) -> None:
    client = cohere.ClientV2(api_key="none", base_url=reranker.url)
    with pytest.raises(cohere.BadRequestError) as wrong:
        client.rerank(model="reranker", query=QUERY, documents=[])
    assert "documents is empty" in wrong.value.body["message"]
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="nobody", query=QUERY, documents=["a"])


def test_concurrent_requests_get_their_own_answers(reranker: Server, scores: dict[str, float]) -> None:
    draw = np.random.default_rng(1)
    filler = [" ".join(draw.choice(WORDS, size=int(draw.integers(1, 30)))) for _ in range(200)]
    wrong: list[object] = []

    def ask(number: int) -> None:
        documents = [*DOCUMENTS[number % 5 :], *filler[number * 20 : number * 20 + 20]]
        body = {"query": QUERY, "documents": documents, "request_id": f"r{number}"}
        for _ in range(5):
            response = reranker.http.post("/rerank", json=body)
            found = {documents[row["index"]]: row["relevance_score"] for row in response.json()["results"]}
            if response.headers["x-request-id"] != f"r{number}" or len(found) != len(set(documents)):
                wrong.append(response.text)
            wrong.extend(d for d in DOCUMENTS[number % 5 :] if abs(found[d] - scores[d]) > 1e-5)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_embedding_model_lists_score_among_its_tasks(http: httpx.Client) -> None:
    card = http.get("/v1/models").json()["data"][0]
    assert "score" in card["tasks"]


def test_vectors_in_the_request_are_compared(reranker: Server) -> None:
    draw = np.random.default_rng(3)
    query, documents = draw.standard_normal((3, 4)), [draw.standard_normal((n, 4)) for n in (2, 5, 1)]
    body = {"queries": [query.tolist()], "documents": [d.tolist() for d in documents], "request_id": "mine"}
    response = reranker.http.post("/v1/maxsim", json=body)
    expected = [float((query @ d.T).max(axis=1).sum()) for d in documents]
    answer = response.json()
    assert [row["score"] for row in answer["data"]] == pytest.approx(expected, abs=1e-4)
    assert answer["id"] == "maxsim-mine" and response.headers["x-request-id"] == "mine"
    body["documents"] = [[[1.0]]]
    refused = reranker.http.post("/v1/maxsim", json=body)
    assert refused.status_code == 400 and "1 and 4 values" in refused.json()["error"]["message"]
    assert reranker.post("/v1/maxsim", queries=[]).status_code == 400
