"""The plan of a step's scores: which documents are scored against which queries, and where both lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.scheduler.ragged import neighbours, ragged_arange, tokens_of
from penstock.types import CachedVectors, Ints, PairPlan, PoolingParams, RowSlice, Variant, cumulative


class _Run(NamedTuple):
    """The rows of all these requests that end in a step, one after another."""

    slots: Ints  # where they lie in the step
    queries: NDArray[np.bool_]  # which of them are queries
    against: Ints  # the query of each document, counted over all requests; of queries it means nothing
    starts: Ints  # of their vectors in the store; -1: nowhere
    lengths: Ints  # of these


def pair_variant(
    params: PoolingParams, pieces: Sequence[RowSlice], lengths: Ints, cu_lengths: Ints
) -> Variant:
    """The scores of all these requests, as one variant."""
    counts = [piece.request.num_queries for piece in pieces]
    bases = list(accumulate(counts, initial=0))
    rows = [piece.rows if piece.ends is None else piece.rows[piece.finished] for piece in pieces]
    run = _run(pieces, rows, bases)
    tokens: Ints | None = None
    if not params.late:  # a row has one vector, and that is its number in the step
        begins = run.slots
    elif all(piece.request.token_mask is None for piece in pieces):
        begins = cu_lengths[run.slots]
    else:
        tokens = _kept(pieces, rows, tokens_of(run.slots, lengths, cu_lengths))
        begins = cumulative(run.lengths)[:-1]
    documents = ~run.queries
    columns = [[run.against[documents]], [begins[documents]], [run.lengths[documents]]]
    for piece, base in zip(pieces, bases, strict=False):
        if (stored := piece.cached_documents) is not None:
            held = _held(piece)
            for column, of_stored in zip(
                columns,
                (_queries_of(piece, stored) + base, held.starts[stored], held.lengths[stored]),
                strict=True,
            ):
                column.append(of_stored)
    pair_queries, document_starts, document_lengths = map(_joined, columns)
    placed = run.starts >= 0  # all queries, and the documents that have a place: these are kept
    sizes = run.lengths[placed]
    ends = cumulative(sizes)
    query_lengths = _joined([_held(p).lengths[:n] for p, n in zip(pieces, counts, strict=True)])
    plan = PairPlan(
        query_starts=_joined([_held(p).starts[:n] for p, n in zip(pieces, counts, strict=True)]),
        query_lengths=query_lengths,
        pair_queries=pair_queries,
        document_starts=document_starts,
        document_lengths=document_lengths,
        write_from=ragged_arange(begins[placed], sizes, ends),
        write_to=ragged_arange(run.starts[placed], sizes, ends),
        num_from_store=sum(
            len(piece.cached_documents) for piece in pieces if piece.cached_documents is not None
        ),
        max_query_length=int(query_lengths.max(initial=0)),
        max_document_length=int(document_lengths.max(initial=0)),
    )
    return Variant(params, run.slots[documents], tokens, plan)


def _run(pieces: Sequence[RowSlice], rows: Sequence[Ints], bases: Sequence[int]) -> _Run:
    parts: list[tuple[Ints, NDArray[np.bool_], Ints, Ints, Ints]] = []
    for piece, mine, base in zip(pieces, rows, bases, strict=False):
        held = _held(piece)
        places = piece.step_rows if piece.ends is None else piece.step_rows[piece.finished]
        parts.append(
            (
                places,
                mine < piece.request.num_queries,
                _queries_of(piece, mine) + base,
                held.starts[mine],
                held.lengths[mine],
            )
        )
    slots, queries, against, starts, lengths = zip(*parts, strict=True)
    return _Run(_joined(slots), _joined(queries), _joined(against), _joined(starts), _joined(lengths))


def _held(piece: RowSlice) -> CachedVectors:
    assert piece.cached is not None, "a request with pairs is scheduled with places"
    return piece.cached


def _queries_of(piece: RowSlice, rows: Ints) -> Ints:
    """The query of each of these documents, within the request; anything for rows that are none."""
    pairs = piece.request.pairs
    assert pairs is not None
    return pairs.take(rows - piece.request.num_queries, mode="wrap") if len(pairs) else rows


_Array = TypeVar("_Array", Ints, NDArray[np.bool_])


def _joined(parts: Sequence[_Array]) -> _Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _kept(pieces: Sequence[RowSlice], rows: Sequence[Ints], tokens: Ints) -> Ints:
    """Of all these rows' tokens in the step, those whose vectors count."""
    flags: list[Ints] = []
    for piece, mine in zip(pieces, rows, strict=True):
        request = piece.request
        if request.token_mask is None:
            flags.append(np.ones(int(request.lengths[mine].sum()), dtype=np.int32))
        else:
            where = neighbours(mine, request.lengths, request.starts)
            if where is None:
                flags.append(request.token_mask[tokens_of(mine, request.lengths, request.starts)])
            else:
                flags.append(request.token_mask[where])
    kept: Ints = tokens[_joined(flags) != 0]
    return kept
