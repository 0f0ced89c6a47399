"""Listwise rerankers: a query and many documents in one row, a marked token standing for each.

As jina-reranker-v3 has it. The engine gives the projected states of a row's tokens; those of the marks
are compared here, because a long list is read in blocks whose queries are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.score import DOCUMENT_MARK, QUERY_MARK
from penstock.errors import BadValue
from penstock.inputs.pair_options import Pair, PairOptions
from penstock.inputs.processor import InputProcessor
from penstock.types import Array, Ints, PoolingParams, Request

Floats = NDArray[np.float64]
_BLOCK = 125  # documents in one row
_DOCUMENT, _QUERY = 2048, 512  # tokens that a text is cut at, where cutting is asked for
_TASK = (
    "<|im_start|>system\n"
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant "
    "they are to the query. If the query is a question, how relevant a passage is depends on how well it "
    "answers the question. If not, try to analyze the intent of the query and assess how well each passage "
    "satisfies the intent. If an instruction is provided, you should follow the instruction when determining "
    "the ranking.<|im_end|>\n<|im_start|>user\n"
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def prepare_lists(
    processor: InputProcessor,
    request_id: str,
    pairs: Sequence[Pair],
    params: PoolingParams,
    options: PairOptions,
) -> Request:
    """A row for each block of neighbouring pairs with the same query; documents stay in their order."""
    prompts: list[str] = []
    for query, same in groupby(pairs, key=lambda pair: pair[0]):
        prompts += _prompts(processor, query, [document for _, document in same], options)
    rows = processor.tokenizer.encode(prompts)
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    if (lengths > processor.spec.max_model_len).any():
        raise BadValue(
            f"a list of documents takes {int(lengths.max())} tokens, but the model takes at most "
            f"{processor.spec.max_model_len}; shorten them or set max_tokens_per_doc",
            param="documents",
        )
    settled = msgspec.structs.replace(params, listwise=True, normalize=False)
    return Request(request_id, np.concatenate(rows), lengths, settled, cache_salt=options.cache_salt)


def _prompts(
    processor: InputProcessor, query: str, documents: list[str], options: PairOptions
) -> Iterator[str]:
    tokenizer, limit = processor.tokenizer, processor.spec.max_model_len
    cuts = options.truncate_prompt_tokens is not None
    most_query = options.max_tokens_per_query or (min(_QUERY, limit // 8) if cuts else None)
    most = options.max_tokens_per_doc or (min(_DOCUMENT, limit // 8) if cuts else None)
    (query,), documents = _clean([query]), _clean(documents)
    if most_query is not None:
        (query,) = tokenizer.cut([query], most_query)
    if most is not None:
        documents = tokenizer.cut(documents, most)
    told = f"<instruct>\n{options.instruction}\n</instruct>\n" if options.instruction else ""
    sample = [_prompt(query, told, []), *(_passage(_BLOCK, document) + "\n" for document in documents)]
    base, *sizes = (len(row) for row in tokenizer.encode(sample))
    for first, end in _blocks(sizes, limit - base):
        yield _prompt(query, told, documents[first:end])


def _prompt(query: str, told: str, documents: list[str]) -> str:
    passages = "\n".join(_passage(index, document) for index, document in enumerate(documents))
    return (
        f"{_TASK}I will provide you with {len(documents)} passages, each indicated by a numerical "
        f"identifier. Rank the passages based on their relevance to query: {query}\n{told}{passages}\n"
        f"<query>\n{query}{QUERY_MARK}\n</query>{_ANSWER}"
    )


def _passage(index: int, document: str) -> str:
    return f'<passage id="{index}">\n{document}{DOCUMENT_MARK}\n</passage>'


def _clean(texts: list[str]) -> list[str]:
    """A mark inside a text would stand for a document that is not there."""
    return [text.replace(DOCUMENT_MARK, "").replace(QUERY_MARK, "") for text in texts]


def _blocks(sizes: list[int], capacity: int) -> Iterator[tuple[int, int]]:
    """Runs of documents that go into one row together; one that is too long stands alone."""
    first, room = 0, capacity
    for place, size in enumerate(sizes):
        if place > first and (place - first >= _BLOCK or size > room):
            yield first, place
            first, room = place, capacity
        room -= size
    yield first, len(sizes)


def list_scores(request: Request, values: Array, marks: tuple[int, ...], sizes: Sequence[int]) -> Array:
    """Cosines of each document's token and its list's query, [documents, 1], from projected states [tokens,
    width]. `sizes` are the documents of each list; the query of a list in several blocks is their mean, a
    block counting as much as its best document."""
    documents_at, queries_at = (np.flatnonzero(request.token_ids == mark) for mark in marks)
    row_of = np.searchsorted(request.starts, documents_at, side="right") - 1
    documents, queries = (values[at].astype(np.float64) for at in (documents_at, queries_at))
    weights = np.zeros(request.num_rows)
    np.maximum.at(weights, row_of, (1 + _cosines(documents, queries[row_of])) / 2)
    ends = np.cumsum(sizes)
    list_of: Ints = np.searchsorted(ends, np.arange(len(documents)), side="right").astype(np.int32)
    list_of_row = np.zeros(request.num_rows, dtype=np.int32)
    list_of_row[row_of] = list_of
    means = np.zeros((len(sizes), values.shape[1]))
    np.add.at(means, list_of_row, queries * weights[:, None])  # a mean's length does not matter to a cosine
    return _cosines(documents, means[list_of]).astype(np.float32)[:, None]


def _cosines(left: Floats, right: Floats) -> Floats:
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    found: Floats = (left * right).sum(axis=1) / np.maximum(norms, 1e-30)
    return found
