"""Sparse rows as clients want them: token ids and weights, heaviest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.types import MAX_TERMS, Array, Ints, PoolingParams, Request


class SparseRow(NamedTuple):
    ids: Ints  # [terms]
    weights: NDArray[np.float32]  # [terms], falling

    def as_dict(self) -> dict[int, float]:
        return dict(zip(self.ids.tolist(), self.weights.tolist(), strict=True))


class Term(NamedTuple):
    token_id: int
    token: str | None  # None: an id that the tokenizer has no token for
    weight: float


def check_min_weight(min_weight: float) -> None:
    if not (math.isfinite(min_weight) and min_weight >= 0):
        raise BadValue(f"min_weight is {min_weight}; it must be 0 or more", param="min_weight")


def sparse_rows(
    request: Request,
    values: Array,
    special_ids: Ints,
    top_k: int | None,
    min_weight: float,
    params: PoolingParams | None = None,
) -> list[SparseRow]:
    """The rows of an answer, whichever of the two ways the model weighs tokens. `params` say which
    of the request's outputs it is, if not the first."""
    if (params or request.params).lexical:
        pairs = lexical_terms(request.token_ids, request.lengths, values[:, 0], special_ids)
    else:
        pairs = _listed_terms(values)
    rows, ids, weights = pairs
    kept = (weights > 0) & (weights >= min_weight)
    rows, ids, weights = rows[kept], ids[kept], weights[kept]
    ends = np.searchsorted(rows, np.arange(request.num_rows + 1))
    most = top_k or MAX_TERMS
    return [
        SparseRow(ids[begin : min(end, begin + most)], weights[begin : min(end, begin + most)])
        for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]


Terms = tuple[Ints, Ints, NDArray[np.float32]]  # row, token id, weight of each term: by row, heaviest first


def _listed_terms(values: Array) -> Terms:
    """From [rows, terms, 2], which is in order."""
    count, terms, _ = values.shape
    rows = np.repeat(np.arange(count, dtype=np.int32), terms)
    flat = values.reshape(-1, 2).astype(np.float32, copy=False)
    return rows, flat[:, 0].astype(np.int32), flat[:, 1]


def lexical_terms(token_ids: Ints, lengths: Ints, weights: Array, special_ids: Ints) -> Terms:
    """A token that a row has several times weighs as its heaviest place does; special ones are left out."""
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    own = ~np.isin(token_ids, special_ids)
    rows, ids, heavy = rows[own], token_ids[own], weights[own].astype(np.float32, copy=False)
    order = np.lexsort((-heavy, ids, rows))
    rows, ids, heavy = rows[order], ids[order], heavy[order]
    first = np.ones(len(ids), dtype=bool)
    first[1:] = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1])
    rows, ids, heavy = rows[first], ids[first], heavy[first]
    order = np.lexsort((-heavy, rows))
    return rows[order], ids[order], heavy[order]


def with_tokens(
    rows: Sequence[SparseRow], token_strings: Callable[[list[int]], list[str | None]]
) -> list[list[Term]]:
    """Each row's terms with their token strings, which are looked up in one go."""
    ids = np.concatenate([row.ids for row in rows]).tolist() if rows else []
    tokens = iter(token_strings(ids))
    return [
        [Term(i, next(tokens), w) for i, w in zip(row.ids.tolist(), row.weights.tolist(), strict=True)]
        for row in rows
    ]
