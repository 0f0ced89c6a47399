"""The dialect of Voyage: its fields on `/v1/embeddings` and `/v1/rerank`, and its routes for documents in
chunks and for mixed inputs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.documents import embed_documents, run_late
from penstock.api.error_styles import detail_errors
from penstock.api.fields import Refused
from penstock.api.images import Part, RawContent, image_source, num_pixels, with_images
from penstock.api.prompted import PromptedFields
from penstock.api.ranking import RankFields, score_documents
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import Result, run
from penstock.api.state import ServedModel
from penstock.errors import BadValue, NotPossible, shown
from penstock.inputs.chunks import ChunkOptions
from penstock.inputs.pair_options import PairOptions
from penstock.inputs.processor import InputOptions
from penstock.outputs.encoders import EncodingFormat, encode_rows
from penstock.outputs.ranking import top_indices
from penstock.tasks.embed import Embed
from penstock.types import OutputDtype, PoolingParams, Task

OutputType = Literal["float", "int8", "uint8", "binary", "ubinary"]
MAX_SEGMENTS = 1000  # in one input of texts and images


class VoyageFields(PromptedFields, kw_only=True):
    """How vectors are returned."""

    prompt: str | None = None
    output_dimension: int | None = None
    output_dtype: OutputType = "float"
    encoding_format: Literal["base64"] | None = None

    @property
    def dtype(self) -> OutputDtype:
        return OutputDtype.FLOAT32 if self.output_dtype == "float" else OutputDtype(self.output_dtype)

    def params(self) -> PoolingParams:
        return PoolingParams(Task.EMBED, self.output_dimension, dtype=self.dtype)

    def options(self, *, truncates: bool) -> InputOptions:
        return self.input_options(-1 if truncates else None, self.prompt)

    def encode(self, rows: list[Any]) -> list[Any]:
        encoding: EncodingFormat = "float" if self.encoding_format is None else "base64"
        return encode_rows(rows, encoding, self.dtype, "little")


class VoyageEmbeddingsRequest(VoyageFields, kw_only=True):
    """Body of `POST /v1/embeddings` in Voyage's dialect, recognised by `truncation`, `output_dtype` or
    `output_dimension`. As at Voyage, texts beyond the model's limit are cut unless `truncation` is false."""

    input: str | list[str]
    truncation: bool = True


class VoyageRerankRequest(RankFields, kw_only=True):
    """Body of `POST /v1/rerank` in Voyage's dialect, recognised by `truncation` or `top_k`. As at Voyage,
    texts beyond the model's limit are cut unless `truncation` is false."""

    query: str
    documents: list[str]
    top_k: int | None = None
    return_documents: bool = False
    truncation: bool = True

    def options(self) -> PairOptions:
        options = super().options()
        cuts = self.truncation and self.truncate_prompt_tokens is None
        return replace(options, truncate_prompt_tokens=-1) if cuts else options


class ContextualizedRequest(VoyageFields, kw_only=True):
    """Body of `POST /v1/contextualizedembeddings`: documents as lists of their chunks."""

    inputs: list[str | list[str]]
    enable_auto_chunking: bool = False
    chunk_size: int | None = None
    chunk_overlap: Annotated[int | None, Refused("chunks do not overlap", accepts=(None, 0))] = None


