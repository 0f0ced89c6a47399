"""The dialect of Jina: its fields on `/v1/embeddings` and `/v1/rerank`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from penstock.api.call import Call, Reply
from penstock.api.documents import embed_documents
from penstock.api.embeddings import vectors
from penstock.api.error_styles import detail_errors
from penstock.api.fields import ChunkFields, Refused, agreed
from penstock.api.images import RawContent, image_source, with_images
from penstock.api.ranking import RerankRequest, ranked_rows, returned_documents, run_ranking
from penstock.api.replies import json_reply, record_phases, vector_reply
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import Result
from penstock.api.state import ServedModel
from penstock.errors import BadValue, NotPossible, shown
from penstock.inputs.pair_options import PairOptions
from penstock.inputs.prompts import has_prompt_for
from penstock.types import OutputDtype, Task

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
_INPUT_TYPES = {  # for Jina's tasks, if the model has prompts instead of adapters
    "retrieval.query": "query",
    "retrieval.passage": "document",
    "classification": "classification",
    "separation": "clustering",
    "clustering": "clustering",
}
_KINDS = {
    "query": "query",
    "passage": "document",
}  # suffixes after the name of an adapter, as in retrieval.query


class JinaInput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One input as an object."""

    text: str | None = None
    image: str | None = None  # a data URI, base64, the id of an uploaded file, or an allowed URL
    pdf: Any = None


class JinaEmbeddingsRequest(ChunkFields, kw_only=True):
    """Body of `POST /v1/embeddings` in Jina's dialect, recognised by one of its fields `task`,
    `late_chunking`, `embedding_type`, `truncate`, `return_multivector`, `normalized`, or by inputs that are
    objects. It has all fields of `EmbeddingsRequest` too."""

    input: str | JinaInput | list[str | int | list[int] | JinaInput]  # type: ignore[assignment]
    task: str | None = None
    late_chunking: bool = False
    embedding_type: EmbeddingType | list[EmbeddingType] | None = None
    truncate: bool | None = None
    return_multivector: bool = False
    normalized: bool | None = None
    return_tokenized_input: Annotated[bool, Refused("/tokenize shows the tokens of a text")] = False


class JinaRerankRequest(RerankRequest, kw_only=True):
    """Body of `POST /v1/rerank` in Jina's dialect, recognised by `return_embeddings` or `truncate`. Any other
    body is the route's own. As at Jina, texts beyond the model's limit are cut, and documents are returned,
    unless the body says otherwise."""

    query: str | JinaInput  # type: ignore[assignment]
    return_documents: bool = True
    return_embeddings: Annotated[bool, Refused("ask /v1/embeddings for vectors")] = False
    truncate: bool | None = None
    truncation: bool | None = None

    def options(self) -> PairOptions:
        options = super().options()
        cuts = self.truncate is not False and self.truncation is not False
        if not cuts or self.truncate_prompt_tokens is not None:
            return options
        return replace(options, truncate_prompt_tokens=-1)


async def jina_embeddings(call: Call, body: JinaEmbeddingsRequest) -> Reply:
    """Embed texts, in the dialect of Jina."""
    model = call.model(body, may_truncate=body.truncate is None and not body.late_chunking)
    _settle(body, model)
    body.input = await _prepared(call, model, body.input)
    if body.late_chunking:
        return await _late_chunking(call, body, model)
    if body.return_multivector:
        params = body.params(Task.TOKEN_EMBED)
        return await vectors(call, body, model, params, prefix="embd", items=_multivector_items)
    return await vectors(call, body, model, body.params(Task.EMBED), prefix="embd", items=_items)


async def _late_chunking(call: Call, body: JinaEmbeddingsRequest, model: ServedModel) -> Reply:
    """Embed the inputs as chunks of one document, with one vector per input."""
    if body.return_multivector:
        raise BadValue("late_chunking and return_multivector exclude each other", param="return_multivector")
    if body.wants_chunks:
        raise BadValue("late_chunking and chunking exclude each other; leave one out", param="chunking")
    if body.truncate or body.truncate_prompt_tokens is not None:
        raise BadValue(
            "late_chunking needs the whole document: a chunk that is cut away would have no vector; leave "
            "truncate out",
            param="truncate",
        )
    chunks = [body.input] if isinstance(body.input, str) else body.input
    if not isinstance(chunks, list) or not all(isinstance(chunk, str) for chunk in chunks):
        raise BadValue("late_chunking takes texts, not token ids", param="input")
    if not chunks:
        raise BadValue("input is empty; give at least one text", param="input")
    texts = [str(chunk) for chunk in chunks]
    params = body.params(Task.EMBED)
    found = await embed_documents(call, body, model, [texts], params, body.options(), name="input")
    result = Result(found.model, found.request, found.output, np.concatenate(found.value))
    return vector_reply(call, body, result, prefix="embd", items=_items)


def _items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]


def _multivector_items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embeddings": row} for i, row in enumerate(rows)]


def _settle(body: JinaEmbeddingsRequest, model: ServedModel) -> None:
    """Translate Jina's fields into the common fields of embeddings."""
    body.input = _texts(body.input, model)
    body.normalize = agreed(body.normalize, body.normalized)
    if body.truncate and body.truncate_prompt_tokens is None and not body.late_chunking:
        body.truncate_prompt_tokens = -1
    if body.embedding_type is not None:
        kind = _one_type(body.embedding_type)
        body.encoding_format = "base64" if kind == "base64" else "float"
        body.embed_dtype = OutputDtype(kind) if kind in ("binary", "ubinary") else OutputDtype.FLOAT32
    if body.task is not None:
        choose_task(body, body.task, model)


