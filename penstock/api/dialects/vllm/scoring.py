"""The dialect of vLLM's scoring routes: scores and rankings."""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

import msgspec

from penstock.api.answers import ListAnswer, Usage
from penstock.api.call import Call, Reply
from penstock.api.fields import MediaOptions
from penstock.api.images import has_image
from penstock.api.ranking import (
    Document,
    RankFields,
    RerankRequest,
    Side,
    check_query,
    content_pairs,
    document_texts,
    listed,
    ranked_rows,
    returned_documents,
    run_pairs,
    run_ranking,
    search_units,
)
from penstock.api.replies import json_reply, list_reply, record_phases
from penstock.api.routes import RouteSpec
from penstock.api.run import check_num_rows
from penstock.errors import BadValue
from penstock.inputs.chat import part_texts
from penstock.inputs.pair_options import make_pairs


class RankBody(Protocol):
    instruction: str | None
    chat_template_kwargs: dict[str, Any] | None
    max_tokens_per_query: int | None
    max_tokens_per_doc: int | None


def take_vllm_spellings(body: RankBody) -> None:
    """Take the instruction from the template's variables, and read 0 as no limit."""
    variables = body.chat_template_kwargs or {}
    if others := [name for name in variables if name != "instruction"]:
        raise BadValue(
            f"chat_template_kwargs has {others[0][:100]!r}; templates of pairs know only 'instruction'",
            param="chat_template_kwargs",
        )
    if (given := variables.get("instruction")) is not None:
        if not isinstance(given, str):
            raise BadValue("chat_template_kwargs.instruction is not a text", param="chat_template_kwargs")
        body.instruction = given
    body.max_tokens_per_query = body.max_tokens_per_query or None
    body.max_tokens_per_doc = body.max_tokens_per_doc or None


def with_text(document: Document, name: str) -> Document:
    """A document with a list of text parts, converted to a document with one text."""
    if isinstance(document, str) or "content" not in document or "text" in document or has_image(document):
        return document
    try:
        return {"text": "\n".join(part_texts(document["content"], 0))}
    except BadValue:
        raise BadValue(f"{name} has an object whose content is not text", param=name) from None


class ScoreRequest(RankFields, kw_only=True):
    """Body of `POST /score`: two sides under any of their names, one to one, one to many, or many to many."""

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: MediaOptions = None

    def __post_init__(self) -> None:
        take_vllm_spellings(self)

    def sides(self) -> tuple[Side, Side]:
        kinds = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
        given = [name for name in dict.fromkeys(sum(kinds, ())) if getattr(self, name) is not None]
        for first, second in kinds:
            if given == [first, second]:
                return getattr(self, first), getattr(self, second)
        known = ", ".join(f"{first} and {second}" for first, second in kinds)
        have = f"not {' and '.join(given)}" if given else "and no other"
        raise BadValue(f"give one of {known}, {have}", param=given[0] if given else "queries")


async def score(call: Call, body: ScoreRequest) -> Reply:
    """Score how well each document answers its query."""
    first, second = (listed(side) for side in body.sides())
    check_num_rows(call, max(len(first), len(second)), "documents")
    queries = [with_text(each, "queries") for each in first]
    documents = [with_text(each, "documents") for each in second]
    model = call.model(body)
    if any(map(has_image, [*queries, *documents])):
        pairs = await content_pairs(call, model, queries, documents)
    else:
        texts = document_texts(queries, "queries")
        for index, query in enumerate(texts):
            check_query(query, f"query {index}", "queries")
        pairs = list(make_pairs(texts, document_texts(documents, "documents")))
    result = await run_pairs(call, body, model, pairs, body.options(), activate=body.use_activation)

    def data() -> list[dict[str, Any]]:
        return [
            {"index": index, "object": "score", "score": value} for index, value in enumerate(result.value)
        ]

    return await list_reply(call, body, result, "score", data)


class RankRequest(RerankRequest, kw_only=True):
    """Body of `POST /rerank` and `/v1/rerank`. Documents are returned unless `return_documents` is false."""

    query: Document  # type: ignore[assignment]
    documents: Document | list[Document]  # type: ignore[assignment]
    return_documents: bool | None = None  # type: ignore[assignment]
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: MediaOptions = None

    def __post_init__(self) -> None:
        take_vllm_spellings(self)
        self.top_n = self.top_n or None
        query = with_text(self.query, "query")
        self.query = query if has_image(query) else document_texts([query], "query")[0]
        self.documents = listed(self.documents)
        if not all(isinstance(each, str) for each in self.documents):
            self.documents = [with_text(each, "documents") for each in self.documents]


def _shown_documents(body: RankRequest) -> list[Any] | None:
    """The documents of the answer. Unless requested explicitly, those that cannot be encoded become texts."""
    if body.return_documents is not None:
        return returned_documents(body)
    body.return_documents = True
    try:
        return returned_documents(body)
    except BadValue:
        documents = listed(body.documents)
        return [
            {} if has_image(each) else {"text": document_texts([each], "documents")[0]} for each in documents
        ]


async def rerank(call: Call, body: RankRequest) -> Reply:
    """Rank documents from best to worst."""
    documents = _shown_documents(body)
    result = await run_ranking(call, body, call.model(body))
    began = time.monotonic()
    head = result.head(body, "rerank")
    meta = {"billed_units": {"search_units": search_units(body)}}
    reply = json_reply(
        {**head, "results": ranked_rows(body, result.value, documents), "usage": result.usage, "meta": meta}
    )
    record_phases(call, began)
    return reply


async def cutting_rerank(call: Call, body: RankRequest) -> Reply:
    """Rank documents from best to worst. As at Cohere and Jina, texts beyond the model's limit are cut."""
    if body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    return await rerank(call, body)


class ScoreEntry(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(ListAnswer, kw_only=True):
    data: list[ScoreEntry]


class RankedDocument(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET  # unless return_documents is false


class SearchUnits(msgspec.Struct, kw_only=True):
    search_units: int


class RankMeta(msgspec.Struct, kw_only=True):
    billed_units: SearchUnits


class RankAnswer(msgspec.Struct, kw_only=True):
    """The documents from best to worst."""

    id: str
    created: int
    model: str
    results: list[RankedDocument]
    usage: Usage
    meta: RankMeta


_QUERY = "What is a penstock?"
_DOCUMENTS = ["A pipe that feeds water to a turbine.", "A kind of bread."]
_PAIR = {"queries": _QUERY, "documents": _DOCUMENTS}
_LIST = {"query": _QUERY, "documents": _DOCUMENTS}
ROUTES = (
    RouteSpec("/score", ScoreRequest, score, "vLLM", ScoreAnswer, example=_PAIR),
    RouteSpec("/v1/score", ScoreRequest, score, "vLLM", ScoreAnswer, example=_PAIR),
    RouteSpec("/rerank", RankRequest, rerank, "vLLM", RankAnswer, example=_LIST),
    RouteSpec("/v1/rerank", RankRequest, cutting_rerank, "vLLM", RankAnswer, example=_LIST),
)
