"""The OpenAI dialect: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from penstock.api.embeddings import vectors
from penstock.api.endpoint import Call, Reply
from penstock.api.fields import ChunkFields
from penstock.errors import BadValue
from penstock.inputs.processor import InputOptions
from penstock.types import Task


class EmbeddingsRequest(ChunkFields, kw_only=True):
    """Body of `POST /v1/embeddings`. Clients of Jina's models call the `adapter` field `task`."""

    task: str | None = None

    def options(self) -> InputOptions:
        if self.task is None:
            return super().options()
        if self.adapter is not None and self.adapter != self.task:
            raise BadValue("task and adapter contradict each other", param="task")
        return replace(super().options(), adapter=self.task)


async def embeddings(call: Call, body: EmbeddingsRequest) -> Reply:
    """Embed texts or token ids."""
    model = call.state.model(body.model)
    return await vectors(call, body, model, body.params(Task.EMBED), prefix="embd", items=embedding_items)


def embedding_items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]


async def models(call: Call) -> Reply:
    """List the models that this server holds."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "penstock",
            "max_model_len": model.spec.max_model_len,
            "tasks": [task.value for task in model.spec.tasks],
            "dimensions": model.spec.embed_dim,
        }
        for name, model in call.state.models.items()
    ]
    return Reply(orjson.dumps({"object": "list", "data": data}))