def _one_type(given: EmbeddingType | list[EmbeddingType]) -> EmbeddingType:
    kinds = [given] if isinstance(given, str) else given
    if len(kinds) != 1:
        raise BadValue("embedding_type takes one type a request", param="embedding_type")
    return kinds[0]


def _texts(given: Any, model: ServedModel) -> Any:
    """The inputs, with objects replaced by their texts. Objects with images become contents."""
    if isinstance(given, JinaInput):
        given = [given]
    if isinstance(given, str):
        return given
    return [input_content(each, "input", model) if isinstance(each, JinaInput) else each for each in given]


async def _prepared(call: Call, model: ServedModel, inputs: Any) -> Any:
    """The inputs with their images prepared, if they have any."""
    if isinstance(inputs, str) or not any(isinstance(each, tuple) for each in inputs):
        return inputs
    return await with_images(call, model, inputs, "input")


def input_content(given: JinaInput, name: str, model: ServedModel) -> str | RawContent:
    """The text of an object, or its image before its text."""
    if given.image is None:
        return input_text(given, name, model)
    if given.pdf is not None:
        raise NotPossible("pages of `pdf` are not read here; send images of them", param=name)
    image = image_source(given.image, name)
    return (image,) if given.text is None else (image, given.text)


def input_text(given: JinaInput, name: str, model: ServedModel) -> str:
    other = next((kind for kind in ("image", "pdf") if getattr(given, kind) is not None), None)
    if other is not None:
        raise NotPossible(f"model {model.spec.name} reads texts, not `{other}`", param=name)
    if given.text is None:
        raise BadValue(f"{name} has an object without `text` or `image`", param=name)
    return given.text


def choose_task(body: JinaEmbeddingsRequest, task: str, model: ServedModel) -> None:
    """Choose the adapter or the prompt of a task."""
    spec = model.spec
    if body.adapter is not None and body.adapter != task:
        raise BadValue("task and adapter contradict each other", param="task")
    adapter, _, kind = task.rpartition(".")
    if task in spec.adapters:
        body.adapter = task
    elif adapter in spec.adapters and kind in _KINDS:
        body.adapter, body.input_type = adapter, _KINDS[kind]
    elif task in spec.prompts:
        body.prompt_name = task
    elif (input_type := _INPUT_TYPES.get(task)) is not None and has_prompt_for(spec, input_type):
        body.input_type = input_type
    else:
        raise NotPossible(_why_no_task(task, model), param="task")


def _why_no_task(task: str, model: ServedModel) -> str:
    spec = model.spec
    names = spec.adapters or tuple(spec.prompts)
    if not names:
        return f"model {spec.name} has no adapters and no prompts that a task could choose; leave task out"
    what = "adapter" if spec.adapters else "prompt"
    return f"model {spec.name} has no {what} for task {shown(task)}; it has: {', '.join(names)}"


async def jina_rerank(call: Call, body: JinaRerankRequest) -> Reply:
    """Rank documents from best to worst, in the dialect of Jina."""
    model = call.model(body, may_truncate=False)
    if isinstance(body.query, JinaInput):
        content = input_content(body.query, "query", model)
        image = body.query.image
        body.query = content if isinstance(content, str) else {"image": image, "text": body.query.text}  # type: ignore[assignment]
    documents = returned_documents(body)
    result = await run_ranking(call, body, model)
    began = time.monotonic()
    rows = ranked_rows(body, result.value, documents)
    reply = json_reply({"model": model.name, "object": "list", "usage": result.usage, "results": rows})
    record_phases(call, began)
    return reply


def _has_objects(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the input is an object, or a list that begins with one."""
    start = bytes(memoryview(fields.get("input", msgspec.Raw(b"")))[:64]).translate(None, b" \t\r\n")
    return start.startswith((b"{", b"[{"))


EMBEDDING_MARKERS = (
    "task",
    "late_chunking",
    "embedding_type",
    "truncate",
    "return_multivector",
    "normalized",
    "return_tokenized_input",
)
RERANK_MARKERS = ("return_embeddings", "truncate")


def _is_embedding(fields: Mapping[str, msgspec.Raw]) -> bool:
    return any(name in fields for name in EMBEDDING_MARKERS) or _has_objects(fields)


def _is_rerank(fields: Mapping[str, msgspec.Raw]) -> bool:
    cuts = "truncation" in fields and "top_n" in fields
    return cuts or any(name in fields for name in RERANK_MARKERS)


class JinaUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class JinaEmbedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str | msgspec.UnsetType = msgspec.UNSET
    embeddings: list[list[float]] | str | msgspec.UnsetType = msgspec.UNSET  # with return_multivector
    chunks: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET  # with chunking: late


class JinaEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    id: str
    created: int
    model: str
    data: list[JinaEmbedding]
    usage: JinaUsage


class JinaRanked(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class JinaRerankAnswer(msgspec.Struct, kw_only=True):
    model: str
    object: Literal["list"]
    usage: JinaUsage
    results: list[JinaRanked]


JINA_ERRORS = detail_errors("set truncate to true")
ROUTES: tuple[RouteSpec, ...] = ()
VARIANTS: VariantTable = (
    (
        "/v1/embeddings",
        Variant(
            EMBEDDING_MARKERS,
            JinaEmbeddingsRequest,
            jina_embeddings,
            "Jina",
            JINA_ERRORS,
            JinaEmbeddingsAnswer,
            example={"input": [{"text": "Water finds its level."}], "embedding_type": "float"},
            claims=_is_embedding,
        ),
    ),
    (
        "/v1/rerank",
        Variant(
            RERANK_MARKERS,
            JinaRerankRequest,
            jina_rerank,
            "Jina",
            JINA_ERRORS,
            JinaRerankAnswer,
            example={"query": "water", "documents": ["a river", "a cat"], "truncate": True},
            claims=_is_rerank,
        ),
    ),
)
