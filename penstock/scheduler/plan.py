"""From the scheduler's shares to a `StepPlan`: every integer of a step, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core import (
    Ints,
    KeyLimits,
    KVPlan,
    LengthGroup,
    PoolingParams,
    RowSlice,
    StepPlan,
    Variant,
    cumulative,
)
from penstock.scheduler.pairs import pair_variant
from penstock.scheduler.ragged import ragged_arange, tokens_of
from penstock.scheduler.scheduler import Share


def build_plan(shares: Sequence[Share], block_size: int = 0) -> StepPlan:
    """Lay the rows of all shares out as one ragged run, ordered by length and then by context or keys."""
    pieces = [_piece(share) for share in shares]
    lengths = np.concatenate([piece.lengths for piece in pieces])
    context = _joined([piece.context for piece in pieces], [len(p.lengths) for p in pieces])
    keys = _attended(pieces, lengths)
    if context is not None and keys is not None:
        raise ValueError("a row that may be cut has no key limit: its tokens attend to all before them")
    if context is not None and not context.any() and not _keeps(shares):
        context = None  # rows might have been cut, but all run whole
    second = context if keys is None else keys
    if second is None:
        order = np.argsort(lengths, kind="stable").astype(np.int32)
    else:
        order = np.lexsort((second, lengths)).astype(np.int32)
        context = None if context is None else context[order]
        keys = None if keys is None else keys[order]
    slot_of = np.empty_like(order)
    slot_of[order] = np.arange(len(order), dtype=np.int32)

    source = cumulative(lengths)[:-1][order]  # where each row begins in the joined pieces
    lengths = lengths[order]
    cu_lengths = cumulative(lengths)
    where = ragged_arange(source, lengths, cu_lengths)
    first = cu_lengths[:-1] if context is None else cu_lengths[:-1] - context
    slices = _slices(shares, slot_of)
    tokens = [len(piece.token_ids) for piece in pieces]
    type_ids = _joined([piece.type_ids for piece in pieces], tokens)
    skip = _joined([piece.skip for piece in pieces], [len(piece.lengths) for piece in pieces])
    return StepPlan(
        token_ids=np.concatenate([piece.token_ids for piece in pieces])[where],
        positions=np.arange(len(where), dtype=np.int32) - np.repeat(first, lengths),
        cu_lengths=cu_lengths,
        lengths=lengths,
        type_ids=None if type_ids is None else type_ids[where],
        skip=None if skip is None else skip[order],
        adapters=_adapters(shares, order),
        groups=_groups(lengths, cu_lengths, context, keys),
        slices=slices,
        variants=_variants(slices, lengths, cu_lengths),
        kv=None if context is None else _kv_plan(shares, order, lengths, context, block_size),
        limits=None if keys is None else _limits(lengths, cu_lengths, keys),
    )


def _keeps(shares: Sequence[Share]) -> bool:
    return any(table is not None for share in shares for table in share.tables)


class _Piece(NamedTuple):
    """The tokens of one share, compact: only what this step runs, however large the request."""

    token_ids: Ints
    lengths: Ints
    context: Ints | None
    type_ids: Ints | None
    skip: Ints | None
    keys: Ints | None


def _piece(share: Share) -> _Piece:
    request, rows = share.request, share.rows
    if share.begins is None and request.num_rows == 1:
        whole = (request.type_ids, request.skip, request.keys)
        return _Piece(request.token_ids, request.lengths, None, *whole)
    lengths, starts = request.lengths[rows], request.starts[rows]
    if share.begins is not None and share.ends is not None:
        lengths, starts = share.ends - share.begins, starts + share.begins
    where = ragged_arange(starts, lengths, cumulative(lengths))
    return _Piece(
        request.token_ids[where],
        lengths,
        share.begins,
        None if request.type_ids is None else request.type_ids[where],
        None if request.skip is None else request.skip[rows],
        None if request.keys is None else request.keys[rows],
    )


def _attended(pieces: Sequence[_Piece], lengths: Ints) -> Ints | None:
    """How many leading tokens of each row are attended to; None where it is all of every row."""
    keys = _joined([piece.keys for piece in pieces], [len(piece.lengths) for piece in pieces])
    if keys is None:
        return None
    keys = np.where(keys > 0, np.minimum(keys, lengths), lengths)
    return None if (keys == lengths).all() else keys


def _adapters(shares: Sequence[Share], order: Ints) -> Ints | None:
    if all(share.request.adapters is None for share in shares):
        return None
    none = np.full(len(order), -1, dtype=np.int32)
    parts = [
        none[: len(share.rows)] if share.request.adapters is None else share.request.adapters[share.rows]
        for share in shares
    ]
    return np.concatenate(parts)[order]


def _joined(parts: list[Ints | None], sizes: list[int]) -> Ints | None:
    """Optional integers of all pieces; absent parts are zeros, and all absent is None."""
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [np.zeros(n, dtype=np.int32) if part is None else part for part, n in zip(parts, sizes, strict=True)]
    )


def _slices(shares: Sequence[Share], slot_of: Ints) -> tuple[RowSlice, ...]:
    slices, at = [], 0
    for share in shares:
        slots = slot_of[at : at + len(share.rows)]
        slices.append(
            RowSlice(share.request, share.rows, slots, share.begins, share.ends, share.held, share.stored)
        )
        at += len(share.rows)
    return tuple(slices)


def _groups(
    lengths: Ints, cu_lengths: Ints, context: Ints | None, limited: Ints | None
) -> tuple[LengthGroup, ...]:
    changes = np.diff(lengths, prepend=-1) != 0
    if limited is not None:
        changes |= np.diff(limited, prepend=-1) != 0
        limited = np.where(limited < lengths, limited, 0)
    if context is not None:
        changes |= np.diff(context, prepend=-1) != 0
    firsts = np.flatnonzero(changes)
    counts = np.diff(firsts, append=len(lengths))
    if context is None:
        context, keys = np.zeros_like(lengths), cu_lengths
    else:
        keys = cumulative(lengths + context)
    return tuple(
        LengthGroup(
            int(first),
            int(count),
            int(lengths[first]),
            int(cu_lengths[first]),
            int(context[first]),
            int(keys[first]),
            0 if limited is None else int(limited[first]),
        )
        for first, count in zip(firsts, counts, strict=True)
    )


def _limits(lengths: Ints, cu_lengths: Ints, keys: Ints) -> KeyLimits:
    rows = np.flatnonzero(keys < lengths).astype(np.int32)
    cu_keys = cumulative(keys[rows])
    return KeyLimits(
        tokens=tokens_of(rows, lengths, cu_lengths),
        cu_lengths=cumulative(lengths[rows]),
        keys=ragged_arange(cu_lengths[rows], keys[rows], cu_keys),
        cu_keys=cu_keys,
        max_length=int(lengths[rows].max()),
        max_keys=int(keys[rows].max()),
    )


def _variants(slices: Sequence[RowSlice], lengths: Ints, cu_lengths: Ints) -> tuple[Variant, ...]:
    """Rows by the finish they want. Rows that do not end in this step give their tokens, if those are
    what is asked, and nothing else."""
    by_params: dict[PoolingParams, list[Ints]] = {}
    paired: dict[PoolingParams, list[RowSlice]] = {}
    whole = True
    for piece in slices:
        if piece.request.pairs is not None:
            paired.setdefault(piece.request.params, []).append(piece)
            continue
        for params in piece.request.wants:
            slots = piece.slots
            if piece.ends is not None and not params.per_token:
                slots = slots[piece.finished]
                whole = whole and len(slots) == len(piece.slots)
            by_params.setdefault(params, []).append(slots)
    if len(by_params) == 1 and whole and not paired:
        return (Variant(next(iter(by_params)), None),)
    variants = [pair_variant(params, pieces, lengths, cu_lengths) for params, pieces in paired.items()]
    for params, parts in by_params.items():
        rows = np.concatenate(parts)
        tokens = tokens_of(rows, lengths, cu_lengths) if params.reads_tokens else None
        if len(rows):
            variants.append(Variant(params, rows, tokens))
    return tuple(variants)


def _kv_plan(shares: Sequence[Share], order: Ints, lengths: Ints, context: Ints, block_size: int) -> KVPlan:
    """Where keys and values are read from and kept, for the rows in the order of the step."""
    unordered = [table for share in shares for table in (share.tables or (None,) * len(share.rows))]
    totals = np.concatenate([share.request.lengths[share.rows] for share in shares])[order]
    tables = [unordered[row] for row in order]
    kept = np.array([table is not None for table in tables], dtype=bool)
    blocks = np.zeros((len(tables), max((len(t) for t in tables if t), default=1)), dtype=np.int32)
    for row in np.flatnonzero(kept):
        table = tables[row]
        assert table is not None
        blocks[row, : len(table)] = table
    keys = lengths + context
    cu_keys, cu_lengths = cumulative(keys), cumulative(lengths)
    write = np.where(kept, lengths, 0).astype(np.int32)
    cut = np.flatnonzero(kept & ((keys < totals) | (context > 0))).astype(np.int32)
    size = max(block_size, 1)

    def slots(rows: Ints, places: Ints) -> Ints:
        return blocks[rows, places // size] * size + places % size

    rows = np.arange(len(lengths), dtype=np.int32)
    zeros = np.zeros_like(context)
    old = ragged_arange(zeros, context, cumulative(context))
    written = ragged_arange(context, write, cumulative(write))
    return KVPlan(
        cu_keys=cu_keys,
        max_keys=int(keys.max()),
        new_at=ragged_arange(cu_keys[:-1] + context, lengths, cu_lengths),
        old_at=ragged_arange(cu_keys[:-1], context, cumulative(context)),
        read_slots=slots(np.repeat(rows, context), old),
        write_tokens=ragged_arange(cu_lengths[:-1], write, cumulative(write)),
        write_slots=slots(np.repeat(rows, write), written),
        carry_rows=cut,
        carry_slots=blocks[cut, 0],
        carry_old=(context[cut] > 0).astype(np.int32),
    )
