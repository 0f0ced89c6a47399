"""Every route and dialect that scores texts, through the whole application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from starlette.testclient import TestClient

from penstock import Engine
from tests.api.local_app import CountingClient, local_app
from tests.checkpoints import WORDS, write_bert, write_cross_encoder, write_json

QUERY = "the long water"
DOCUMENTS = [
    "people write many words",
    "water",
    "the oil was long",
    "find a word in time",
    "see how they look",
]
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")


class Served(NamedTuple):
    http: TestClient
    client: CountingClient
    engine: Engine

    def post(self, route: str, **body: Any) -> Any:
        response = self.http.post(route, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, route: str, status: int, **body: Any) -> dict[str, Any]:
        response = self.http.post(route, json=body)
        assert response.status_code == status, response.text
        return response.json()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.fixture(scope="module")
def cross(folder: Path) -> Iterator[Served]:
    with local_app(folder) as (http, client), Engine(str(folder), device="cpu", threads=1) as engine:
        yield Served(http, client, engine)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_bert(tmp_path_factory.mktemp("models") / "bi")
    prompts = {"query": "query: ", "passage": "passage: ", "plain": "a "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    with (
        local_app(folder) as (http, client),
        Engine(str(folder), device="cpu", threads=1) as engine,
    ):
        yield Served(http, client, engine)


SIDES = [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]


@pytest.mark.parametrize("route", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", SIDES)
def test_one_query_is_scored_against_each_document(cross: Served, route: str, names: tuple[str, str]) -> None:
    answer = cross.post(route, **{names[0]: QUERY, names[1]: DOCUMENTS})
    assert answer["object"] == "list" and answer["model"] == "model" and answer["id"].startswith("score-")
    assert [row["index"] for row in answer["data"]] == list(range(len(DOCUMENTS)))
    assert {row["object"] for row in answer["data"]} == {"score"}
    expected = cross.engine.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose([row["score"] for row in answer["data"]], expected, atol=1e-6)
    assert answer["usage"]["total_tokens"] == cross.client.requests[-1].num_tokens


def test_pairs_may_be_one_to_one_or_many_to_many(cross: Served) -> None:
    one = cross.post("/score", text_1=QUERY, text_2=DOCUMENTS[0])["data"]
    assert [row["score"] for row in one] == pytest.approx(cross.engine.score(QUERY, DOCUMENTS[0]), abs=1e-6)
    queries = list(reversed(DOCUMENTS))
    many = cross.post("/score", queries=queries, documents=DOCUMENTS)["data"]
    expected = cross.engine.score(queries, DOCUMENTS)
    np.testing.assert_allclose([row["score"] for row in many], expected, atol=1e-6)
    wrong = cross.refused("/score", 400, queries=queries[:2], documents=DOCUMENTS)
    assert "2 queries for 5 documents" in wrong["error"]["message"]


def test_the_activation_can_be_turned_off(cross: Served) -> None:
    raw = [
        row["score"]
        for row in cross.post("/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)["data"]
    ]
    active = [row["score"] for row in cross.post("/score", text_1=QUERY, text_2=DOCUMENTS)["data"]]
    np.testing.assert_allclose(active, 1 / (1 + np.exp(-np.array(raw))), atol=1e-5)
    assert max(np.abs(raw)) > 1


@pytest.mark.parametrize("route", RERANKS)
def test_results_are_sorted_and_cut_to_top_n(cross: Served, route: str) -> None:
    scores = cross.engine.score(QUERY, DOCUMENTS)
    order = np.argsort(-scores, kind="stable").tolist()
    whole = cross.post(route, query=QUERY, documents=DOCUMENTS)["results"]
    assert [row["index"] for row in whole] == order
    np.testing.assert_allclose([row["relevance_score"] for row in whole], scores[order], atol=1e-6)
    assert cross.post(route, query=QUERY, documents=DOCUMENTS, top_n=2)["results"] == whole[:2]
    assert cross.post(route, query=QUERY, documents=DOCUMENTS, top_n=99)["results"] == whole


def test_each_dialect_reports_usage_in_its_own_way(cross: Served) -> None:
    documents = DOCUMENTS * 30
    jina = cross.post("/v1/rerank", query=QUERY, documents=documents, model="model")
    tokens = cross.client.requests[-1].num_tokens
    assert jina["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    cohere = cross.post("/v2/rerank", query=QUERY, documents=documents, model="model")
    assert cohere["meta"]["billed_units"] == {"search_units": 2}
    assert set(cohere) == {"id", "results", "meta"} and set(cohere["results"][0]) == {
        "index",
        "relevance_score",
    }


def test_documents_may_be_objects_and_are_returned(cross: Served) -> None:
    objects = [{"text": text, "title": str(i)} for i, text in enumerate(DOCUMENTS)]
    mixed = [*objects[:3], *DOCUMENTS[3:]]
    rows = cross.post("/rerank", query=QUERY, documents=mixed, return_documents=True)["results"]
    plain = cross.post("/rerank", query=QUERY, documents=DOCUMENTS, return_documents=False)["results"]
    assert [row["index"] for row in rows] == [row["index"] for row in plain]
    for row in rows:
        index = row["index"]
        assert row["document"] == (objects[index] if index < 3 else {"text": DOCUMENTS[index]})
    assert "document" not in plain[0]


def test_equal_documents_have_equal_scores_and_keep_their_order(cross: Served) -> None:
    rows = cross.post("/rerank", query=QUERY, documents=["water", "oil", "water", "water"])["results"]
    same = [row for row in rows if row["index"] != 1]
    assert [row["index"] for row in same] == [0, 2, 3]
    assert len({row["relevance_score"] for row in same}) == 1


@pytest.mark.parametrize("route", RERANKS)
def test_a_thousand_documents_are_one_message(cross: Served, route: str) -> None:
    draw = np.random.default_rng(0)
    documents = [" ".join(draw.choice(WORDS, size=int(draw.integers(1, 20)))) for _ in range(1000)]
    before = len(cross.client.requests)
    rows = cross.post(route, query=QUERY, documents=documents)["results"]
    assert len(cross.client.requests) == before + 1
    assert sorted(row["index"] for row in rows) == list(range(1000))
    scores = [row["relevance_score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    few = sorted(row["index"] for row in rows)[::97]
    expected = cross.engine.score(QUERY, [documents[i] for i in few])
    of_index = {row["index"]: row["relevance_score"] for row in rows}
    np.testing.assert_allclose([of_index[i] for i in few], expected, atol=1e-5)


def test_very_short_and_very_long_documents_share_a_request(cross: Served) -> None:
    longest = " ".join(["water"] * (64 - 3 - 3))  # the limit without [CLS], two [SEP] and the query
    documents = ["oil", longest, "a", longest + " water"]
    rows = cross.post("/rerank", query=QUERY, documents=documents[:3])["results"]
    alone = cross.engine.score(QUERY, documents[:3])
    for row in rows:
        assert row["relevance_score"] == pytest.approx(alone[row["index"]], abs=1e-5)
    assert cross.client.requests[-1].lengths.tolist() == [7, 64, 7]
    wrong = cross.refused("/rerank", 400, query=QUERY, documents=documents)["error"]
    assert wrong["param"] == "documents" and "document 3" in wrong["message"]
    assert "65 tokens" in wrong["message"] and "64" in wrong["message"]
    cut = cross.post("/rerank", query=QUERY, documents=documents, truncate_prompt_tokens=-1)["results"]
    scores = {row["index"]: row["relevance_score"] for row in cut}
    assert scores[3] == pytest.approx(scores[1], abs=1e-5)
    for route in ("/v1/rerank", "/v2/rerank"):  # the routes of Jina and Cohere
        assert len(cross.post(route, query=QUERY, documents=documents)["results"]) == 4


def test_queries_and_documents_have_their_own_token_limits(cross: Served) -> None:
    cross.post("/rerank", query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=2, max_tokens_per_query=1)
    assert cross.client.requests[-1].lengths.tolist() == [
        1 + 3 + 2,
        1 + 3 + 1,
        1 + 3 + 2,
        1 + 3 + 2,
        1 + 3 + 2,
    ]


@pytest.mark.parametrize("route", RERANKS)
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"top_n": -1}, "top_n"),
        ({"query": ""}, "query"),
        ({"query": "  "}, "query"),
        ({"query": 3}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", 3]}, "documents"),
        ({"documents": ["a", None]}, "documents"),
        ({"documents": [{"body": "a"}]}, "documents"),
        ({"documents": [{"text": 3}]}, "documents"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"max_tokens_per_query": -3}, "max_tokens_per_query"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"timeout": -1}, "timeout"),
        ({"priority": 10**9}, "priority"),
    ],
)
def test_a_bad_value_is_a_400_that_names_the_field(
    cross: Served, route: str, wrong: dict[str, Any], name: str
) -> None:
    answer = cross.refused(route, 400, **{"query": QUERY, "documents": DOCUMENTS} | wrong)
    if route == "/v2/rerank":
        assert set(answer) == {"message"} and name in answer["message"].replace("an empty text", name)
    else:
        assert answer["error"]["param"] == name
    assert len(cross.post(route, query=QUERY, documents=DOCUMENTS)["results"]) == 5


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"queries": QUERY},
        {"queries": QUERY, "text_2": DOCUMENTS},
        {"text_1": QUERY, "text_2": DOCUMENTS, "documents": DOCUMENTS},
        {"text_1": "", "text_2": DOCUMENTS},
        {"text_1": QUERY, "text_2": []},
        {"text_1": [], "text_2": DOCUMENTS},
        {"text_1": QUERY, "text_2": [1]},
    ],
)
def test_a_score_needs_both_texts(cross: Served, body: dict[str, Any]) -> None:
    assert cross.refused("/score", 400, **body)["error"]["param"] in {
        "queries", "documents", "text_1", "text_2"
    }  # fmt: skip


def test_a_model_without_scores_is_a_422(tmp_path: Path) -> None:
    folder = write_cross_encoder(tmp_path / "moods", labels=3)
    with local_app(folder) as (http, _):
        for route, body in {
            "/score": {"text_1": "a", "text_2": "b"},
            "/rerank": {"query": "a", "documents": ["b"]},
            "/v2/rerank": {"query": "a", "documents": ["b"]},
        }.items():
            refused = http.post(route, json=body)
            assert refused.status_code == 422 and "its tasks are: classify" in refused.text
        tei = http.post("/rerank", json={"query": "a", "texts": ["b"]})
        assert tei.status_code == 424 and set(tei.json()) == {"error", "error_type"}


def test_an_instruction_needs_a_template_that_takes_one(cross: Served) -> None:
    refused = cross.refused("/rerank", 422, query=QUERY, documents=DOCUMENTS, instruction="be kind")
    assert refused["error"]["param"] == "instruction"


def test_a_tei_request_is_recognised_by_its_texts_field(cross: Served) -> None:
    expected = cross.post("/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    rows = cross.post("/rerank", query=QUERY, texts=DOCUMENTS)
    assert rows == [{"index": row["index"], "score": row["relevance_score"]} for row in expected]
    raw = cross.post("/rerank", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True)
    assert [row["text"] for row in raw] == [DOCUMENTS[row["index"]] for row in expected]
    np.testing.assert_allclose(
        [1 / (1 + np.exp(-row["score"])) for row in raw], [row["score"] for row in rows], atol=1e-5
    )


def test_tei_requests_get_errors_in_the_shape_of_tei(cross: Served) -> None:
    long = "water " * 80
    for status, kind, wrong in (
        (400, "Empty", {"query": "a", "texts": []}),
        (422, "Validation", {"query": "a", "texts": [1]}),
        (413, "Validation", {"query": "a", "texts": [long], "truncate": False}),
    ):
        answer = cross.refused("/rerank", status, **wrong)
        assert set(answer) == {"error", "error_type"} and answer["error_type"] == kind
    for side in ("left", "Right"):
        rows = cross.post("/rerank", query="a", texts=[long], truncate=True, truncation_direction=side)
        assert len(rows) == 1


def test_embedding_models_score_by_vectors_with_their_own_prompts(embedder: Served) -> None:
    query = embedder.engine.embed([QUERY], input_type="query")
    documents = embedder.engine.embed(DOCUMENTS, input_type="document")
    expected = (documents @ query[0]).tolist()
    before = len(embedder.client.requests)
    rows = embedder.post("/score", queries=QUERY, documents=DOCUMENTS)["data"]
    np.testing.assert_allclose([row["score"] for row in rows], expected, atol=1e-5)
    results = embedder.post("/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [row["index"] for row in results] == np.argsort(-np.array(expected)).tolist()
    assert len(embedder.client.requests) == before + 2
    request = embedder.client.requests[-1]
    assert request.num_queries == 1 and request.pairs is not None and request.pairs.tolist() == [0] * 5


def test_an_embedding_model_runs_each_query_once(embedder: Served) -> None:
    queries = [QUERY, "oil", QUERY, "oil", QUERY]
    rows = embedder.post("/score", queries=queries, documents=DOCUMENTS)["data"]
    request = embedder.client.requests[-1]
    assert (
        request.num_queries == 2 and request.pairs is not None and request.pairs.tolist() == [0, 1, 0, 1, 0]
    )
    for index, row in enumerate(rows):
        one = embedder.post("/score", text_1=queries[index], text_2=DOCUMENTS[index])["data"][0]
        assert row["score"] == pytest.approx(one["score"], abs=1e-5)


def test_similarity_treats_both_sentences_alike(embedder: Served, cross: Served) -> None:
    vectors = embedder.engine.embed([QUERY, *DOCUMENTS])
    inputs = {"source_sentence": QUERY, "sentences": DOCUMENTS}
    answer = embedder.post("/similarity", inputs=inputs)
    np.testing.assert_allclose(answer, vectors[1:] @ vectors[0], atol=1e-5)
    vectors = embedder.engine.embed([QUERY, *DOCUMENTS], prompt_name="plain")
    answer = embedder.post(
        "/similarity", inputs=inputs, parameters={"prompt_name": "plain", "truncate": True}
    )
    np.testing.assert_allclose(answer, vectors[1:] @ vectors[0], atol=1e-5)
    refused = cross.refused("/similarity", 424, inputs=inputs)
    assert set(refused) == {"error", "error_type"}
    for status, wrong in (
        (400, {"source_sentence": QUERY, "sentences": []}),
        (400, {"source_sentence": "", "sentences": ["a"]}),
        (422, {}),
    ):
        embedder.refused("/similarity", status, inputs=wrong)


def test_the_pooling_route_names_the_score_routes(cross: Served) -> None:
    assert "/rerank" in cross.refused("/pooling", 400, input="a", task="score")["error"]["message"]


def test_too_many_documents_are_refused(folder: Path) -> None:
    with local_app(folder, server={"max_rows": 3}) as (http, _):
        refused = http.post("/rerank", json={"query": "a", "documents": DOCUMENTS})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"


def test_the_schema_has_both_bodies_and_no_duplicate_names(cross: Served) -> None:
    schema = cross.http.get("/openapi.json").json()
    body = schema["paths"]["/rerank"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert len(body["anyOf"]) >= 2 and "TeiRerankRequest" in schema["components"]["schemas"]
    names = [each["operationId"] for path in schema["paths"].values() for each in path.values()]
    assert len(names) == len(set(names))
