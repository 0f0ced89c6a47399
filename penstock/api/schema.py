"""The OpenAPI document, generated from the routes, their types and their examples."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from penstock import __version__
from penstock.api.fields import NoEffect, Refused
from penstock.api.meanings import limits, meaning, without_links
from penstock.api.routes import RouteSpec, Variant
from penstock.errors import (
    BadValue,
    BodyTooLarge,
    DeadlineExceeded,
    EmptyInput,
    EngineUnavailable,
    Forbidden,
    MalformedBody,
    ModelNotFound,
    NotPossible,
    OrderFailed,
    PenstockError,
    QueueFull,
    Unauthorized,
    UnsupportedEncoding,
)

Json = dict[str, Any]
Kind = RouteSpec | Variant
_REFERENCE = "#/components/schemas/{name}"
_NULL: Json = {"type": "null"}

# In the order in which the page shows them.
DIALECTS = {
    "OpenAI": "What the `openai` package and everything built on it calls.",
    "vLLM": "Pooling, classification, scores and rankings as vLLM's server has them, and the tokenizer.",
    "Cohere": "What the `cohere` package calls.",
    "Jina": "The fields of Jina's API, on the paths that it shares with OpenAI.",
    "Voyage": "What the `voyageai` package calls.",
    "TEI": "Text Embeddings Inference.",
    "Infinity": "The routes of Infinity's server.",
    "Hugging Face": "What `huggingface_hub.InferenceClient` sends.",
    "Ollama": "What the `ollama` package calls.",
    "Anthropic": "What the `anthropic` package calls.",
    "native": "Penstock's own routes, for what no other API has.",
    "operation": "Health, readiness, metrics, version, schema and pages.",
}
TITLES = {"native": "Penstock", "operation": "Operation"}
_ABOUT = """One server answers every dialect at once, for every model that it holds.
The [playground](.) is a page to try them from.

