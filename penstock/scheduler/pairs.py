"""Plans the scores of a step: which documents are scored against which queries, and where their vectors
are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.ragged import consecutive_tokens, tokens_of
from penstock.types import (
    CachedVectors,
    Ints,
    PairPlan,
    PoolingParams,
    RowSlice,
    Variant,
    cumulative,
    ragged_arange,
)


class _PairedSlice(NamedTuple):
    """The part of a request with pairs that is in a step."""

    row_slice: RowSlice
    pairs: Ints  # [documents of the request], the query of each document
    vectors: CachedVectors
    rows: Ints  # rows of the request that end in the step
    first_query: int  # index of its first query among the queries of all requests

    @property
    def num_queries(self) -> int:
        return self.row_slice.request.num_queries

    def queries_of(self, documents: Ints) -> Ints:
        """The query of each document, counted over all requests. The result is undefined for query rows."""
        if not len(self.pairs):
            return documents + self.first_query
        return self.pairs.take(documents - self.num_queries, mode="wrap") + self.first_query


class _FinishedRows(NamedTuple):
    """The rows of all requests that end in a step, request by request."""

    step_rows: Ints
    is_query: NDArray[np.bool_]
    queries: Ints  # the query of each document, counted over all requests
    starts: Ints  # start of each row's vectors in the store; -1: not stored
    lengths: Ints  # number of vectors of each row


def pair_variant(
    params: PoolingParams, slices: Sequence[RowSlice], lengths: Ints, cu_lengths: Ints
) -> Variant:
    """The scores of all these requests, as one variant."""
    paired = _paired_slices(slices)
    finished = _finished_rows(paired)
    tokens: Ints | None = None
    if not params.late:  # each row has one vector, with the index of the row in the step
        begins = finished.step_rows
    elif all(row_slice.request.token_mask is None for row_slice in slices):
        begins = cu_lengths[finished.step_rows]
    else:
        tokens = _kept_tokens(paired, tokens_of(finished.step_rows, lengths, cu_lengths))
        begins = cumulative(finished.lengths)[:-1]
    is_document = ~finished.is_query
    pair_queries = [finished.queries[is_document]]
    document_starts = [begins[is_document]]
    document_lengths = [finished.lengths[is_document]]
    num_from_store = 0
    for each in paired:
        if (cached := each.row_slice.cached_documents) is not None:
            pair_queries.append(each.queries_of(cached))
            document_starts.append(each.vectors.starts[cached])
            document_lengths.append(each.vectors.lengths[cached])
            num_from_store += len(cached)
    is_stored = finished.starts >= 0  # all queries, and the documents that the vector cache has room for
    sizes = finished.lengths[is_stored]
    ends = cumulative(sizes)
    query_lengths = _concatenate([each.vectors.lengths[: each.num_queries] for each in paired])
    all_document_lengths = _concatenate(document_lengths)
    plan = PairPlan(
        query_starts=_concatenate([each.vectors.starts[: each.num_queries] for each in paired]),
        query_lengths=query_lengths,
        pair_queries=_concatenate(pair_queries),
        document_starts=_concatenate(document_starts),
        document_lengths=all_document_lengths,
        write_from=ragged_arange(begins[is_stored], sizes, ends),
        write_to=ragged_arange(finished.starts[is_stored], sizes, ends),
        num_from_store=num_from_store,
        max_query_length=int(query_lengths.max(initial=0)),
        max_document_length=int(all_document_lengths.max(initial=0)),
    )
    return Variant(params, finished.step_rows[is_document], tokens, plan)


def _paired_slices(slices: Sequence[RowSlice]) -> list[_PairedSlice]:
    first_queries = accumulate((row_slice.request.num_queries for row_slice in slices), initial=0)
    paired = []
    for row_slice, first_query in zip(slices, first_queries, strict=False):
        pairs, vectors = row_slice.request.pairs, row_slice.cached
        if pairs is None or vectors is None:
            raise ValueError("only a request with pairs and room in the vector cache can be scored")
        rows = row_slice.rows if row_slice.ends is None else row_slice.rows[row_slice.finished]
        paired.append(_PairedSlice(row_slice, pairs, vectors, rows, first_query))
    return paired


def _finished_rows(paired: Sequence[_PairedSlice]) -> _FinishedRows:
    step_rows = [
        each.row_slice.step_rows
        if each.row_slice.ends is None
        else each.row_slice.step_rows[each.row_slice.finished]
        for each in paired
    ]
    return _FinishedRows(
        _concatenate(step_rows),
        _concatenate([each.rows < each.num_queries for each in paired]),
        _concatenate([each.queries_of(each.rows) for each in paired]),
        _concatenate([each.vectors.starts[each.rows] for each in paired]),
        _concatenate([each.vectors.lengths[each.rows] for each in paired]),
    )


_Array = TypeVar("_Array", Ints, NDArray[np.bool_])


def _concatenate(parts: Sequence[_Array]) -> _Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _kept_tokens(paired: Sequence[_PairedSlice], tokens: Ints) -> Ints:
    """Select the tokens whose vectors take part in a score. `tokens`: all tokens of the rows that end."""
    flags: list[Ints] = []
    for each in paired:
        request, rows = each.row_slice.request, each.rows
        if request.token_mask is None:
            flags.append(np.ones(int(request.lengths[rows].sum()), dtype=np.int32))
            continue
        index = consecutive_tokens(rows, request.lengths, request.starts)
        if index is None:
            flags.append(request.token_mask[tokens_of(rows, request.lengths, request.starts)])
        else:
            flags.append(request.token_mask[index])
    kept: Ints = tokens[_concatenate(flags) != 0]
    return kept
