"""Scores and rankings of documents in the dialects of vLLM, Jina and Cohere.

One HTTP request is one message to the engine, however many documents it has.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Literal, Protocol

import msgspec
import orjson
from numpy.typing import NDArray

from penstock.api.endpoint import Call, Reply
from penstock.api.error_styles import ErrorStyle
from penstock.api.fields import CacheSalt, User
from penstock.api.replies import json_reply, list_reply, record_phases
from penstock.api.routes import RouteSpec
from penstock.api.run import Result, Scheduled, check_num_rows, run
from penstock.errors import BadValue, PenstockError
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.inputs.pair_options import Pair, PairOptions, make_pairs
from penstock.outputs.ranking import check_top_n, top_indices
from penstock.tasks.score import Score
from penstock.types import PoolingParams, Task

Document = str | dict[str, Any]
Side = str | dict[str, Any] | list[Document]
Scores = NDArray[Any]
SEARCH_UNIT = 100  # documents that Cohere counts as one search


class RankFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How pairs become rows, what scores are, and when they run."""

    model: str | None = None
    instruction: str | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    use_activation: bool | None = None
    priority: int = 0
    timeout: float | None = None
    request_id: str | None = None
    user: User = None
    cache_salt: CacheSalt = ""

    def options(self) -> PairOptions:
        return PairOptions(
            instruction=self.instruction,
            max_tokens_per_query=self.max_tokens_per_query,
            max_tokens_per_doc=self.max_tokens_per_doc,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            cache_salt=self.cache_salt,
        )


class ScoreRequest(RankFields, kw_only=True):
    """Body of `POST /score`: two sides under any of their names, one to one, one to many, or many to many."""

    queries: Side | None = None
    documents: Side | None = None
    items: Side | None = None
    text_1: Side | None = None
    text_2: Side | None = None
    data_1: Side | None = None
    data_2: Side | None = None

    def sides(self) -> tuple[Side, Side]:
        kinds = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
        given = [name for name in dict.fromkeys(sum(kinds, ())) if getattr(self, name) is not None]
        for first, second in kinds:
            if given == [first, second]:
                return getattr(self, first), getattr(self, second)
        known = ", ".join(f"{first} and {second}" for first, second in kinds)
        have = f"not {' and '.join(given)}" if given else "and no other"
        raise BadValue(f"give one of {known}, {have}", param=given[0] if given else "queries")


class RerankRequest(RankFields, kw_only=True):
    """Body of `POST /rerank` and `/v1/rerank`, as Jina and Cohere v1 have it."""

    query: str
    documents: list[Document]
    top_n: int | None = None
    return_documents: bool = False


class CohereRerankRequest(RerankRequest, kw_only=True):
    """Body of `POST /v2/rerank`. As at Cohere, texts beyond the model's limit are truncated."""

    def options(self) -> PairOptions:
        options = super().options()
        return replace(options, truncate_prompt_tokens=-1) if self.truncate_prompt_tokens is None else options


async def score(call: Call, body: ScoreRequest) -> Reply:
    """Score how well each document answers its query."""
    first, second = (_listed(side) for side in body.sides())
    check_num_rows(call, max(len(first), len(second)), "documents")
    queries, documents = _texts(first, "queries"), _texts(second, "documents")
    for index, query in enumerate(queries):
        _check_query(query, f"query {index}", "queries")
    pairs = make_pairs(queries, documents)
    result = await run_pairs(call, body, pairs, body.options(), activate=body.use_activation)

    def data() -> list[dict[str, Any]]:
        return [
            {"index": index, "object": "score", "score": value} for index, value in enumerate(result.value)
        ]

    return await list_reply(call, body, result, "score", data)


