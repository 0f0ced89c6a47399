"""The dialect of Infinity: `/embeddings`, `/models`, and its bodies on `/rerank` and `/classify`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.api.call import Call, Reply
from penstock.api.classify import classifier_task
from penstock.api.embeddings import vectors
from penstock.api.error_styles import ErrorStyle, OpenAIError, openai_error_body, status_400
from penstock.api.fields import ChunkFields, InputFields
from penstock.api.images import image_source, with_images
from penstock.api.ranking import RankFields, Scores, cut_by_default, score_documents
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import run
from penstock.api.state import ServedModel
from penstock.errors import NotPossible, PenstockError
from penstock.inputs.pair_options import PairOptions
from penstock.outputs.ranking import check_top_n, top_indices
from penstock.types import PoolingParams, Task

Modality = Literal["text", "image", "audio"]
ANY_MODEL = "default/not-specified"  # sent by its client if no model is named


class InfinityEmbeddingsRequest(ChunkFields, kw_only=True):
    """Body of `POST /embeddings`, and of `POST /v1/embeddings` with `modality`. As at Infinity, texts beyond
    the model's limit are cut, and `dimensions` of 0 keeps all."""

    modality: Modality = "text"

    def __post_init__(self) -> None:
        self.model = None if self.model == ANY_MODEL else self.model


class InfinityRerankRequest(RankFields, kw_only=True):
    """Body of `POST /rerank` in Infinity's dialect, recognised by `documents` with `raw_scores`. As at
    Infinity, texts beyond the model's limit are cut, and scores of cross-encoders are between 0 and 1 unless
    `raw_scores` is true."""

    query: str
    documents: list[str]
    return_documents: bool = False
    raw_scores: bool = False
    top_n: int | None = None

    def __post_init__(self) -> None:
        self.model = None if self.model == ANY_MODEL else self.model

    def options(self) -> PairOptions:
        return cut_by_default(super().options())


class InfinityClassifyRequest(InputFields, kw_only=True):
    """Body of `POST /classify` in Infinity's dialect, recognised by `raw_scores`. As at Infinity, texts
    beyond the model's limit are cut."""

    input: str | list[str]  # type: ignore[assignment]
    raw_scores: bool = False

    def __post_init__(self) -> None:
        self.model = None if self.model == ANY_MODEL else self.model


async def infinity_embeddings(call: Call, body: InfinityEmbeddingsRequest) -> Reply:
    """Embed texts, in the dialect of Infinity."""
    model = call.model(body)
    if body.modality == "audio":
        raise NotPossible(f"model {model.spec.name} embeds no audio", param="modality")
    if body.modality == "image":
        images = [body.input] if isinstance(body.input, str) else body.input
        sources = [(image_source(each, "input"),) for each in images]
        body.input = await with_images(call, model, sources, "input")
    body.dimensions = body.dimensions or None
    default_chunking = model.default_chunking
    if body.truncate_prompt_tokens is None and not body.wants_chunks and default_chunking != "mean":
        body.truncate_prompt_tokens = -1
    return await vectors(call, body, model, body.params(Task.EMBED), prefix="infinity", items=_items)


def _items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)]


async def infinity_rerank(call: Call, body: InfinityRerankRequest) -> Reply:
    """Rank documents from best to worst, in the dialect of Infinity."""
    check_top_n(body.top_n)
    model = call.model(body, may_truncate=False)
    spec = model.spec
    score = spec.score if spec.score_kind == "cross" else None
    is_logit = score is not None and (body.raw_scores or score.activation == "identity")
    activate = False if is_logit else body.use_activation
    result = await score_documents(
        call, body, model, body.query, body.documents, body.options(), activate=activate
    )
    began, scores = time.monotonic(), result.value
    if is_logit and not body.raw_scores:
        scores = _sigmoid(scores)
    rows = [
        {
            "relevance_score": scores[index],
            "index": index,
            "document": body.documents[index] if body.return_documents else None,
        }
        for index in top_indices(scores, body.top_n)
    ]
    head = {"object": "rerank", **result.head(body, "infinity")}
    reply = json_reply({**head, "results": rows, "usage": result.usage})
    record_phases(call, began)
    return reply


def _sigmoid(scores: Scores) -> Scores:
    logits = scores.astype(np.float64)
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits)), dtype=np.float32)  # never overflows


async def infinity_classify(call: Call, body: InfinityClassifyRequest) -> Reply:
    """Classify texts: all labels with their scores, best first, in the dialect of Infinity."""
    model = call.model(body)
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    params = PoolingParams(Task.CLASSIFY, normalize=False if body.raw_scores else None)
    result = await run(call, body, model, classifier_task(body.input, params, body.options()))
    began, labels = time.monotonic(), model.spec.labels
    rows = [
        [{"score": row[index], "label": labels[index]} for index in top_indices(row)] for row in result.value
    ]
    head = {"object": "classify", **result.head(body, "infinity")}
    reply = json_reply({**head, "data": rows, "usage": result.usage})
    record_phases(call, began)
    return reply