- **Key.** Where the server asks for a key, send `Authorization: Bearer KEY` or `x-api-key: KEY`.
- **Unknown fields** are ignored and named in the header `x-ignored-fields`; `--strict-fields` refuses them.
- **null** means the default for every optional field.
- **Errors** have the shape of the route's dialect.
"""
_HEADERS: dict[str, tuple[bool, Json, str]] = {  # on every answer: (always there, schema, meaning)
    "x-tokenize-ms": (True, {"type": "number"}, "Milliseconds of tokenising."),
    "x-queue-ms": (True, {"type": "number"}, "Milliseconds in the queue."),
    "x-device-ms": (True, {"type": "number"}, "Milliseconds on the device."),
    "x-total-ms": (
        True,
        {"type": "number"},
        "Milliseconds from the request's arrival to the answer's start.",
    ),
    "x-request-id": (False, {"type": "string"}, "The request's id, if the client gave one."),
    "x-ignored-fields": (False, {"type": "string"}, "The fields of the body that were ignored."),
    "x-truncated-rows": (False, {"type": "integer"}, "How many rows were cut to fit the model."),
    "x-cache-hits": (False, {"type": "integer"}, "How many rows the result cache answered, if there is one."),
}
_RETRY_AFTER: Json = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
_METADATA: Json = {
    "description": "With `application/octet-stream`: JSON that tells where each row begins and its shape.",
    "schema": {"type": "string"},
}
_STREAM: Json = {  # the schema of one event
    "type": "object",
    "description": "A server-sent event. Its data is JSON; that of the last one may be `[DONE]`.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_EVENTS, _OCTETS = "text/event-stream", "application/octet-stream"

# One example error per status, with its description. A dialect may give it another status.
_UNAUTHORIZED = (
    Unauthorized("a valid API key is required; send `Authorization: Bearer KEY`"),
    "The key is missing or wrong.",
)
_ORDER_FAILED = (
    OrderFailed("the model cannot sleep: its engine does not run"),
    "The operation failed; `message` has the reason.",
)
_FORBIDDEN = (
    Forbidden("this route needs an admin key, and key search is none"),
    "The key is not an admin key, or the server has none.",
)
_NOT_FOUND = (
    ModelNotFound("no model is named 'other'; /v1/models lists all", param="model"),
    "There is no such model, or the server runs without what the route needs.",
)
_UNAVAILABLE = (
    EngineUnavailable("the engine is starting"),
    "The engine is not ready; the message gives the reason.",
)
_ERRORS: tuple[tuple[PenstockError, str], ...] = (
    (BadValue("dimensions is 0; use 1 to 384", param="dimensions"), "A value is not accepted."),
    (EmptyInput("input is empty; give at least one text", param="input"), "The input is empty."),
    (MalformedBody("the body is not valid JSON", param=None), "The body is not as declared."),
    _UNAUTHORIZED,
    _NOT_FOUND,
    (DeadlineExceeded("not finished within the timeout of 1 s"), "The timeout passed."),
    (BodyTooLarge("the body exceeds the limit of 67108864 bytes"), "The body is too large."),
    (
        UnsupportedEncoding("Content-Encoding is 'gzip'; send the body uncompressed"),
        "The body is compressed.",
    ),
    (NotPossible("this model has no task 'embed'", param="model"), "The model cannot do this."),
    (QueueFull("the queue is full; try again in 1 s"), "The server is full."),
    _UNAVAILABLE,
)


def openapi(
    routes: Sequence[RouteSpec],
    *,
    strict_fields: bool = False,
    needs_key: bool = False,
    model: str | None = None,
) -> Json:
    """The document of a server. `model` is the example for paths with the name of a model."""
    routes = [route for route in routes if route.is_listed]
    schemas = _Schemas(routes, strict_fields=strict_fields)
    names = _operation_ids(routes)
    paths: dict[str, Json] = {}
    for route in routes:
        for method in _methods(route):
            operation = _operation(route, schemas, model)
            operation["operationId"] = names[method, route.path]
            if route.admin or not route.open_to_all:
                operation["security"] = [{"key": []}] if needs_key or route.admin else [{}, {"key": []}]
            paths.setdefault(route.path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "."}],  # where this document is, so that a proxy may serve it under a prefix
        "tags": _tags(routes),
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": schemas.responses,
            "headers": {
                name: {"description": words, "required": is_always, "schema": schema}
                for name, (is_always, schema, words) in _HEADERS.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _methods(route: RouteSpec) -> list[str]:
    return [method.lower() for method in route.all_methods if method not in ("HEAD", "OPTIONS")]


def kinds_of(route: RouteSpec) -> list[Kind]:
    """The kinds of body that a route takes: its own, and those of its variants."""
    return [route, *route.variants]


def _tags(routes: Iterable[RouteSpec]) -> list[Json]:
    used = dict.fromkeys(kind.dialect for route in routes for kind in kinds_of(route))
    ordered = [name for name in DIALECTS if name in used] + [name for name in used if name not in DIALECTS]
    return [
        {"name": name, "x-displayName": TITLES.get(name, name), "description": DIALECTS.get(name, "")}
        for name in ordered
    ]


def _operation_ids(routes: Iterable[RouteSpec]) -> dict[tuple[str, str], str]:
    """Operation ids by (method, path): the handler's name if it has one path, otherwise the path's words."""
    keys = [(method, route) for route in routes for method in _methods(route)]
    uses = Counter(route.handler.__name__ for _, route in keys)
    found: dict[tuple[str, str], str] = {}
    taken: set[str] = set()
    for method, route in keys:
        words = [
            part.strip("{}").replace("-", "_").replace(".", "_") for part in route.path.split("/") if part
        ]
        name = route.handler.__name__
        if uses[name] > 1:
            name = "_".join(words) or name
        if name in taken:
            name = f"{method}_{'_'.join(words) or name}"
        taken.add(name)
        found[method, route.path] = name
    return found


# --- schemas of bodies and answers --------------------------------------------------------------------------


class _Schemas:
    """The schemas of all types. Schemas of bodies also say what the server accepts beyond their types."""

    def __init__(self, routes: Sequence[RouteSpec], *, strict_fields: bool) -> None:
        kinds = [kind for route in routes for kind in kinds_of(route)]
        bodies = [kind.body for kind in kinds if kind.body is not None]
        bodies += [each for route in routes for each in (route.form, route.query) if each is not None]
        answers = [each for kind in kinds for each in (kind.answer, kind.errors.answer) if each is not None]
        structs = _structs(bodies)
        every = [*bodies, *answers, *structs]
        made, self.components = msgspec.json.schema_components(every, ref_template=_REFERENCE)
        self.responses: dict[str, Json] = {}  # errors, which many routes share
        self._of = {repr(kind): schema for kind, schema in zip(every, made, strict=True)}
        for struct in structs:
            self._describe(struct, strict_fields=strict_fields)

    def one(self, kind: Any) -> Json:
        return self._of[repr(kind)]

    def any(self, kinds: Iterable[Any]) -> Json:
        """A schema that accepts any of the types."""
        distinct = list({repr(kind): self.one(kind) for kind in kinds}.values())
        return distinct[0] if len(distinct) == 1 else {"anyOf": distinct}

    def response(self, name: str, response: Json) -> Json:
        """A reference to a shared response. A different response of the same name gets a number."""
        unique, number = name, 1
        while self.responses.setdefault(unique, response) != response:
            number += 1
            unique = f"{name}-{number}"
        return {"$ref": f"#/components/responses/{unique}"}

    def component(self, struct: type[msgspec.Struct]) -> Json:
        found: Json = self.components[self.one(struct)["$ref"].rpartition("/")[2]]
        return found

    def _describe(self, struct: type[msgspec.Struct], *, strict_fields: bool) -> None:
        """Say what each field means, that null is its default, and that other fields are ignored."""
        component, notes = self.component(struct), limits(struct)
        if not strict_fields:
            component.pop("additionalProperties", None)
        required = component.get("required", [])
        for name, schema in component.get("properties", {}).items():
            note = notes.get(name)
            if isinstance(note, Refused):
                schema = _accepted_only(schema, note)
            if name not in required:
                schema = _nullable(schema)
            if schema.get("contentEncoding") == "base64":  # bytes: a file in a form
                schema = {"type": "string", "contentMediaType": _OCTETS}
            if words := _description(struct.__name__, name, note):
                schema["description"] = words
            component["properties"][name] = schema


def _structs(bodies: Sequence[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """The bodies and the types of objects inside them."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(kind: types.Type) -> None:
        if isinstance(kind, types.StructType):
            if kind.cls not in found:
                found[kind.cls] = None
                for each in kind.fields:
                    visit(each.type)
        elif isinstance(kind, types.UnionType):
            for part in kind.types:
                visit(part)
        elif isinstance(kind, types.Metadata):
            visit(kind.type)
        elif isinstance(kind, types.ListType | types.VarTupleType | types.SetType):
            visit(kind.item_type)
        elif isinstance(kind, types.TupleType):
            for part in kind.item_types:
                visit(part)
        elif isinstance(kind, types.DictType):
            visit(kind.value_type)

    for each in types.multi_type_info(bodies):
        visit(each)
    return list(found)


