"""`POST /invocations`, the one route that SageMaker calls: the body decides which other route answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.decoding import UNDECODABLE, RouteDecoder
from penstock.api.endpoint import Endpoint
from penstock.api.metrics import ApiMetrics
from penstock.api.nesting import check_nesting
from penstock.api.routes import RouteSpec
from penstock.api.state import ServedModel, ServerState
from penstock.errors import BadValue
from penstock.types import Task

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAME = msgspec.json.Decoder(str | None)


class InvocationRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /invocations`: the body of any other route, recognised by its fields."""

    model: str | None = None
    messages: list[Any] | None = None
    prompt: Any = None
    input: Any = None
    inputs: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None


async def invocations(call: Call, body: InvocationRequest) -> Reply:
    """Answer the body of any other route, as SageMaker sends it."""
    raise NotImplementedError("an InvocationEndpoint hands the body to another route")


INVOCATIONS = RouteSpec(
    "/invocations",
    InvocationRequest,
    invocations,
    "vLLM",
    Any,
    example={"input": ["Water finds its level."]},
)
_POOLING = {Task.EMBED: "/v1/embeddings", Task.CLASSIFY: "/classify"}


def path_of(fields: Mapping[str, Any], model: ServedModel) -> str | None:
    """The route for a body with these fields; None if there is none."""
    tasks = model.spec.tasks
    if "messages" in fields and Task.GENERATE in tasks and "task" not in fields:
        return "/v1/chat/completions"
    if "input" in fields or "messages" in fields:
        found = None if "task" in fields else _first(_POOLING, tasks)
        return found or "/pooling"
    if "inputs" in fields:
        return "/"  # TEI's and Hugging Face's bodies: the model's own task
    if "prompt" in fields:
        return "/v1/completions"
    if "query" in fields:
        return "/rerank"
    return "/score" if any(name in fields for name in ("queries", "text_1", "data_1")) else None


def _first(paths: Mapping[Task, str], tasks: Sequence[Task]) -> str | None:
    return next((paths[task] for task in tasks if task in paths), None)


class InvocationEndpoint(Endpoint):
    """Hands each body to the endpoint of another route."""

    def __init__(
        self, state: ServerState, metrics: ApiMetrics, route: RouteSpec, others: Sequence[Endpoint]
    ) -> None:
        super().__init__(state, metrics, route)
        self._others = {each.path: each for each in others if each.route.body is not None}

    def _work(self, call: Call, decoder: RouteDecoder, raw: bytes | bytearray) -> Awaitable[Any]:
        other = self._find(call, raw)
        assert other.decoder is not None
        call.errors, call.use = other.errors, other.use
        return other._work(call, other.decoder, raw)

    def _find(self, call: Call, raw: bytes | bytearray) -> Endpoint:
        check_nesting(raw)
        try:
            fields = _FIELDS.decode(raw)
            name = _NAME.decode(fields.get("model", b"null"))
        except UNDECODABLE as error:
            raise BadValue(f"the body is not a valid JSON object: {error}") from None
        model = call.find(name)
        found = self._others.get(path_of(fields, model) or "")
        if found is None:
            raise BadValue(
                f"the body fits no route of model {model.spec.name}; give one of messages, prompt, input, "
                "query and documents, or queries and documents"
            )
        return found
