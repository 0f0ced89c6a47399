"""The OpenAPI schema, generated from the routes and the types of their bodies."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock import __version__
from penstock.api.routes import RouteSpec, Variant

_REFERENCE = "#/components/schemas/{name}"
_STATUSES = {
    "400": "a value is not accepted; `param` names the field",
    "401": "the API key is missing or wrong",
    "404": "no such model or route",
    "408": "the timeout passed",
    "413": "the body is too large",
    "422": "well-formed, but not possible for this model",
    "429": "the server is full; see Retry-After",
    "503": "the engine is not ready; the message gives the reason",
}


def openapi(routes: Sequence[RouteSpec]) -> dict[str, Any]:
    kinds: list[Any] = [kind for route in routes for kind in _types(route)]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schema_of = {_key(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, Any] = {}
    names: set[str] = set()
    for route in routes:
        operation = _operation(route, schema_of)
        if operation["operationId"] in names:  # a handler that has several paths
            operation["operationId"] += route.path.replace("/", "_")
        names.add(operation["operationId"])
        paths.setdefault(route.path, {})["get" if route.body is None else "post"] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _key(kind: Any) -> str:
    return repr(kind)


def _kinds(route: RouteSpec) -> list[RouteSpec | Variant]:
    return [route, *route.variants]


def _types(route: RouteSpec) -> list[Any]:
    """The types of all bodies, answers and errors of a route."""
    found = [each for kind in _kinds(route) for each in (kind.body, kind.answer, kind.errors.answer)]
    return [each for each in found if each is not None]


def _one_of(types: Sequence[Any], schema_of: dict[str, Any]) -> dict[str, Any]:
    distinct = list({_key(kind): schema_of[_key(kind)] for kind in types if kind is not None}.values())
    return distinct[0] if len(distinct) == 1 else {"oneOf": distinct}


def _content(types: Sequence[Any], schema_of: dict[str, Any]) -> dict[str, Any]:
    known = [kind for kind in types if kind is not None]
    return {"content": {"application/json": {"schema": _one_of(known, schema_of)}}} if known else {}


def _operation(route: RouteSpec, schema_of: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds(route)
    answers = _content([kind.answer for kind in kinds], schema_of)
    operation: dict[str, Any] = {
        "tags": list(dict.fromkeys(kind.dialect for kind in kinds)),
        "summary": (inspect.getdoc(route.handler) or "").split("\n")[0],
        "operationId": route.handler.__name__,
        "responses": {"200": {"description": "the answer", **answers}},
    }
    if (prefix := route.prefix) is not None:
        name = route.path.removeprefix(prefix).strip("{}")
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    if route.body is not None:
        content = _content([kind.body for kind in kinds], schema_of)
        operation["requestBody"] = {"required": True, **content}
        errors = _content([kind.errors.answer for kind in kinds], schema_of)
        for status, words in _STATUSES.items():
            operation["responses"][status] = {"description": words, **errors}
    return operation
