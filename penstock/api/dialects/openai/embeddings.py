"""The OpenAI dialect: `/v1/embeddings` and `/v1/models`."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.embeddings import EmbeddingsAnswer, embedding_items, vectors
from penstock.api.fields import ChunkFields
from penstock.api.routes import RouteSpec
from penstock.api.state import ModelState, ServedModel
from penstock.checkpoint.labels import nli_labels
from penstock.inputs.late import LateLayout
from penstock.inputs.tokenizer import TokenStyle
from penstock.types import Task


class EmbeddingsRequest(ChunkFields, kw_only=True):
    """Body of `POST /v1/embeddings`."""


async def embeddings(call: Call, body: EmbeddingsRequest) -> Reply:
    """Embed texts or token ids."""
    model = call.model(body)
    return await vectors(call, body, model, body.params(Task.EMBED), prefix="embd", items=embedding_items)


class ModelEntry(msgspec.Struct, kw_only=True):
    """A model that this server holds, under one of its names. The fields after `root` tell clients, such as
    the playground, what the model can do."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str  # its first name; the others are aliases. Of a LoRA adapter: the path that it was loaded from
    parent: str | None = None  # of a LoRA adapter: the model that it changes
    max_model_len: int
    tasks: list[Task]
    dimensions: int | None  # length of its vectors; None: it has no vectors
    is_embedder: bool  # its vectors are made to be compared
    similarity: str  # of its vectors: cosine, dot, euclidean or manhattan
    prompts: dict[str, str]  # name → text that precedes an input
    default_prompt_name: str | None
    adapters: list[str]  # a request may choose one of them
    requires_adapter: bool  # a request must choose one of them
    labels: list[str]  # of a classifier or token classifier
    reads_images: bool  # inputs may be images, or texts with images
    reads_pairs: bool  # it classifies pairs of texts: natural-language inference
    zero_shot: bool  # it classifies by labels in the request: /v1/zero-shot
    score_kind: Literal["cross", "list", "bi", "late"] | None  # how it ranks; None: it does not
    late: LateLayout | None  # of a late-interaction model
    has_chat_template: bool  # /v1/chat/completions works
    token_style: TokenStyle  # how its tokens write spaces, parts of words and bytes
    engines: int  # engines of the model (`--data-parallel-size`)
    engines_ready: int  # engines of the model that can serve
    state: ModelState  # a sleeping model wakes for a request; a starting or restarting one answers 503


class ModelsAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


async def models(call: Call) -> Reply:
    """List the models that this server holds, each under every name that it has."""
    data = [model_entry(name, call.find(name)) for name in call.names]
    return Reply(msgspec.json.encode(ModelsAnswer(data=data)))


async def model(call: Call) -> Reply:
    """Describe one model."""
    return Reply(msgspec.json.encode(model_entry(call.path_value, call.find(call.path_value))))


def model_entry(name: str, model: ServedModel) -> ModelEntry:
    spec, text, adapter = model.spec, model.text, model.adapter
    has_labels = not {Task.CLASSIFY, Task.TOKEN_CLASSIFY}.isdisjoint(spec.tasks)
    reads_pairs = Task.CLASSIFY in spec.tasks and nli_labels(spec.labels) is not None
    late = text.processor.late
    return ModelEntry(
        id=name,
        created=model.created_s,
        root=spec.name if adapter is None else adapter.launch.path,
        parent=None if adapter is None else spec.name,
        max_model_len=spec.max_model_len,
        tasks=list(spec.tasks),
        dimensions=spec.embed_dim,
        is_embedder=spec.tasks[0] is Task.EMBED and not spec.is_unmarked,
        similarity=spec.similarity,
        prompts=spec.prompts,
        default_prompt_name=spec.default_prompt_name,
        adapters=[*spec.adapters, *model.adapters] if adapter is None else [],
        requires_adapter=spec.requires_adapter and adapter is None,
        labels=list(spec.labels) if has_labels else [],
        reads_images=spec.images is not None,
        reads_pairs=reads_pairs,
        zero_shot=reads_pairs or Task.ZERO_SHOT in spec.tasks or spec.labels_images,
        score_kind=spec.score_kind,
        late=None if late is None else late.layout,
        has_chat_template=spec.generates and text.generation.chat.exists,
        token_style=text.tokenizer.token_style,
        engines=len(model.engines_ready),
        engines_ready=sum(model.engines_ready),
        state=model.state,
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
