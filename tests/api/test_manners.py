"""How every route treats third-party clients: model names, headers, fields and methods."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.api.app import ROUTES
from tests.api.local_app import local_app
from tests.checkpoints import write_bert

PROMPTS = {"query": "find: ", "document": "text: ", "title": "title: "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bert(tmp_path_factory.mktemp("bert"))
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "find: ", "document": "text: ", "title": "title: "}}'
    )
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with local_app(folder, aliases=("other", "org/third")) as (client, _):
        yield client


def embed(http: TestClient, **body: Any) -> Any:
    return http.post("/v1/embeddings", json={"input": "water", **body})


def vector(http: TestClient, **body: Any) -> list[float]:
    answer = embed(http, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["embedding"]


def test_unknown_fields_are_ignored_named_and_counted(http: TestClient) -> None:
    def count() -> float:
        text = http.get("/metrics").text
        rows = [line for line in text.splitlines() if line.startswith("penstock_ignored_fields_total")]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if "/v1/embeddings" in row)

    before = count()
    answer = embed(http, no_such=1, another={"deep": [1]})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "no_such, another"
    assert count() == before + 2
    assert "x-ignored-fields" not in embed(http).headers


def test_an_unknown_field_inside_a_known_one_is_named_by_its_path(http: TestClient) -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"], "extra": 1}, "more": None}
    answer = http.post("/similarity", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "inputs.extra, more"


@pytest.mark.parametrize("name", ["größe\n", "x" * 5000, "a,b", "\x00", "‮"])
def test_a_header_holds_whatever_name_a_client_invents(http: TestClient, name: str) -> None:
    header = embed(http, **{name: 1}).headers["x-ignored-fields"]
    assert header.isascii() and header.isprintable() and 0 < len(header) <= 1024


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b'{"unknown": 1, "input": "\xff\xfe"}'),
        ("/v1/embeddings", b'{"input": null, "input": "\xff"}'),
        ("/classify", b'{"messages": [], "cache_salt": "\xed\xa0\x80"}'),  # `messages` selects its type
        ("/tokenize", b'{"messages": [], "unknown": 1, "model": "\xff"}'),
    ],
)
def test_bytes_that_are_not_text_are_refused_behind_another_fault(
    http: TestClient, path: str, body: bytes
) -> None:
    answer = http.post(path, content=body)
    assert answer.status_code == 400, answer.text
    assert "not valid JSON" in answer.json()["error"]["message"]


def test_many_unknown_fields_cost_one_short_header(http: TestClient) -> None:
    answer = embed(http, **{f"field_{index}": index for index in range(10_000)})
    assert answer.status_code == 200
    assert len(answer.headers["x-ignored-fields"]) <= 1024


def test_null_means_absent_for_every_optional_field(http: TestClient) -> None:
    names = [
        name for route in ROUTES if route.path == "/v1/embeddings" for name in route.body.__struct_fields__
    ]
    nulls = {name: None for name in names if name != "input"}
    assert vector(http, **nulls) == vector(http)
    refused = http.post("/v1/embeddings", json={"input": None})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"


def test_strict_fields_refuse_what_is_unknown_but_not_null(folder: Path) -> None:
    with local_app(folder, server={"strict_fields": True}) as (http, _):
        assert embed(http, truncation_side=None).status_code == 200
        refused = embed(http, no_such=1)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "no_such"
        assert "--strict-fields" in refused.json()["error"]["message"]


def test_a_wrong_choice_is_followed_by_what_is_accepted(http: TestClient) -> None:
    error = http.post("/pooling", json={"input": "a", "task": "no_such"}).json()["error"]
    assert error["param"] == "task" and "embed, token_embed" in error["message"]
    error = embed(http, truncation_side="up", unknown=1).json()["error"]
    assert error["message"] == "truncation_side: Invalid enum value 'up'; use left or right"
    error = embed(http, embed_dtype="float8").json()["error"]
    assert "binary or ubinary" in error["message"]


def test_errors_have_the_type_and_the_numeric_code_of_vllm(http: TestClient) -> None:
    refused = embed(http, dimensions=0)
    assert refused.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "BadRequestError",
        "param": "dimensions",
        "code": 400,
        "reason": "invalid_value",
    }
    missing = embed(http, model="no-such").json()["error"]
    assert (missing["type"], missing["code"]) == ("NotFoundError", 404)


def test_a_model_answers_to_all_of_its_names(http: TestClient) -> None:
    names = [entry["id"] for entry in http.get("/v1/models").json()["data"]]
    assert names == ["model", "other", "org/third"]
    expected = vector(http)
    for name in (*names, "model:latest", ""):
        assert vector(http, model=name) == expected
    assert http.get("/v1/models/org/third").json()["root"] == "model"
    assert http.get("/v1/models/no-such").status_code == 404


def test_a_name_chooses_a_prompt_for_clients_that_cannot_send_one(http: TestClient) -> None:
    for prompt, words in PROMPTS.items():
        expected = vector(http, input=f"{words}water")
        assert vector(http, model=f"model:{prompt}") == pytest.approx(expected, abs=1e-6)
        assert vector(http, model=f"org/third:{prompt}") == pytest.approx(expected, abs=1e-6)
    assert embed(http, model="model:nothing").status_code == 404
    twice = embed(http, model="model:query", input_type="document")
    assert twice.status_code == 400 and twice.json()["error"]["param"] == "input_type"
    no_prompt = http.post("/tokenize", json={"prompt": "a", "model": "model:query"})
    assert no_prompt.status_code == 400 and no_prompt.json()["error"]["param"] == "model"


def test_any_name_is_accepted_where_the_operator_says_so(folder: Path) -> None:
    with local_app(folder, server={"any_model_name": True}) as (http, _):
        assert embed(http, model="text-embedding-3-small").status_code == 200
        assert vector(http, model="model:query") != vector(http, model="gpt:query")


def test_long_texts_are_cut_where_the_operator_says_so(folder: Path) -> None:
    long = "water " * 400
    with local_app(folder, server={"auto_truncate": True}) as (http, _):
        answer = embed(http, input=[long, "water", long])
        assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "2"
        assert "x-truncated-rows" not in embed(http).headers
        chunked = embed(http, input=long, chunking="mean")
        assert chunked.status_code == 200 and "x-truncated-rows" not in chunked.headers
        expected = answer.json()["data"][0]["embedding"]
    with local_app(folder) as (http, _):
        refused = embed(http, input=long)
        assert refused.status_code == 400 and "truncate_prompt_tokens" in refused.json()["error"]["message"]
        assert vector(http, input=long, truncate_prompt_tokens=-1) == expected


def test_long_documents_are_cut_where_the_operator_or_the_dialect_says_so(folder: Path) -> None:
    body = {"query": "water", "documents": ["water " * 400, "water"]}
    with local_app(folder, server={"auto_truncate": True}) as (http, _):
        for path in ("/rerank", "/v1/rerank"):
            answer = http.post(path, json=body)
            assert answer.status_code == 200 and answer.headers["x-truncated-rows"] == "1", path
        score = http.post("/score", json={"queries": "water", "documents": body["documents"]})
        assert score.status_code == 200 and score.headers["x-truncated-rows"] == "1"
    with local_app(folder) as (http, _):
        assert http.post("/rerank", json=body).status_code == 400
        assert http.post("/v1/rerank", json=body).status_code == 200


def test_long_texts_are_chunked_where_the_operator_says_so(folder: Path) -> None:
    long = "water oil " * 200
    with local_app(folder, server={"default_chunking": "mean"}) as (http, _):
        found = vector(http, input=long)
        assert found == vector(http, input=long, chunking="mean")
        assert found != vector(http, input=long, truncate_prompt_tokens=-1)
        assert embed(http, input=long, chunking="none").status_code == 400
        assert vector(http) == vector(http, chunking="none")


def test_an_empty_text_has_the_vector_of_its_special_tokens(http: TestClient) -> None:
    ids = http.post("/tokenize", json={"prompt": ""}).json()["tokens"]
    assert vector(http, input="") == pytest.approx(vector(http, input=[ids]), abs=1e-6)
    assert http.post("/v1/embeddings", json={"input": []}).status_code == 400


def test_the_header_names_the_request(http: TestClient) -> None:
    answer = http.post("/v1/embeddings", json={"input": "a"}, headers={"X-Request-ID": "abc"})
    assert answer.headers["x-request-id"] == "abc" and answer.json()["id"] == "embd-abc"
    refused = http.post("/v1/embeddings", json={"input": 1}, headers={"x-request-id": "abc"})
    assert refused.status_code == 400 and refused.headers["x-request-id"] == "abc"
    long = http.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "x" * 300})
    assert long.status_code == 200 and "x-request-id" not in long.headers


def test_slashes_methods_and_options(http: TestClient) -> None:
    assert http.post("/v1/embeddings/", json={"input": "a"}).status_code == 200
    assert http.get("/health/").status_code == 200
    assert http.head("/health").status_code == 200
    allowed = http.options("/v1/embeddings")
    assert allowed.status_code == 204 and allowed.headers["allow"] == "POST, OPTIONS"
    assert http.delete("/v1/embeddings").status_code == 405
    assert http.get("/v1/embeddings/x").status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer secret"},
        {"AUTHORIZATION": "bearer  secret"},
        {"authorization": "BEARER secret"},
        {"X-API-KEY": "secret"},
        {"api-key": "secret"},
    ],
)
def test_a_key_is_found_however_its_header_is_spelled(folder: Path, headers: dict[str, str]) -> None:
    with local_app(folder, server={"api_keys": ("secret",)}) as (http, _):
        assert http.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 200
        wrong = {name: value + "x" for name, value in headers.items()}
        refused = http.post("/v1/embeddings", json={"input": "a"}, headers=wrong)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"


def test_pages_of_named_origins_may_call_the_server(folder: Path) -> None:
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization,content-type"
    with local_app(folder, server={"allowed_origins": ("https://app.example",), "api_keys": ("k",)}) as (
        http,
        _,
    ):
        preflight = http.options("/v1/embeddings", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        other = http.options("/v1/embeddings", headers={**ask, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        answer = http.post(
            "/v1/embeddings",
            json={"input": "a"},
            headers={"Origin": "https://app.example", "Authorization": "Bearer k"},
        )
        assert answer.status_code == 200
        assert "x-truncated-rows" in answer.headers["access-control-expose-headers"]
    with local_app(folder) as (http, _):
        plain = http.post("/v1/embeddings", json={"input": "a"}, headers={"Origin": "https://app.example"})
        assert "access-control-allow-origin" not in plain.headers


def test_routes_are_served_below_the_root_path_too(folder: Path) -> None:
    with local_app(folder, server={"root_path": "/api"}) as (http, _):
        for path in ("/v1/models", "/api/v1/models", "/api/", "/api"):
            assert http.get(path).status_code == 200, path
        assert http.get("/apis/v1/models").status_code == http.get("/api/api").status_code == 404
