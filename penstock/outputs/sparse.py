"""Sparse rows: token ids and weights, heaviest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.types import MAX_TERMS, Array, Ints, PoolingParams, Request

_MAX_WEIGHT = float(np.finfo(np.float32).max)


class SparseRow(NamedTuple):
    ids: Ints  # [terms]
    weights: NDArray[np.float32]  # [terms], descending

    def as_dict(self) -> dict[int, float]:
        return dict(zip(self.ids.tolist(), self.weights.tolist(), strict=True))


class Term(NamedTuple):
    token_id: int
    token: str | None  # None if the tokenizer has no token with this id
    weight: float


def check_min_weight(min_weight: float) -> None:
    if not 0 <= min_weight <= _MAX_WEIGHT:
        raise BadValue(f"min_weight is {min_weight}; use 0 to {_MAX_WEIGHT:.2g}", param="min_weight")


def sparse_rows(
    request: Request,
    values: Array,
    special_ids: Ints,
    top_k: int | None,
    min_weight: float,
    params: PoolingParams | None = None,
) -> list[SparseRow]:
    """The sparse rows of an output, for lexical models and for models that weight the vocabulary.

    `params` select the output if it is not the request's first one.
    """
    if (params or request.params).lexical:
        terms = lexical_terms(request.token_ids, request.lengths, values[:, 0], special_ids)
    else:
        terms = _vocabulary_terms(values)
    rows, ids, weights = terms
    kept = (weights > 0) & (weights >= min_weight)
    rows, ids, weights = rows[kept], ids[kept], weights[kept]
    ends = np.searchsorted(rows, np.arange(request.num_rows + 1))
    max_terms = top_k or MAX_TERMS
    return [
        SparseRow(ids[begin : min(end, begin + max_terms)], weights[begin : min(end, begin + max_terms)])
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


# Row, token id and weight of each term, by row, heaviest first.
Terms = tuple[Ints, Ints, NDArray[np.float32]]


def _vocabulary_terms(values: Array) -> Terms:
    """The terms of an output [rows, terms, 2], which are already in order."""
    count, terms, _ = values.shape
    rows = np.repeat(np.arange(count, dtype=np.int32), terms)
    flat = values.reshape(-1, 2).astype(np.float32, copy=False)
    return rows, flat[:, 0].astype(np.int32), flat[:, 1]


def lexical_terms(token_ids: Ints, lengths: Ints, weights: Array, special_ids: Ints) -> Terms:
    """The terms of each row, without special tokens. A repeated token keeps its largest weight."""
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    kept = ~np.isin(token_ids, special_ids)
    rows, ids, kept_weights = rows[kept], token_ids[kept], weights[kept].astype(np.float32, copy=False)
    order = np.lexsort((-kept_weights, ids, rows))
    rows, ids, kept_weights = rows[order], ids[order], kept_weights[order]
    is_first = np.ones(len(ids), dtype=bool)
    is_first[1:] = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1])
    rows, ids, kept_weights = rows[is_first], ids[is_first], kept_weights[is_first]
    order = np.lexsort((-kept_weights, rows))
    return rows[order], ids[order], kept_weights[order]


def with_tokens(
    rows: Sequence[SparseRow], token_strings: Callable[[list[int]], list[str | None]]
) -> list[list[Term]]:
    """The terms of each row with their token strings, looked up in one call."""
    ids = np.concatenate([row.ids for row in rows]).tolist() if rows else []
    tokens = iter(token_strings(ids))
    return [
        [Term(i, next(tokens), w) for i, w in zip(row.ids.tolist(), row.weights.tolist(), strict=True)]
        for row in rows
    ]
