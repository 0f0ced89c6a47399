"""The plan of a step's scores: which documents are scored against which queries, and where both lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core import Held, Ints, PairPlan, PoolingParams, RowSlice, Variant, cumulative
from penstock.scheduler.ragged import runs, tokens_of

_NONE = np.zeros(0, dtype=np.int32)


class _Part(NamedTuple):
    """What one request brings to the scores of a step."""

    piece: RowSlice
    queries: Ints  # rows of the request that end in this step
    query_slots: Ints
    documents: Ints
    document_slots: Ints
    stored: Ints


def pair_variant(
    params: PoolingParams, pieces: Sequence[RowSlice], lengths: Ints, cu_lengths: Ints
) -> Variant:
    """The scores of all these requests, as one variant."""
    parts = [_part(piece) for piece in pieces]
    tokens: Ints | None = None
    if not params.late:  # a row has one vector, and that is its number in the step
        query_starts = [part.query_slots for part in parts]
        document_starts = [part.document_slots for part in parts]
    elif all(part.piece.request.keep is None for part in parts):
        query_starts = [cu_lengths[part.query_slots] for part in parts]
        document_starts = [cu_lengths[part.document_slots] for part in parts]
    else:
        tokens, query_starts, document_starts = _kept_run(parts, lengths, cu_lengths)
    counts = np.array([part.piece.request.num_queries for part in parts], dtype=np.int32)
    placed = list(zip(parts, cumulative(counts)[:-1].tolist(), document_starts, strict=True))
    run = [_against(part, base, part.documents, starts) for part, base, starts in placed]
    store = [_against(part, base, part.stored, _held(part).starts[part.stored]) for part, base, _ in placed]
    columns = [np.concatenate(column) for column in zip(*run, *store, strict=True)]
    write_from, write_to = _writes(parts, query_starts, document_starts)
    query_lengths = _of_queries(parts, "lengths")
    plan = PairPlan(
        query_starts=_of_queries(parts, "starts"),
        query_lengths=query_lengths,
        pair_queries=columns[0],
        document_starts=columns[1],
        document_lengths=columns[2],
        write_from=write_from,
        write_to=write_to,
        from_store=sum(len(part.stored) for part in parts),
        max_query=int(query_lengths.max(initial=0)),
        max_document=int(columns[2].max(initial=0)),
    )
    return Variant(params, np.concatenate([part.document_slots for part in parts]), tokens, plan)


def _part(piece: RowSlice) -> _Part:
    done, first_document = piece.finished, piece.request.num_queries
    rows, slots = piece.rows[done], piece.slots[done]
    query = rows < first_document
    stored = _NONE if piece.stored is None else piece.stored
    return _Part(piece, rows[query], slots[query], rows[~query], slots[~query], stored)


def _held(part: _Part) -> Held:
    assert part.piece.held is not None, "a request with pairs is scheduled with places"
    return part.piece.held


def _of_queries(parts: list[_Part], name: str) -> Ints:
    return np.concatenate([getattr(_held(part), name)[: part.piece.request.num_queries] for part in parts])


def _against(part: _Part, base: int, documents: Ints, starts: Ints) -> tuple[Ints, Ints, Ints]:
    """The query of each pair, counted over all requests; start and length of its document."""
    request = part.piece.request
    assert request.pairs is not None
    query = request.pairs[documents - request.num_queries]
    return query + base, starts, _held(part).lengths[documents]


def _kept_run(parts: list[_Part], lengths: Ints, cu_lengths: Ints) -> tuple[Ints, list[Ints], list[Ints]]:
    """The tokens whose vectors count, request after request, and where each row begins among them."""
    tokens: list[Ints] = []
    query_starts: list[Ints] = []
    document_starts: list[Ints] = []
    at = 0
    for part in parts:
        request, held = part.piece.request, _held(part)
        for rows, slots, starts in (
            (part.queries, part.query_slots, query_starts),
            (part.documents, part.document_slots, document_starts),
        ):
            chosen = tokens_of(slots, lengths, cu_lengths)
            if request.keep is not None:
                chosen = chosen[request.keep[tokens_of(rows, request.lengths, request.starts)] != 0]
            tokens.append(chosen)
            starts.append(at + cumulative(held.lengths[rows])[:-1])
            at += len(chosen)
    return np.concatenate(tokens), query_starts, document_starts


def _writes(parts: list[_Part], query_starts: list[Ints], document_starts: list[Ints]) -> tuple[Ints, Ints]:
    """Which vectors of the run are kept where: those of queries, and of documents that have a place."""
    sources, targets = [], []
    for part, queries, documents in zip(parts, query_starts, document_starts, strict=True):
        held = _held(part)
        placed = held.starts[part.documents] >= 0
        rows = np.concatenate([part.queries, part.documents[placed]])
        starts = np.concatenate([queries, documents[placed]])
        sources.append(runs(starts, held.lengths[rows]))
        targets.append(runs(held.starts[rows], held.lengths[rows]))
    return np.concatenate(sources), np.concatenate(targets)
