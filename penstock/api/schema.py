"""The OpenAPI schema, generated from the routes and the types of their bodies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from penstock import __version__
from penstock.api.endpoint import Dialect


class Described(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def body(self) -> type[msgspec.Struct] | None: ...
    @property
    def handler(self) -> Callable[..., Any]: ...
    @property
    def group(self) -> str: ...
    @property
    def other(self) -> Dialect | None: ...


_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
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


def openapi(routes: Sequence[Described]) -> dict[str, Any]:
    bodies = [body for route in routes for body in _bodies(route)]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    names: set[str] = set()
    for route in routes:
        operation = _operation(route)
        if operation["operationId"] in names:  # a handler that has several paths
            operation["operationId"] += route.path.replace("/", "_")
        names.add(operation["operationId"])
        paths[route.path] = {"get" if route.body is None else "post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _bodies(route: Described) -> list[type[msgspec.Struct]]:
    other = [] if route.other is None else [route.other.body]
    return [] if route.body is None else [route.body, *other]


def _operation(route: Described) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [route.group],
        "summary": (inspect.getdoc(route.handler) or "").split("\n")[0],
        "operationId": route.handler.__name__,
        "responses": {"200": {"description": "the answer"}},
    }
    if route.body is not None:
        kinds = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in _bodies(route)]
        reference = kinds[0] if len(kinds) == 1 else {"oneOf": kinds}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for status, words in _STATUSES.items():
            operation["responses"][status] = {"description": words, "content": error}
    return operation
