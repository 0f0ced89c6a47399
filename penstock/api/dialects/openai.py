"""The OpenAI dialect: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.api.embeddings import EmbeddingsAnswer, embedding_items, vectors
from penstock.api.endpoint import Call, Reply
from penstock.api.fields import ChunkFields
from penstock.api.routes import RouteSpec
from penstock.api.state import ServedModel
from penstock.types import Task


class EmbeddingsRequest(ChunkFields, kw_only=True):
    """Body of `POST /v1/embeddings`."""


async def embeddings(call: Call, body: EmbeddingsRequest) -> Reply:
    """Embed texts or token ids."""
    model = call.model(body)
    return await vectors(call, body, model, body.params(Task.EMBED), prefix="embd", items=embedding_items)


class ModelEntry(msgspec.Struct, kw_only=True):
    """A model that this server holds, under one of its names."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str  # its first name; the others are aliases
    max_model_len: int
    tasks: list[Task]
    dimensions: int | None  # of its vectors; None: it has none


class ModelsAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


async def models(call: Call) -> Reply:
    """List the models that this server holds, each under every name that it has."""
    state = call.state
    data = [model_entry(name, state.find(name)[0]) for name in state.names]
    return Reply(msgspec.json.encode(ModelsAnswer(data=data)))


async def model(call: Call) -> Reply:
    """Describe one model."""
    found, _ = call.state.find(call.path_value)
    return Reply(msgspec.json.encode(model_entry(call.path_value, found)))


def model_entry(name: str, model: ServedModel) -> ModelEntry:
    spec = model.spec
    return ModelEntry(
        id=name,
        created=model.created_s,
        root=spec.name,
        max_model_len=spec.max_model_len,
        tasks=list(spec.tasks),
        dimensions=spec.embed_dim,
    )


ROUTES = (
    RouteSpec(
        "/v1/embeddings",
        EmbeddingsRequest,
        embeddings,
        "OpenAI",
        EmbeddingsAnswer,
        example={"input": ["Water finds its level."]},
    ),
    RouteSpec("/v1/models", None, models, "OpenAI", ModelsAnswer),
    RouteSpec("/v1/models/{model}", None, model, "OpenAI", ModelEntry),
)