async def rerank(call: Call, body: RerankRequest) -> Reply:
    """Rank documents from best to worst."""
    documents = _returned_documents(body)
    result = await _ranked(call, body)
    began = time.monotonic()
    head = result.head(body, "rerank")
    meta = {"billed_units": {"search_units": _search_units(body)}}
    reply = json_reply(
        {**head, "results": _results(body, result.value, documents), "usage": result.usage, "meta": meta}
    )
    record_phases(call, began)
    return reply


async def cohere_rerank(call: Call, body: CohereRerankRequest) -> Reply:
    """Rank documents from best to worst, in the shape of Cohere's v2 API."""
    documents = _returned_documents(body)
    result = await _ranked(call, body)
    began = time.monotonic()
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": _search_units(body)},
        "tokens": {"input_tokens": result.request.num_tokens},
    }
    name = result.head(body, "rerank")["id"]
    reply = json_reply({"id": name, "results": _results(body, result.value, documents), "meta": meta})
    record_phases(call, began)
    return reply


def cohere_error(error: PenstockError) -> dict[str, Any]:
    return {"message": error.message}


class PairBody(Scheduled, Protocol):
    model: str | None


async def run_pairs(
    call: Call, body: PairBody, pairs: list[Pair], options: PairOptions, *, activate: bool | None
) -> Result[Scores]:
    """Score pairs. Scores stay NumPy scalars: the encoder writes them as the short decimals of a float32."""
    options = replace(options, max_request_tokens=MAX_REQUEST_TOKENS)
    task = Score(pairs=pairs, params=PoolingParams(Task.SCORE, normalize=activate), options=options)
    return await run(call, body, call.model(body), task, rows_name="documents")


async def _ranked(call: Call, body: RerankRequest) -> Result[Scores]:
    check_top_n(body.top_n)
    _check_query(body.query, "query", "query")
    check_num_rows(call, len(body.documents), "documents")
    pairs = make_pairs(body.query, _texts(body.documents, "documents"))
    return await run_pairs(call, body, pairs, body.options(), activate=body.use_activation)


def _returned_documents(body: RerankRequest) -> list[Any] | None:
    """The documents as the reply holds them, if it does. What it cannot hold is refused before it runs."""
    if not body.return_documents:
        return None
    return [_returned(document, index) for index, document in enumerate(body.documents)]


def _returned(document: Document, index: int) -> Any:
    if isinstance(document, str):
        return {"text": document}
    try:
        return orjson.Fragment(orjson.dumps(document))
    except TypeError as error:  # nested too deeply, or an integer of more than 64 bits
        raise BadValue(
            f"documents {index} cannot be returned: {error}; simplify it or leave return_documents out",
            param="documents",
        ) from None


def _results(body: RerankRequest, scores: Scores, documents: list[Any] | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index in top_indices(scores, body.top_n):
        row = {"index": index, "relevance_score": scores[index]}
        if documents is not None:
            row["document"] = documents[index]
        rows.append(row)
    return rows


def _search_units(body: RerankRequest) -> int:
    return -(-len(body.documents) // SEARCH_UNIT)


def _listed(side: Side) -> list[Document]:
    return side if isinstance(side, list) else [side]


def _texts(documents: list[Document], name: str) -> list[str]:
    texts = []
    for index, document in enumerate(documents):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            raise BadValue(f"{name} {index} is an object without a string under `text`", param=name)
        texts.append(text)
    return texts


def _check_query(query: str, what: str, name: str) -> None:
    if not query.strip():
        raise BadValue(f"{what} is an empty text", param=name)


COHERE_ERRORS = ErrorStyle(cohere_error)
ROUTES = (
    RouteSpec("/score", ScoreRequest, score, "vLLM"),
    RouteSpec("/v1/score", ScoreRequest, score, "vLLM"),
    RouteSpec("/rerank", RerankRequest, rerank, "vLLM"),
    RouteSpec("/v1/rerank", RerankRequest, rerank, "vLLM"),
    RouteSpec("/v2/rerank", CohereRerankRequest, cohere_rerank, "Cohere", errors=COHERE_ERRORS),
)
