"""The dialect of Cohere: embeddings and rankings, in its versions 1 and 2.

As at Cohere, texts beyond the model's limit are cut at their end unless a request says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from penstock.api.call import Call, Reply
from penstock.api.dialects.cohere.shared import (
    CohereMeta,
    Truncate,
    cohere_errors,
    meta,
    refusing_longer,
    truncating,
)
from penstock.api.embeddings import EmbeddingType, embedding_dtypes, embeddings_by_type
from penstock.api.fields import Refused, RequestFields
from penstock.api.images import RawContent, content_part, image_source, with_images
from penstock.api.ranking import (
    RerankRequest,
    cut_by_default,
    ranked_rows,
    returned_documents,
    run_ranking,
    search_units,
)
from penstock.api.replies import json_reply, record_phases
from penstock.api.routes import RouteSpec, Variant, VariantTable
from penstock.api.run import Result, run
from penstock.checkpoint.spec import ModelSpec
from penstock.errors import BadValue, shown
from penstock.inputs.pair_options import PairOptions
from penstock.inputs.processor import InputOptions
from penstock.tasks.embed_types import Columns, EmbedInTypes
from penstock.types import PoolingParams, Task

_KNOWN_TYPES = ("search_document", "search_query", "classification", "clustering")


# --- embeddings ---------------------------------------------------------------------------------------------


class EmbedPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of an input."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: dict[str, Any] | None = None


class EmbedInput(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An input of one text, or of texts and images in their order."""

    content: list[EmbedPart]


class CohereEmbedRequest(RequestFields, kw_only=True):
    """Body of `POST /v1/embed` and `/v2/embed`."""

    takes_own_adapter: ClassVar[bool] = True  # `adapter` may name one of the checkpoint's own
    texts: list[str] | None = None
    inputs: list[EmbedInput] | None = None
    images: list[str] | None = None  # data URIs
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Truncate = "END"
    max_tokens: int | None = None
    output_dimension: int | None = None

    @property
    def given(self) -> str:
        """The field that has the inputs."""
        given = [name for name in ("texts", "inputs", "images") if getattr(self, name)]
        if len(given) > 1:
            raise BadValue("give either texts, inputs or images", param=given[1])
        if given:
            return given[0]
        empty = next((name for name in ("texts", "inputs", "images") if getattr(self, name) == []), None)
        if empty is not None:
            raise BadValue(f"{empty} is empty; give at least one", param=empty)
        raise BadValue("give either texts or inputs", param="texts")

    def contents(self) -> list[str | RawContent]:
        """The inputs: texts, or texts and images in their order."""
        name = self.given
        if name == "texts":
            return list(self.texts or ())
        if name == "images":
            return [(image_source(each, "images"),) for each in self.images or ()]
        return [_input_content(each, at) for at, each in enumerate(self.inputs or ())]

    def kinds(self) -> list[EmbeddingType]:
        """The requested types of embeddings, without duplicates."""
        return list(dict.fromkeys(self.embedding_types or ("float",)))

    def limit(self, spec: ModelSpec) -> int:
        """The maximum number of tokens that are embedded per text."""
        if self.max_tokens is None:
            return spec.max_model_len
        if self.max_tokens < 1:
            raise BadValue(
                f"max_tokens is {shown(self.max_tokens)}; it must be at least 1", param="max_tokens"
            )
        return min(self.max_tokens, spec.max_model_len)

    def options(self, spec: ModelSpec) -> InputOptions:
        options = replace(truncating(self.truncate, self.limit(spec)), adapter=self.adapter)
        given = self.input_type
        if given == "":
            raise BadValue(
                f"input_type is empty; use {', '.join(_KNOWN_TYPES)}, image, or leave it out",
                param="input_type",
            )
        if given == "image":
            if self.given == "texts":
                raise BadValue(
                    f"input_type 'image' goes with images or inputs; for texts use {', '.join(_KNOWN_TYPES)}",
                    param="input_type",
                )
            return options
        if given is not None and given in spec.prompts and given not in _KNOWN_TYPES:
            return replace(options, prompt_name=given)
        return replace(options, input_type=given)