def _nullable(schema: Json) -> Json:
    """The schema with null as another value."""
    if None in schema.get("enum", ()) or schema == {} or _NULL in schema.get("anyOf", ()):
        return schema
    if "default" in schema and set(schema) == {"default"}:  # any value
        return schema
    outer: Json = {key: schema[key] for key in ("default", "description", "title") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in outer}
    if "enum" in inner:
        return {**inner, "enum": [*inner["enum"], None], **outer}
    if set(inner) == {"anyOf"}:
        return {"anyOf": [*inner["anyOf"], dict(_NULL)], **outer}
    return {"anyOf": [inner, dict(_NULL)], **outer}


def _accepted_only(schema: Json, note: Refused) -> Json:
    """The schema of a refused field: its default, and the other accepted values."""
    values = [schema["default"]] if "default" in schema else []
    values += [value for value in note.accepts if value not in values]
    return {"enum": msgspec.to_builtins(values)} | {key: schema[key] for key in ("default",) if key in schema}


def _description(body: str, field: str, note: NoEffect | Refused | None) -> str:
    words = without_links(meaning(body, field) or "")
    if isinstance(note, NoEffect):
        return f"{words} No effect: {note.reason}.".strip()
    if isinstance(note, Refused):
        return f"{words} Other values than the default are refused: {note.reason}.".strip()
    return words


