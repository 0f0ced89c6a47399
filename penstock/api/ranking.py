"""Rankings for every dialect that has them: documents as pairs with a query, and rows from best to worst.

One HTTP request is one message to the engine, however many documents it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import orjson
from numpy.typing import NDArray

from penstock.api.call import Call
from penstock.api.fields import CacheSalt, User
from penstock.api.images import document_content, has_image, with_images
from penstock.api.run import Result, Scheduled, check_num_rows, run
from penstock.api.state import ServedModel
from penstock.errors import BadValue
from penstock.inputs.long_texts import MAX_REQUEST_TOKENS
from penstock.inputs.pair_options import PairOptions, make_pairs
from penstock.outputs.ranking import check_top_n, top_indices
from penstock.tasks.score import Score
from penstock.types import PoolingParams, Task

Document = str | dict[str, Any]
Side = str | dict[str, Any] | list[Document]
Scores = NDArray[Any]
SEARCH_UNIT = 100  # documents that Cohere counts as one search


class RankFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How pairs become rows, how they are scored, and when they run."""

    model: str | None = None
    adapter: str | None = None
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


def cut_by_default(options: PairOptions) -> PairOptions:
    """Truncate pairs at the model's limit, unless the options set a limit."""
    return replace(options, truncate_prompt_tokens=-1) if options.truncate_prompt_tokens is None else options


class RerankRequest(RankFields, kw_only=True):
    """Body of `POST /rerank` and `/v1/rerank`, as Jina and Cohere v1 have it."""

    query: str
    documents: list[Document]
    top_n: int | None = None
    return_documents: bool = False


async def run_pairs(
    call: Call,
    body: Scheduled,
    model: ServedModel,
    pairs: list[Any],
    options: PairOptions,
    *,
    activate: bool | None,
) -> Result[Scores]:
    """Score pairs. Scores stay NumPy scalars: the encoder writes them as the short decimals of a float32."""
    options = replace(options, max_request_tokens=MAX_REQUEST_TOKENS)
    task = Score(pairs=pairs, params=PoolingParams(Task.SCORE, normalize=activate), options=options)
    return await run(call, body, model, task, rows_name="documents")


async def run_ranking(call: Call, body: RerankRequest, model: ServedModel) -> Result[Scores]:
    """Score the documents of a body. Look up `model` first, because that settles how long texts are cut."""
    check_top_n(body.top_n)
    return await score_documents(
        call, body, model, body.query, body.documents, body.options(), activate=body.use_activation
    )


async def score_documents(
    call: Call,
    body: Scheduled,
    model: ServedModel,
    query: Document,
    documents: Sequence[Document],
    options: PairOptions,
    *,
    activate: bool | None,
) -> Result[Scores]:
    """Score how well each document answers the query."""
    check_num_rows(call, len(documents), "documents")
    pairs = await content_pairs(call, model, [query], documents)
    return await run_pairs(call, body, model, pairs, options, activate=activate)


async def content_pairs(
    call: Call, model: ServedModel, queries: Sequence[Document], documents: Sequence[Document]
) -> list[Any]:
    """Pairs of texts, or of texts and prepared images."""
    if not any(map(has_image, [*queries, *documents])):
        texts = document_texts(queries, "query")
        for text in texts:
            check_query(text, "query", "query")
        return list(make_pairs(texts, document_texts(documents, "documents")))
    sides: list[list[Any]] = []
    for name, given in (("query", queries), ("documents", documents)):
        items = [
            document_content(each, name) if has_image(each) else document_texts([each], name)[0]
            for each in given
        ]
        has_images = any(map(has_image, given))
        sides.append(await with_images(call, model, items, name) if has_images else items)
    first, second = sides
    if len(first) not in (1, len(second)):
        raise BadValue(
            f"{len(first)} queries for {len(second)} documents; give one query, or one for each document",
            param="queries",
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def returned_documents(body: RerankRequest) -> list[Any] | None:
    """The documents for the reply; None if it has none. Refuses documents that cannot be encoded."""
    if not body.return_documents:
        return None
    return [_returned(document, index) for index, document in enumerate(body.documents)]


def _returned(document: Document, index: int) -> Any:
    if isinstance(document, str):
        return {"text": document}
    if has_image(document):
        return {}  # the caller has the image
    try:
        return orjson.Fragment(orjson.dumps(document))
    except TypeError as error:  # nested too deeply, or an integer of more than 64 bits
        raise BadValue(
            f"documents {index} cannot be returned: {error}; simplify it or leave return_documents out",
            param="documents",
        ) from None


def ranked_rows(body: RerankRequest, scores: Scores, documents: list[Any] | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for index in top_indices(scores, body.top_n):
        row = {"index": index, "relevance_score": scores[index]}
        if documents is not None:
            row["document"] = documents[index]
        rows.append(row)
    return rows


def listed(side: Side) -> list[Document]:
    return side if isinstance(side, list) else [side]


def document_texts(documents: Sequence[Document], name: str) -> list[str]:
    texts = []
    for index, document in enumerate(documents):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            raise BadValue(f"{name} {index} is an object without a string under `text`", param=name)
        texts.append(text)
    return texts


def check_query(query: str, what: str, name: str) -> None:
    if not query.strip():
        raise BadValue(f"{what} is an empty text", param=name)


def search_units(body: RerankRequest) -> int:
    return -(-len(body.documents) // SEARCH_UNIT)
