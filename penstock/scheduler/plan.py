"""From the scheduler's shares to a `StepPlan`: every integer of a step, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core import Ints, LengthGroup, PoolingParams, RowSlice, StepPlan, Variant, cumulative
from penstock.scheduler.scheduler import Share


def build_plan(shares: Sequence[Share]) -> StepPlan:
    """Lay the rows of all shares out as one ragged run, ordered by length."""
    pieces = [_piece(share) for share in shares]
    lengths = np.concatenate([piece.lengths for piece in pieces])
    order = np.argsort(lengths, kind="stable").astype(np.int32)
    slot_of = np.empty_like(order)
    slot_of[order] = np.arange(len(order), dtype=np.int32)

    source = cumulative(lengths)[:-1][order]  # where each row begins in the joined pieces
    lengths = lengths[order]
    cu_lengths = cumulative(lengths)
    where = ragged_arange(source, lengths, cu_lengths)
    slices, end = [], 0
    for share in shares:
        slices.append(RowSlice(share.request, share.rows, slot_of[end : end + len(share.rows)]))
        end += len(share.rows)
    return StepPlan(
        token_ids=np.concatenate([piece.token_ids for piece in pieces])[where],
        positions=np.arange(len(where), dtype=np.int32) - np.repeat(cu_lengths[:-1], lengths),
        cu_lengths=cu_lengths,
        lengths=lengths,
        type_ids=_joined([piece.type_ids for piece in pieces], [len(p.token_ids) for p in pieces], where),
        skip=_joined([piece.skip for piece in pieces], [len(p.lengths) for p in pieces], order),
        groups=_groups(lengths, cu_lengths),
        slices=tuple(slices),
        variants=_variants(slices, lengths, cu_lengths),
    )


def ragged_arange(starts: Ints, lengths: Ints, cu_lengths: Ints) -> Ints:
    """For each row the indices start, start + 1, … of its length, all rows joined."""
    shift = np.repeat(starts - cu_lengths[:-1], lengths)
    return shift + np.arange(len(shift), dtype=np.int32)


class _Piece(NamedTuple):
    """The rows of one share, compact: only what this step runs, however large the request."""

    token_ids: Ints
    lengths: Ints
    type_ids: Ints | None
    skip: Ints | None


def _piece(share: Share) -> _Piece:
    request, rows = share.request, share.rows
    if request.num_rows == 1:
        return _Piece(request.token_ids, request.lengths, request.type_ids, request.skip)
    lengths = request.lengths[rows]
    where = ragged_arange(request.starts[rows], lengths, cumulative(lengths))
    return _Piece(
        request.token_ids[where],
        lengths,
        None if request.type_ids is None else request.type_ids[where],
        None if request.skip is None else request.skip[rows],
    )


def _joined(parts: list[Ints | None], sizes: list[int], order: Ints) -> Ints | None:
    """Optional per-token or per-row integers of all pieces; absent parts are zeros."""
    if all(part is None for part in parts):
        return None
    filled = [
        np.zeros(n, dtype=np.int32) if part is None else part for part, n in zip(parts, sizes, strict=True)
    ]
    return np.concatenate(filled)[order]


def _groups(lengths: Ints, cu_lengths: Ints) -> tuple[LengthGroup, ...]:
    firsts = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(firsts, append=len(lengths))
    return tuple(
        LengthGroup(int(first), int(count), int(lengths[first]), int(cu_lengths[first]))
        for first, count in zip(firsts, counts, strict=True)
    )


def _variants(slices: Sequence[RowSlice], lengths: Ints, cu_lengths: Ints) -> tuple[Variant, ...]:
    by_params: dict[PoolingParams, list[Ints]] = {}
    for piece in slices:
        by_params.setdefault(piece.request.params, []).append(piece.slots)
    if len(by_params) == 1:
        return (Variant(next(iter(by_params)), None),)
    variants = []
    for params, slots in by_params.items():
        rows = np.concatenate(slots)
        variants.append(
            Variant(params, rows, tokens_of(rows, lengths, cu_lengths) if params.task.per_token else None)
        )
    return tuple(variants)


def tokens_of(rows: Ints, lengths: Ints, cu_lengths: Ints) -> Ints:
    """The places in the flat run of all tokens of these rows, row after row."""
    chosen = lengths[rows]
    return ragged_arange(cu_lengths[rows], chosen, cumulative(chosen))
