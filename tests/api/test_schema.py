"""The OpenAPI document is valid and describes the body and the answer of every route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from penstock.api.app import ROUTES
from penstock.api.call import Call, Reply
from penstock.api.decoding import RouteDecoder
from penstock.api.fields import NoEffect, Refused
from penstock.api.meanings import meaning
from penstock.api.routes import RouteSpec, Variant
from penstock.api.schema import DIALECTS, Kind, kinds_of, openapi
from tests.api.local_app import local_app
from tests.checkpoints import write_bert

Json = dict[str, Any]
LISTED = [route for route in ROUTES if route.is_listed]
KINDS = [(route, kind) for route in LISTED for kind in kinds_of(route)]
NAMES = [f"{route.path} {kind.dialect}" for route, kind in KINDS]
WITH_BODY = [(route, kind) for route, kind in KINDS if kind.body is not None]
BODY_NAMES = [f"{route.path} {kind.body.__name__}" for route, kind in WITH_BODY if kind.body is not None]


@pytest.fixture(scope="module")
def document() -> Json:
    return openapi(ROUTES)


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


# --- declarations of routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "kind"), KINDS, ids=NAMES)
def test_a_route_says_what_it_answers(route: RouteSpec, kind: Kind, request: pytest.FixtureRequest) -> None:
    assert kind.answer is not None or kind.media, "RouteSpec needs answer=, or media= where it is not JSON"
    assert kind.errors.answer is not None, "ErrorStyle needs answer="


@pytest.mark.parametrize(("route", "kind"), WITH_BODY, ids=BODY_NAMES)
def test_a_route_has_an_example_that_its_own_body_accepts(route: RouteSpec, kind: Kind) -> None:
    assert kind.example is not None, "RouteSpec needs example="
    assert route.body is not None
    decoded = RouteDecoder(route.body, route.variants, strict_fields=True).decode(
        json.dumps(kind.example).encode()
    )
    assert decoded.ignored == ()
    assert type(decoded.body) is kind.body, "the example is taken for another dialect's"


@pytest.mark.parametrize(("route", "kind"), WITH_BODY, ids=BODY_NAMES)
def test_every_field_has_a_meaning(route: RouteSpec, kind: Kind) -> None:
    assert kind.body is not None
    names = [each.encode_name for each in msgspec.structs.fields(kind.body)]
    assert [name for name in names if not meaning(kind.body.__name__, name)] == []


def test_every_dialect_is_introduced(document: Json) -> None:
    assert [tag["name"] for tag in document["tags"] if tag["name"] not in DIALECTS] == []
    assert all(tag["description"] for tag in document["tags"])


# --- the document -------------------------------------------------------------------------------------------


def test_the_document_is_valid(document: Json) -> None:
    validator = pytest.importorskip("openapi_spec_validator", reason="needs openapi-spec-validator")
    validator.validate(json.loads(msgspec.json.encode(document)))


def test_operations_have_unique_names_summaries_and_tags(document: Json) -> None:
    found = list(operations(document))
    names = [operation["operationId"] for *_, operation in found]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() for name in names)
    known = {tag["name"] for tag in document["tags"]}
    for method, path, operation in found:
        assert operation["summary"], (method, path)
        assert operation["tags"] and set(operation["tags"]) <= known


def test_every_method_of_a_path_is_described(document: Json) -> None:
    described = {(method.upper(), path) for method, path, _ in operations(document)}
    wanted = {(method, route.path) for route in LISTED for method in route.all_methods if method != "HEAD"}
    assert described == wanted


def test_bodies_take_further_fields_and_null_for_optional_ones(document: Json) -> None:
    schemas = document["components"]["schemas"]
    for _, kind in WITH_BODY:
        assert kind.body is not None
        schema = next(each for name, each in schemas.items() if name.endswith(kind.body.__name__))
        assert "additionalProperties" not in schema
        for name, field in schema["properties"].items():
            if name not in schema.get("required", []):
                any_value = not {"anyOf", "enum", "type", "$ref"} & set(field)
                assert (
                    any_value or {"type": "null"} in field.get("anyOf", ()) or None in field.get("enum", ())
                ), name


def test_strict_servers_say_that_bodies_take_no_further_fields() -> None:
    schema = openapi(ROUTES, strict_fields=True)["components"]["schemas"]["EmbeddingsRequest"]
    assert schema["additionalProperties"] is False


def test_answers_have_their_headers(document: Json) -> None:
    headers = document["components"]["headers"]
    assert {"x-request-id", "x-ignored-fields", "x-truncated-rows", "x-total-ms"} <= set(headers)
    for response in document["components"]["responses"].values():
        assert all(
            each.get("$ref", "").startswith("#/components/headers/") or each["schema"]
            for each in response["headers"].values()
        )
    full = document["paths"]["/v1/embeddings"]["post"]["responses"]["429"]["$ref"].rpartition("/")[2]
    assert "Retry-After" in document["components"]["responses"][full]["headers"]


def test_a_key_is_part_of_the_document(document: Json) -> None:
    assert document["paths"]["/v1/embeddings"]["post"]["security"] == [{}, {"key": []}]
    assert openapi(ROUTES, needs_key=True)["paths"]["/v1/embeddings"]["post"]["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


# --- a route of this test -----------------------------------------------------------------------------------


class Inner(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    size: int = 1


class OwnBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body for these tests."""

    input: str
    user: Annotated[str | None, NoEffect("nobody asks")] = None
    best_of: Annotated[int, Refused("there is one answer", accepts=(1, None))] = 0
    inner: Inner | None = None
    encoding_format: Literal["float", "bytes"] = "float"
    stream: bool = False


class OtherBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text: str


class Answer(msgspec.Struct, kw_only=True):
    value: float


async def own(call: Call, body: OwnBody) -> Reply:
    """Answer in its own way.

    With more words.
    """
    return Reply(b"{}")


async def other(call: Call, body: OtherBody) -> Reply:
    """Answer in another way: `text` decides."""
    return Reply(b"{}")


@pytest.fixture(scope="module")
def made() -> Json:
    variant = Variant(("text",), OtherBody, other, "TEI", answer=list[Answer], example={"text": "a"})
    routes = (
        RouteSpec("/own", OwnBody, own, "native", Answer, example={"input": "a"}, variants=(variant,)),
        RouteSpec("/v1/own", OwnBody, own, "native", Answer, example={"input": "a"}),
        RouteSpec("/v1/own", None, other, "native", Answer),
        RouteSpec("/v1/own/{name}", None, other, "native", Answer, methods=("GET", "DELETE")),
    )
    return openapi(routes)


def test_every_kind_of_body_is_shown_with_its_example(made: Json) -> None:
    operation = made["paths"]["/own"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert content["schema"] == {
        "anyOf": [{"$ref": "#/components/schemas/OwnBody"}, {"$ref": "#/components/schemas/OtherBody"}]
    }
    assert {name: each["value"] for name, each in content["examples"].items()} == {
        "OwnBody": {"input": "a"},
        "OtherBody": {"text": "a"},
    }
    assert operation["tags"] == ["native", "TEI"]
    assert operation["summary"] == "Answer in its own way"
    assert made["paths"]["/v1/own"]["get"]["summary"] == "Answer in another way"
    assert made["paths"]["/v1/own"]["get"]["description"].strip() == "Answer in another way: `text` decides."
    assert "With more words." in operation["description"] and "`text`" in operation["description"]


def test_an_answer_has_every_content_type(made: Json) -> None:
    answer = made["paths"]["/own"]["post"]["responses"]["200"]
    assert set(answer["content"]) == {"application/json", "text/event-stream", "application/octet-stream"}
    assert len(answer["content"]["application/json"]["schema"]["anyOf"]) == 2
    assert "metadata" in answer["headers"]


def test_fields_say_what_has_no_effect_and_what_is_refused(made: Json) -> None:
    schemas = made["components"]["schemas"]
    fields = schemas["OwnBody"]["properties"]
    assert "No effect: nobody asks." in fields["user"]["description"]
    assert fields["best_of"]["enum"] == [0, 1, None]
    assert "refused: there is one answer" in fields["best_of"]["description"]
    assert fields["inner"]["anyOf"][1] == {"type": "null"}
    assert "additionalProperties" not in schemas["Inner"]
    assert fields["input"]["type"] == "string"


def test_operations_are_named_after_handlers_or_paths(made: Json) -> None:
    names = {(method, path): each["operationId"] for method, path, each in operations(made)}
    assert names == {
        ("post", "/own"): "own",
        ("post", "/v1/own"): "v1_own",
        ("get", "/v1/own"): "get_v1_own",
        ("get", "/v1/own/{name}"): "v1_own_name",
        ("delete", "/v1/own/{name}"): "delete_v1_own_name",
    }


# --- a server -----------------------------------------------------------------------------------------------


def test_a_server_describes_itself(tmp_path: Path) -> None:
    with local_app(write_bert(tmp_path), server={"api_keys": ("secret",), "strict_fields": True}) as (
        http,
        _,
    ):
        document = http.get("/openapi.json").json()
    assert document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["example"] == "model"
    assert document["paths"]["/v1/embeddings"]["post"]["security"] == [{"key": []}]
    assert document["components"]["schemas"]["EmbeddingsRequest"]["additionalProperties"] is False
    assert "/openapi.json" in document["paths"]
