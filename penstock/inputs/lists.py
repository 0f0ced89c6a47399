"""Listwise rerankers (jina-reranker-v3): a query and many documents in one row, each with a marker token.

The engine returns the projected states of all tokens of a row. This module compares the states of the marker
tokens. It runs after the engine because long lists are split into blocks, whose query states are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.checkpoint.score import DOCUMENT_MARK, QUERY_MARK
from penstock.errors import BadValue
from penstock.inputs.long_texts import RowLimit, check_expanded, check_request_tokens, windows
from penstock.inputs.pair_options import Pair, PairOptions
from penstock.inputs.processor import InputProcessor
from penstock.types import Array, Ints, PoolingParams, Request

Floats = NDArray[np.float64]
_MAX_BLOCK_DOCUMENTS = 125  # documents in one row
_MAX_DOCUMENT_TOKENS, _MAX_QUERY_TOKENS = 2048, 512  # defaults if the request truncates and sets no limits
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
    """One row per block of consecutive pairs with the same query. Documents keep their order."""
    max_tokens = processor.spec.max_model_len
    limit = RowLimit(max_tokens, name="list", param="documents")
    rows: list[Ints] = []
    for window in windows(_all_prompts(processor, pairs, options)):
        rows += processor.tokenizer.encode(window, True, limit)
        if (longest := max(len(row) for row in rows)) > max_tokens:
            raise BadValue(
                f"a list of documents takes {longest} tokens, but the model takes at most {max_tokens}; "
                "shorten them or set max_tokens_per_doc",
                param="documents",
            )
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    check_request_tokens(int(lengths.sum(dtype=np.int64)), options.max_request_tokens, "documents")
    params = msgspec.structs.replace(params, listwise=True, normalize=False)
    return Request(request_id, np.concatenate(rows), lengths, params, cache_salt=options.cache_salt)


def _all_prompts(processor: InputProcessor, pairs: Sequence[Pair], options: PairOptions) -> Iterator[str]:
    """The prompts of all blocks. Each repeats the query and the instruction."""
    num_repeated = 0
    for query, group in groupby(pairs, key=lambda pair: pair[0]):
        for prompt in _prompts(processor, query, [document for _, document in group], options):
            num_repeated += 2 * len(query) + len(options.instruction or "")
            check_expanded(num_repeated, "query")
            yield prompt


def _prompts(
    processor: InputProcessor, query: str, documents: list[str], options: PairOptions
) -> Iterator[str]:
    tokenizer, limit = processor.tokenizer, processor.spec.max_model_len
    truncates = options.truncate_prompt_tokens is not None
    max_query = options.max_tokens_per_query or (min(_MAX_QUERY_TOKENS, limit // 8) if truncates else None)
    max_document = options.max_tokens_per_doc or (
        min(_MAX_DOCUMENT_TOKENS, limit // 8) if truncates else None
    )
    (query,), documents = _without_markers([query]), _without_markers(documents)
    if max_query is not None:
        (query,) = tokenizer.truncate([query], max_query)
    if max_document is not None:
        documents = tokenizer.truncate(documents, max_document)
    instruction = f"<instruct>\n{options.instruction}\n</instruct>\n" if options.instruction else ""
    passages = (_passage(_MAX_BLOCK_DOCUMENTS, document) + "\n" for document in documents)
    row_limit = RowLimit(limit, name="document", param="documents")
    (base,) = tokenizer.encode([_prompt(query, instruction, [])], True, replace(row_limit, name="query"))
    sizes = [len(row) for row in tokenizer.encode(list(passages), True, row_limit)]
    for first, end in _blocks(sizes, limit - len(base)):
        yield _prompt(query, instruction, documents[first:end])


def _prompt(query: str, instruction: str, documents: list[str]) -> str:
    passages = "\n".join(_passage(index, document) for index, document in enumerate(documents))
    return (
        f"{_TASK}I will provide you with {len(documents)} passages, each indicated by a numerical "
        f"identifier. Rank the passages based on their relevance to query: {query}\n{instruction}{passages}\n"
        f"<query>\n{query}{QUERY_MARK}\n</query>{_ANSWER}"
    )


def _passage(index: int, document: str) -> str:
    return f'<passage id="{index}">\n{document}{DOCUMENT_MARK}\n</passage>'


def _without_markers(texts: list[str]) -> list[str]:
    """Remove markers from the texts: each would be scored as one more document."""
    return [text.replace(DOCUMENT_MARK, "").replace(QUERY_MARK, "") for text in texts]


def _blocks(sizes: list[int], capacity: int) -> Iterator[tuple[int, int]]:
    """Ranges of documents that share a row. A document that exceeds the capacity gets its own row."""
    first, room = 0, capacity
    for index, size in enumerate(sizes):
        if index > first and (index - first >= _MAX_BLOCK_DOCUMENTS or size > room):
            yield first, index
            first, room = index, capacity
        room -= size
    yield first, len(sizes)


def list_scores(request: Request, values: Array, marks: tuple[int, ...], sizes: Sequence[int]) -> Array:
    """The cosine of each document's marker and its list's query, [documents, 1].

    `values` are the projected states, [tokens, width]; `sizes` are the numbers of documents in the lists. If
    a list has several blocks, its query is the mean of their queries, each weighted by the score of the
    block's best document.
    """
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
    np.add.at(means, list_of_row, queries * weights[:, None])  # the norm of a mean does not change a cosine
    return _cosines(documents, means[list_of]).astype(np.float32)[:, None]


def _cosines(left: Floats, right: Floats) -> Floats:
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    found: Floats = (left * right).sum(axis=1) / np.maximum(norms, 1e-30)
    return found