def _input_content(given: EmbedInput, index: int) -> str | RawContent:
    """The only text of an input, or its texts and images. Refuses several texts, because no model defines how
    to join them."""
    if any(part.type != "text" for part in given.content):
        parts = [msgspec.to_builtins(part) for part in given.content]
        return tuple(content_part(part, "inputs") for part in parts)
    if len(given.content) != 1 or (text := given.content[0].text) is None:
        raise BadValue(
            f"inputs {index} must have exactly one part with a text; join several texts into one",
            param="inputs",
        )
    return text


async def embed_v1(call: Call, body: CohereEmbedRequest) -> Reply:
    """Embed texts, in the shape of Cohere's v1 API: plain vectors unless `embedding_types` is given."""
    texts = body.contents()
    kinds = body.kinds()
    result = await _embed(call, body, texts, kinds)
    began = time.monotonic()
    by_type = embeddings_by_type(kinds, result.value)
    content = {
        "response_type": "embeddings_by_type" if body.embedding_types else "embeddings_floats",
        "id": result.head(body, "embd")["id"],
        "embeddings": by_type if body.embedding_types else by_type["float"],
        "texts": texts if body.texts is not None else [],
        "meta": meta("1", **_billed(texts, result)),
    }
    reply = json_reply(content)
    record_phases(call, began)
    return reply


async def embed_v2(call: Call, body: CohereEmbedRequest) -> Reply:
    """Embed texts, in the shape of Cohere's v2 API: a list of vectors for each of `embedding_types`."""
    texts = body.contents()
    kinds = body.kinds()
    result = await _embed(call, body, texts, kinds)
    began = time.monotonic()
    content = {
        "response_type": "embeddings_by_type",
        "id": result.head(body, "embd")["id"],
        "embeddings": embeddings_by_type(kinds, result.value),
        "meta": meta("2", **_billed(texts, result)),
    }
    if body.texts is not None:
        content["texts"] = texts
    reply = json_reply(content)
    record_phases(call, began)
    return reply


def _billed(given: Sequence[str | RawContent], result: Result[Columns]) -> dict[str, int]:
    """Tokens of texts and of images, and the number of images if there are any."""
    request = result.request
    num_image_tokens = 0 if request.images is None else int(request.images.num_tokens.sum())
    units = {"input_tokens": request.num_tokens - num_image_tokens, "image_tokens": num_image_tokens}
    contents = (each for each in given if not isinstance(each, str))
    num_images = sum(not isinstance(part, str) for content in contents for part in content)
    return units | ({"images": num_images} if num_images else {})


async def _embed(
    call: Call, body: CohereEmbedRequest, texts: list[Any], kinds: Sequence[EmbeddingType]
) -> Result[Columns]:
    """The vectors in every number format that the types need, from one forward pass."""
    model, name = call.model(body), body.given
    if any(isinstance(each, tuple) for each in texts):
        texts = await with_images(call, model, texts, name)
    is_refused = body.truncate == "NONE"
    task = EmbedInTypes(
        inputs=texts,
        params=PoolingParams(Task.EMBED, body.output_dimension),
        options=body.options(model.spec),
        check_lengths=refusing_longer(body.limit(model.spec), name) if is_refused else None,
        dtypes=embedding_dtypes(kinds),
    )
    return await run(call, body, model, task, rows_name=name)


# --- rankings -----------------------------------------------------------------------------------------------


class CohereRerankRequest(RerankRequest, kw_only=True):
    """Body of `POST /v2/rerank`, and of `/v1/rerank` with `rank_fields` or `max_chunks_per_doc`. As at
    Cohere, texts beyond the model's limit are truncated."""

    return_documents: bool = False
    rank_fields: list[str] | None = None
    max_chunks_per_doc: Annotated[
        int | None,
        Refused(
            "a document is read as one part and cut at the model's limit; leave it out, or set it to 1",
            accepts=(None, 1),
        ),
    ] = None
    relevant_spans: Annotated[
        dict[str, Any] | None,
        Refused("the models of this server score whole documents", accepts=(None, {"mode": "disabled"})),
    ] = None

    def options(self) -> PairOptions:
        return cut_by_default(super().options())