class Segment(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of an input."""

    type: Literal["text", "image_url", "image_base64", "video_url", "video_base64"]
    text: str | None = None
    image_url: Any = None
    image_base64: Any = None
    video_url: Any = None
    video_base64: Any = None


class MixedInput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    content: list[Segment]


class MultimodalRequest(VoyageFields, kw_only=True):
    """Body of `POST /v1/multimodalembeddings`: texts and images in their order. Videos are refused."""

    inputs: list[MixedInput]
    truncation: bool = True
    output_encoding: Literal["base64"] | None = None


async def voyage_embeddings(call: Call, body: VoyageEmbeddingsRequest) -> Reply:
    """Embed texts, in the dialect of Voyage."""
    model = call.model(body)
    result = await _embed(call, body, model, body.input, "input", truncates=body.truncation)
    return _reply(call, body, result, {"total_tokens": result.request.num_tokens})


async def multimodal_embeddings(call: Call, body: MultimodalRequest) -> Reply:
    """Embed inputs of texts and images, in the dialect of Voyage."""
    model = call.model(body)
    body.encoding_format = body.encoding_format or body.output_encoding
    if not body.inputs:
        raise BadValue("inputs is empty; give at least one", param="inputs")
    inputs: list[Any] = [_content(each, index) for index, each in enumerate(body.inputs)]
    if any(isinstance(each, tuple) for each in inputs):
        inputs = await with_images(call, model, inputs, "inputs")
    result = await _embed(call, body, model, inputs, "inputs", truncates=body.truncation)
    num_tokens, images = result.request.num_tokens, result.request.images
    num_image_tokens = 0 if images is None else int(images.num_tokens.sum())
    usage = {
        "text_tokens": num_tokens - num_image_tokens,
        "image_pixels": num_pixels(inputs),
        "video_pixels": 0,
        "total_tokens": num_tokens,
    }
    return _reply(call, body, result, usage)


def _content(given: MixedInput, index: int) -> str | RawContent:
    """The texts of an input joined, or its texts and images in their order."""
    if not 1 <= len(given.content) <= MAX_SEGMENTS:
        raise BadValue(
            f"inputs {index} has {len(given.content)} parts; give 1 to {MAX_SEGMENTS}", param="inputs"
        )
    parts: list[Part] = []
    for part in given.content:
        if part.type.startswith("video"):
            raise NotPossible(
                f"inputs {index} has a part of type {part.type}; videos are not read", param="inputs"
            )
        if part.type == "text" and part.text is None:
            raise BadValue(f"inputs {index} has a part of type text without `text`", param="inputs")
        image = part.image_url if part.type == "image_url" else part.image_base64
        parts.append(str(part.text) if part.type == "text" else image_source(image, "inputs"))
    is_text = all(isinstance(part, str) for part in parts)
    return "".join(map(str, parts)) if is_text else tuple(parts)


async def _embed(
    call: Call, body: VoyageFields, model: ServedModel, texts: Any, name: str, *, truncates: bool
) -> Result[Any]:
    task = Embed(inputs=texts, params=body.params(), options=body.options(truncates=truncates))
    return await run(call, body, model, task, rows_name=name)


def _reply(call: Call, body: VoyageFields, result: Result[Any], usage: dict[str, int]) -> Reply:
    began = time.monotonic()
    data = _items(body.encode(list(result.value)))
    reply = json_reply({"object": "list", "data": data, "model": result.model.name, "usage": usage})
    record_phases(call, began)
    return reply


def _items(rows: list[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)]


async def contextualized_embeddings(call: Call, body: ContextualizedRequest) -> Reply:
    """Embed the chunks of documents, each with its document as context."""
    model = call.model(body)
    if not body.inputs or not all(body.inputs):
        raise BadValue("inputs needs at least one document, each with at least one chunk", param="inputs")
    if body.enable_auto_chunking:
        result, texts = await _auto_chunks(call, body, model)
    else:
        _refuse_chunk_size(body)
        documents = [[each] if isinstance(each, str) else each for each in body.inputs]
        options = body.options(truncates=False)
        result = await embed_documents(call, body, model, documents, body.params(), options, name="inputs")
        texts = None
    return _documents_reply(call, body, result, texts)


def _refuse_chunk_size(body: ContextualizedRequest) -> None:
    if body.chunk_size is not None:
        raise BadValue("chunk_size needs enable_auto_chunking: true", param="chunk_size")


async def _auto_chunks(
    call: Call, body: ContextualizedRequest, model: ServedModel
) -> tuple[Result[Any], list[list[str]]]:
    """The vectors of each document's chunks of `chunk_size` tokens, and their texts."""
    documents = []
    for index, given in enumerate(body.inputs):
        chunks = [given] if isinstance(given, str) else given
        if len(chunks) != 1:
            raise BadValue(
                f"inputs {index} has {len(chunks)} chunks; enable_auto_chunking takes one text a document",
                param="inputs",
            )
        documents.append(chunks[0])
    chunking = ChunkOptions(chunking="late", chunk_size=body.chunk_size)
    options = body.options(truncates=False)
    found = await run_late(call, body, model, documents, body.params(), options, chunking)
    texts = [
        _parts(document, [] if each.chars is None else each.chars[:, 0].tolist())
        for document, each in zip(documents, found.value, strict=True)
    ]
    return Result(found.model, found.request, found.output, [each.vectors for each in found.value]), texts


def _parts(document: str, begins: list[int]) -> list[str]:
    """Split the document where its chunks begin. The parts together are the whole document."""
    edges = [0, *begins[1:], len(document)]
    return [document[begin:end] for begin, end in itertools.pairwise(edges)]


def _documents_reply(
    call: Call, body: ContextualizedRequest, result: Result[Any], texts: list[list[str]] | None
) -> Reply:
    began = time.monotonic()
    rows = iter(body.encode([row for vectors in result.value for row in vectors]))
    documents = [_items([next(rows) for _ in vectors]) for vectors in result.value]
    for items, parts in zip(documents, texts or (), strict=False):
        for item, part in zip(items, parts, strict=True):
            item["text"] = part
    data = [{"object": "list", "data": each, "index": index} for index, each in enumerate(documents)]
    usage = {"total_tokens": result.request.num_tokens}
    reply = json_reply({"object": "list", "data": data, "model": result.model.name, "usage": usage})
    record_phases(call, began)
    return reply


async def voyage_rerank(call: Call, body: VoyageRerankRequest) -> Reply:
    """Rank documents from best to worst, in the dialect of Voyage."""
    if body.top_k is not None and body.top_k < 1:
        raise BadValue(f"top_k is {shown(body.top_k)}; it must be at least 1", param="top_k")
    model = call.model(body, may_truncate=False)
    result = await score_documents(
        call, body, model, body.query, body.documents, body.options(), activate=body.use_activation
    )
    began, scores = time.monotonic(), result.value
    data: list[dict[str, Any]] = []
    for index in top_indices(scores, body.top_k):
        row = {"relevance_score": scores[index], "index": index}
        data.append({**row, "document": body.documents[index]} if body.return_documents else row)
    usage = {"total_tokens": result.request.num_tokens}
    reply = json_reply({"object": "list", "data": data, "model": result.model.name, "usage": usage})
    record_phases(call, began)
    return reply


class VoyageUsage(msgspec.Struct, kw_only=True):
    total_tokens: int


class VoyageEmbedding(msgspec.Struct, kw_only=True):
    object: Literal["embedding"]
    embedding: list[float] | str  # a string with encoding_format: base64
    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET  # of a chunk, with enable_auto_chunking


class VoyageEmbeddingsAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[VoyageEmbedding]
    model: str
    usage: VoyageUsage


class VoyageDocument(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[VoyageEmbedding]
    index: int


class ContextualizedAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[VoyageDocument]
    model: str
    usage: VoyageUsage


class MultimodalUsage(msgspec.Struct, kw_only=True):
    text_tokens: int
    image_pixels: int
    video_pixels: int
    total_tokens: int


class MultimodalAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[VoyageEmbedding]
    model: str
    usage: MultimodalUsage


class VoyageRanked(msgspec.Struct, kw_only=True):
    relevance_score: float
    index: int
    document: str | msgspec.UnsetType = msgspec.UNSET


class VoyageRerankAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[VoyageRanked]
    model: str
    usage: VoyageUsage


EMBEDDING_MARKERS = ("truncation", "output_dtype", "output_dimension")
RERANK_MARKERS = ("truncation", "top_k")


def _is_rerank(fields: Mapping[str, msgspec.Raw]) -> bool:
    return any(name in fields for name in RERANK_MARKERS) and "top_n" not in fields


_NAMES = {"dimensions": "output_dimension"}
VOYAGE_ERRORS = detail_errors("set truncation to true", _NAMES)
DOCUMENT_ERRORS = detail_errors(
    "divide the document", _NAMES
)  # a chunk that is cut away would have no vector
ROUTES = (
    RouteSpec(
        "/v1/contextualizedembeddings",
        ContextualizedRequest,
        contextualized_embeddings,
        "Voyage",
        ContextualizedAnswer,
        DOCUMENT_ERRORS,
        example={"inputs": [["Water finds its level.", "It also finds the way down."]]},
    ),
    RouteSpec(
        "/v1/multimodalembeddings",
        MultimodalRequest,
        multimodal_embeddings,
        "Voyage",
        MultimodalAnswer,
        VOYAGE_ERRORS,
        example={"inputs": [{"content": [{"type": "text", "text": "Water finds its level."}]}]},
    ),
)
VARIANTS: VariantTable = (
    (
        "/v1/embeddings",
        Variant(
            EMBEDDING_MARKERS,
            VoyageEmbeddingsRequest,
            voyage_embeddings,
            "Voyage",
            VOYAGE_ERRORS,
            VoyageEmbeddingsAnswer,
            example={"input": ["Water finds its level."], "truncation": True, "output_dtype": "int8"},
        ),
    ),
    (
        "/v1/rerank",
        Variant(
            RERANK_MARKERS,
            VoyageRerankRequest,
            voyage_rerank,
            "Voyage",
            VOYAGE_ERRORS,
            VoyageRerankAnswer,
            example={"query": "water", "documents": ["a river", "a cat"], "top_k": 1},
            claims=_is_rerank,
        ),
    ),
)