class InfinityStats(msgspec.Struct, kw_only=True):
    queue_fraction: float
    queue_absolute: int  # requests in flight
    results_pending: int
    batch_size: int  # rows of a request at most


class InfinityModel(msgspec.Struct, kw_only=True):
    id: str
    stats: InfinityStats
    object: Literal["model"] = "model"
    owned_by: Literal["infinity"] = "infinity"  # the only value that its client reads
    created: int
    backend: str = "penstock"
    capabilities: list[str]


class InfinityModelsAnswer(msgspec.Struct, kw_only=True):
    data: list[InfinityModel]
    object: Literal["list"] = "list"


async def infinity_models(call: Call) -> Reply:
    """List the models, in the dialect of Infinity."""
    state = call.state
    in_flight, limit = state.in_flight, state.config.max_concurrent_requests
    stats = InfinityStats(
        queue_fraction=in_flight / limit if limit else 0.0,
        queue_absolute=in_flight,
        results_pending=in_flight,
        batch_size=state.config.max_rows,
    )
    data = [_model(name, call.find(name), stats) for name in call.names]
    return Reply(msgspec.json.encode(InfinityModelsAnswer(data=data)))


def _model(name: str, model: ServedModel, stats: InfinityStats) -> InfinityModel:
    names = {Task.EMBED: "embed", Task.CLASSIFY: "classify"}
    capabilities = [word for task, word in names.items() if task in model.spec.tasks]
    if model.spec.score_kind is not None:
        capabilities.append("rerank")
    return InfinityModel(id=name, stats=stats, created=model.created_s, capabilities=capabilities)


class InfinityUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class InfinityEmbedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"]
    embedding: list[float] | str
    index: int
    chunks: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET  # with chunking: late


class InfinityEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[InfinityEmbedding]
    usage: InfinityUsage


class InfinityRanked(msgspec.Struct, kw_only=True):
    relevance_score: float
    index: int
    document: str | None


class InfinityRerankAnswer(msgspec.Struct, kw_only=True):
    object: Literal["rerank"]
    id: str
    created: int
    model: str
    results: list[InfinityRanked]
    usage: InfinityUsage


class InfinityLabel(msgspec.Struct, kw_only=True):
    score: float
    label: str


class InfinityClassifyAnswer(msgspec.Struct, kw_only=True):
    object: Literal["classify"]
    id: str
    created: int
    model: str
    data: list[list[InfinityLabel]]
    usage: InfinityUsage


def _error(error: PenstockError) -> dict[str, Any]:
    body = openai_error_body(error)
    if (status := status_400(error)) != error.status:
        body["error"] |= {"code": status, "type": "BadRequestError"}
    return body


def _is_rerank(fields: Mapping[str, msgspec.Raw]) -> bool:
    return "raw_scores" in fields and "documents" in fields


INFINITY_ERRORS = ErrorStyle(_error, status_400, OpenAIError)
_EXAMPLE = {"input": ["Water finds its level."], "modality": "text"}
ROUTES = (
    RouteSpec(
        "/embeddings",
        InfinityEmbeddingsRequest,
        infinity_embeddings,
        "Infinity",
        InfinityEmbeddingsAnswer,
        INFINITY_ERRORS,
        example=_EXAMPLE,
    ),
    RouteSpec("/models", None, infinity_models, "Infinity", InfinityModelsAnswer, INFINITY_ERRORS),
)
VARIANTS: VariantTable = (
    (
        "/v1/embeddings",
        Variant(
            ("modality",),
            InfinityEmbeddingsRequest,
            infinity_embeddings,
            "Infinity",
            INFINITY_ERRORS,
            InfinityEmbeddingsAnswer,
            example=_EXAMPLE,
        ),
    ),
    (
        "/rerank",
        Variant(
            ("raw_scores",),
            InfinityRerankRequest,
            infinity_rerank,
            "Infinity",
            INFINITY_ERRORS,
            InfinityRerankAnswer,
            example={"query": "water", "documents": ["a river", "a cat"], "raw_scores": False},
            claims=_is_rerank,
        ),
    ),
    (
        "/classify",
        Variant(
            ("raw_scores",),
            InfinityClassifyRequest,
            infinity_classify,
            "Infinity",
            INFINITY_ERRORS,
            InfinityClassifyAnswer,
            example={"input": ["Water finds its level."], "raw_scores": False},
        ),
    ),
)