async def rerank_v1(call: Call, body: CohereRerankRequest) -> Reply:
    """Rank documents from best to worst, in the shape of Cohere's v1 API."""
    return await _rerank(call, body, "1")


async def rerank_v2(call: Call, body: CohereRerankRequest) -> Reply:
    """Rank documents from best to worst, in the shape of Cohere's v2 API."""
    return await _rerank(call, body, "2")


async def _rerank(call: Call, body: CohereRerankRequest, version: str) -> Reply:
    documents = returned_documents(body)
    if body.rank_fields:
        if len(set(body.rank_fields)) != len(body.rank_fields):
            raise BadValue("rank_fields names a field twice", param="rank_fields")
        texts = [_ranked_text(document, body.rank_fields, at) for at, document in enumerate(body.documents)]
        body = msgspec.structs.replace(body, documents=texts)
    result = await run_ranking(call, body, call.model(body))
    began = time.monotonic()
    units = meta(version, search_units=search_units(body))
    units["tokens"] = {"input_tokens": result.request.num_tokens}
    name = result.head(body, "rerank")["id"]
    reply = json_reply({"id": name, "results": ranked_rows(body, result.value, documents), "meta": units})
    record_phases(call, began)
    return reply


def _ranked_text(document: str | dict[str, Any], fields: Sequence[str], index: int) -> str:
    """The values of a document's fields in the given order, one per line."""
    values = {"text": document} if isinstance(document, str) else document
    lines: list[str] = []
    for name in fields:
        value = values.get(name)
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise BadValue(
                f"documents {index} has no text or number under {shown(name)}, which rank_fields names",
                param="rank_fields",
            )
        lines.append(str(value))
    return "\n".join(lines)


# --- answers ------------------------------------------------------------------------------------------------


class EmbeddingsByType(msgspec.Struct, kw_only=True, omit_defaults=True, rename={"float_": "float"}):
    """One list for each requested type."""

    float_: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    int8: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    uint8: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    binary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    ubinary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    base64: list[str] | msgspec.UnsetType = msgspec.UNSET


class EmbedFloatsAnswer(msgspec.Struct, kw_only=True, tag_field="response_type", tag="embeddings_floats"):
    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta


class EmbedByTypeAnswer(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="response_type", tag="embeddings_by_type"
):
    id: str
    embeddings: EmbeddingsByType
    texts: list[str] | msgspec.UnsetType = msgspec.UNSET
    meta: CohereMeta


class CohereRankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # with return_documents


class CohereRerankAnswer(msgspec.Struct, kw_only=True):
    id: str
    results: list[CohereRankedDocument]
    meta: CohereMeta


ERRORS = cohere_errors()
EMBED_ERRORS = cohere_errors({"dimensions": "output_dimension", "input": "texts"})
_QUERY = {"query": "What feeds a turbine?", "documents": ["A penstock feeds the turbine.", "A cat sat."]}
ROUTES = (
    RouteSpec(
        "/v1/embed",
        CohereEmbedRequest,
        embed_v1,
        "Cohere",
        EmbedFloatsAnswer | EmbedByTypeAnswer,
        EMBED_ERRORS,
        {"texts": ["Water finds its level."]},
    ),
    RouteSpec(
        "/v2/embed",
        CohereEmbedRequest,
        embed_v2,
        "Cohere",
        EmbedByTypeAnswer,
        EMBED_ERRORS,
        {"texts": ["Water finds its level."], "embedding_types": ["float", "int8"]},
    ),
    RouteSpec(
        "/v2/rerank",
        CohereRerankRequest,
        rerank_v2,
        "Cohere",
        CohereRerankAnswer,
        ERRORS,
        {**_QUERY, "top_n": 1},
    ),
)
VARIANTS: VariantTable = (
    (
        "/v1/rerank",
        Variant(
            ("rank_fields", "max_chunks_per_doc"),
            CohereRerankRequest,
            rerank_v1,
            "Cohere",
            ERRORS,
            CohereRerankAnswer,
            {"query": "turbine", "documents": [{"title": "A penstock"}], "rank_fields": ["title"]},
        ),
    ),
)