# --- operations ---------------------------------------------------------------------------------------------


def _operation(route: RouteSpec, schemas: _Schemas, model: str | None) -> Json:
    kinds = kinds_of(route)
    summary, _, more = (inspect.getdoc(route.handler) or "").partition("\n\n")
    sentence = " ".join(summary.split())
    title = re.split("[;:]", sentence)[0].replace("`", "").removesuffix(".")  # a title has no markup
    more = more if sentence.removesuffix(".") == title else f"{sentence}\n\n{more}"
    operation: Json = {
        "tags": list(dict.fromkeys(kind.dialect for kind in kinds)),
        "summary": title,
        "description": _about(route, more),
    }
    if (prefix := route.prefix) is not None:
        name = route.path.removeprefix(prefix).removesuffix(route.suffix).strip("{}")
        operation["parameters"] = [
            _parameter(name, route.path_example or (model if name == "model" else None))
        ]
    if route.query is not None:
        operation["parameters"] = [*operation.get("parameters", ()), *_query_parameters(route.query, schemas)]
    if route.body is not None:
        operation["requestBody"] = _request_body(kinds, schemas)
    elif route.form is not None:
        content = {"multipart/form-data": {"schema": schemas.one(route.form)}}
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = {"200": _answer(kinds, schemas), **_error_answers(route, schemas)}
    return operation


def _about(route: RouteSpec, more: str) -> str:
    """The description of a route, from the docstrings of its handlers. Names the dialect of each variant."""
    parts = [f"{more.strip()}\n" if more.strip() else ""]
    for kind in route.variants:
        words = " ".join((inspect.getdoc(kind.handler) or "").split())
        parts.append(f"- A body with {_or(kind.markers)} is of the dialect **{kind.dialect}**: {words}")
    return "\n".join(part for part in parts if part)


def _or(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names) or "other fields"


_PARAMETERS = {  # descriptions of path parameters
    "model": "One of the names in `/v1/models`.",
    "file_id": "The id of a file, as `/v1/files` lists them.",
    "batch_id": "The id of a batch, as `/v1/batches` lists them.",
}


def _parameter(name: str, example: str | None) -> Json:
    parameter: Json = {
        "name": name,
        "in": "path",
        "required": True,
        "description": "The rest of the path; it may contain slashes.",
        "schema": {"type": "string", "minLength": 1},
    }
    if name in _PARAMETERS:
        parameter["description"] = _PARAMETERS[name]
    return parameter if example is None else {**parameter, "example": example}


def _query_parameters(query: type[msgspec.Struct], schemas: _Schemas) -> list[Json]:
    """The parameters of a URL, as the fields of a type declare them."""
    properties = schemas.component(query)["properties"].items()
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": schema.get("description", ""),
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in properties
    ]


def _request_body(kinds: Sequence[Kind], schemas: _Schemas) -> Json:
    content: Json = {"schema": schemas.any(kind.body for kind in kinds)}
    examples = {
        kind.body.__name__: {"summary": kind.dialect, "value": dict(kind.example)}
        for kind in kinds
        if kind.body is not None and kind.example is not None
    }
    if examples:
        content["examples"] = examples
    return {"required": True, "content": {"application/json": content}}


