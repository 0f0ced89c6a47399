"""Extreme numbers and values that cannot be encoded, on routes that the end-to-end servers do not cover."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.errors import MAX_MESSAGE_CHARS
from tests.api.local_app import local_app
from tests.checkpoints import write_cross_encoder, write_late, write_m3, write_token_classifier
from tests.fuzz.cases import Schema, numeric_bodies

EXTREMES = (2**64, -(2**64), 2**31, -1, 1e308)
MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "sparse": (write_m3, ("/v1/sparse", "/pooling")),
    "entities": (write_token_classifier, ("/v1/entities",)),
    "reranker": (write_cross_encoder, ("/classify", "/rerank", "/score")),
    "late": (write_late, ("/pooling", "/rerank")),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    write, routes = MODELS[request.param]
    with local_app(write(tmp_path_factory.mktemp("models") / request.param)) as (http, _):
        yield http, routes


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with local_app(write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")) as (http, _):
        yield http


@pytest.mark.parametrize("value", EXTREMES)
def test_an_extreme_number_in_any_field_is_no_5xx(
    model: tuple[TestClient, tuple[str, ...]], value: float
) -> None:
    http, routes = model
    schema = Schema(http.get("/openapi.json").json())
    statuses, names = {}, set()
    for path in routes:
        assert http.post(path, json=schema.example(path, schema.bodies(path)[0])).status_code == 200
        for name, body in numeric_bodies(schema, path, value):
            statuses[path, json.dumps(body)] = http.post(path, json=body).status_code
            names.add(name)
    assert names >= {"priority", "timeout", "truncate_prompt_tokens"}
    assert {each: status for each, status in statuses.items() if status >= 500} == {}


def nested(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = {"more": value}
    return value


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("odd", [2**64, [[-(2**70)]]])
def test_a_document_that_no_reply_can_hold_is_a_400_if_it_should_be_returned(
    reranker: TestClient, route: str, odd: Any
) -> None:
    body = {"query": "water", "documents": [{"text": "oil"}, {"text": "water", "odd": odd}]}
    assert reranker.post(route, json=body).status_code == 200
    refused = reranker.post(route, json=body | {"return_documents": True, "top_n": 1})
    assert refused.status_code == 400
    assert "documents 1 cannot be returned" in refused.text


@pytest.mark.parametrize("levels", [250, 300, 2000, 100_000])
@pytest.mark.parametrize("returns", [False, True])
def test_a_deeply_nested_document_is_answered_or_refused(
    reranker: TestClient, levels: int, returns: bool
) -> None:
    deep = '{"more":' * levels + "1" + "}" * levels
    body = f'{{"query": "water", "documents": [{deep}], "return_documents": {json.dumps(returns)}}}'
    assert reranker.post("/rerank", content=body).status_code == 400
    with_text = body.replace("[{", '[{"text": "oil",', 1)
    assert reranker.post("/rerank", content=with_text).status_code in (200, 400)


def test_a_nested_document_is_returned_as_it_came(reranker: TestClient) -> None:
    document = {"text": "water", "deep": nested(40), "größe": [1.5, None, "日本"]}
    body = {"query": "water", "documents": [document], "return_documents": True}
    (result,) = reranker.post("/rerank", json=body).json()["results"]
    assert result["document"] == document


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    "body",
    [
        {"model": LONG},
        {"truncation_side": LONG},
        {"prompt_name": LONG},
        {"input_type": LONG},
        {"adapter": LONG},
        {"truncate_prompt_tokens": 10**4000},
        {"priority": -(10**4000)},
    ],
    ids=lambda body: next(iter(body))[:20],
)
def test_an_error_does_not_repeat_megabytes_that_it_was_sent(
    reranker: TestClient, body: dict[str, Any]
) -> None:
    refused = reranker.post("/classify", json={"input": "water", **body})
    error = refused.json()["error"]
    assert 400 <= refused.status_code < 500
    assert len(error["message"]) <= MAX_MESSAGE_CHARS
    assert error["param"] and next(iter(body)).startswith(error["param"][:100])


def test_an_error_names_the_field_whatever_words_its_value_has(reranker: TestClient) -> None:
    body = {"input": "water", "truncation_side": " - at `$.model`" * 3}
    assert reranker.post("/classify", json=body).json()["error"]["param"] == "truncation_side"


@pytest.mark.parametrize("route", ["/classify", "/rerank"])
def test_a_long_cache_salt_is_refused_since_caches_keep_it(reranker: TestClient, route: str) -> None:
    body = {"input": "water"} if route == "/classify" else {"query": "water", "documents": ["oil"]}
    assert reranker.post(route, json={**body, "cache_salt": "s" * 1024}).status_code == 200
    refused = reranker.post(route, json={**body, "cache_salt": "s" * 1025})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"
    assert "1024" in refused.json()["error"]["message"]