def _answer(kinds: Sequence[Kind], schemas: _Schemas) -> Json:
    content: dict[str, Json] = {}
    if answers := [kind.answer for kind in kinds if kind.answer is not None]:
        content["application/json"] = {"schema": schemas.any(answers)}
    headers = _headers()
    for media in dict.fromkeys(media for kind in kinds for media in media_of(kind)):
        content[media] = (
            {} if media == _OCTETS else {"schema": _STREAM if media == _EVENTS else {"type": "string"}}
        )
        if media == _OCTETS:
            headers["metadata"] = _METADATA
    return {"description": "The answer.", "headers": headers} | ({"content": content} if content else {})


def media_of(kind: Kind) -> tuple[str, ...]:
    """The content types of an answer besides JSON."""
    if kind.media or kind.body is None:
        return kind.media
    fields, notes = (
        {each.encode_name: each.type for each in msgspec.structs.fields(kind.body)},
        limits(kind.body),
    )
    found = []
    if "stream" in fields and "stream" not in notes:
        found.append(_EVENTS)
    if "encoding_format" in fields and "bytes" in _choices(types.type_info(fields["encoding_format"])):
        found.append(_OCTETS)
    return tuple(found)


def _choices(kind: types.Type) -> set[Any]:
    if isinstance(kind, types.LiteralType):
        return set(kind.values)
    if isinstance(kind, types.UnionType):
        return {value for part in kind.types for value in _choices(part)}
    if isinstance(kind, types.Metadata):
        return _choices(kind.type)
    return {member.value for member in kind.cls} if isinstance(kind, types.EnumType) else set()


def _headers() -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADERS}


def _error_answers(route: RouteSpec, schemas: _Schemas) -> Json:
    """The errors of a route by status, each with examples in the shapes of its dialects."""
    by_status: dict[int, list[tuple[Kind, PenstockError, str]]] = {}
    for kind in kinds_of(route):
        for error, words in _errors(route):
            by_status.setdefault(kind.errors.status(error), []).append((kind, error, words))
    dialects = "-".join(
        tag.replace(" ", "") for tag in dict.fromkeys(kind.dialect for kind in kinds_of(route))
    )
    return {
        str(status): schemas.response(f"{dialects}-{status}", _error_answer(found, schemas))
        for status, found in sorted(by_status.items())
    }


def _errors(route: RouteSpec) -> Iterable[tuple[PenstockError, str]]:
    if route.form is not None or route.query is not None:
        return _ERRORS
    if route.admin:
        return (
            *(_ERRORS if route.body is not None else (_UNAUTHORIZED, _NOT_FOUND, _UNAVAILABLE)),
            _FORBIDDEN,
            _ORDER_FAILED,
        )
    if route.body is not None:
        return _ERRORS
    return (_UNAVAILABLE,) if route.open_to_all else (_UNAUTHORIZED, _NOT_FOUND, _UNAVAILABLE)


def _error_answer(found: Sequence[tuple[Kind, PenstockError, str]], schemas: _Schemas) -> Json:
    headers = _headers()
    if any(hasattr(error, "retry_after_s") for _, error, _ in found):
        headers["Retry-After"] = _RETRY_AFTER
    answer: Json = {"description": " ".join(dict.fromkeys(words for *_, words in found)), "headers": headers}
    known = [kind.errors.answer for kind, *_ in found if kind.errors.answer is not None]
    if known and len(known) == len(found):
        examples: dict[str, Json] = {}
        for kind, error, _ in found:
            examples.setdefault(f"{kind.dialect}: {error.code}", {"value": kind.errors.body(error)})
        answer["content"] = {"application/json": {"schema": schemas.any(known), "examples": examples}}
    return answer
