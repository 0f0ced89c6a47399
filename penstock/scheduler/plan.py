"""From the scheduler's shares to a `PoolPlan`: every integer of a step, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.scheduler.pairs import pair_variant
from penstock.scheduler.ragged import neighbours, ragged_arange, tokens_of
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import (
    CarryPlan,
    Ints,
    KeyLimits,
    KVPlan,
    LengthGroup,
    PoolingParams,
    PoolPlan,
    RowSlice,
    Variant,
    cumulative,
)


def build_plan(shares: Sequence[ScheduledRows], block_size: int = 0) -> PoolPlan:
    """Lay the rows of all shares out as one ragged run, ordered by length and then by context or keys."""
    pieces = [_piece(share) for share in shares]
    lengths = np.concatenate([piece.lengths for piece in pieces])
    context = _joined(pieces, "context")
    keys = _attended(_joined(pieces, "keys"), lengths)
    if context is not None and keys is not None:
        raise ValueError("a row that may be cut has no key limit: its tokens attend to all before them")
    if context is not None and not context.any() and not _keeps(shares):
        context = None  # rows might have been cut, but all run whole
    token_ids = np.concatenate([piece.token_ids for piece in pieces])
    type_ids, skip, adapters = (_joined(pieces, name) for name in ("type_ids", "skip", "adapters"))
    second = context if keys is None else keys
    order = slot_of = np.arange(len(lengths), dtype=np.int32)
    cu_lengths = cumulative(lengths)
    if second is not None or (lengths[1:] < lengths[:-1]).any():  # not in order as they come
        order = np.lexsort((lengths,) if second is None else (second, lengths)).astype(np.int32)
        slot_of = np.empty_like(order)
        slot_of[order] = np.arange(len(order), dtype=np.int32)
        source = cu_lengths[:-1][order]  # where each row begins in the joined pieces
        lengths = lengths[order]
        context, keys, skip, adapters = (
            None if each is None else each[order] for each in (context, keys, skip, adapters)
        )
        cu_lengths = cumulative(lengths)
        where = ragged_arange(source, lengths, cu_lengths)
        token_ids, type_ids = token_ids[where], None if type_ids is None else type_ids[where]
    first = cu_lengths[:-1] if context is None else cu_lengths[:-1] - context
    slices = _slices(shares, slot_of)
    return PoolPlan(
        token_ids=token_ids,
        positions=np.arange(len(token_ids), dtype=np.int32) - np.repeat(first, lengths),
        cu_lengths=cu_lengths,
        lengths=lengths,
        type_ids=type_ids,
        skip=skip,
        adapters=adapters,
        groups=_groups(lengths, cu_lengths, context, keys),
        slices=slices,
        variants=_variants(slices, lengths, cu_lengths),
        kv=None if context is None else _kv_plan(shares, order, lengths, context, block_size),
        limits=None if keys is None else _limits(lengths, cu_lengths, keys),
    )


def _keeps(shares: Sequence[ScheduledRows]) -> bool:
    return any(table is not None for share in shares for table in share.tables)


class _Piece(NamedTuple):
    """The tokens of one share, compact: only what this step runs, however large the request."""

    token_ids: Ints
    lengths: Ints
    context: Ints | None
    type_ids: Ints | None
    skip: Ints | None
    keys: Ints | None
    adapters: Ints | None


def _piece(share: ScheduledRows) -> _Piece:
    request, rows = share.request, share.rows
    if share.begins is None and request.num_rows == 1:
        whole = (request.token_ids, request.lengths, None, request.type_ids, request.skip, request.key_limits)
        return _Piece(*whole, request.adapters)
    lengths, starts = request.lengths[rows], request.starts[rows]
    if share.begins is not None and share.ends is not None:
        lengths, starts = share.ends - share.begins, starts + share.begins
    where: Ints | slice | None = None
    if share.begins is None:  # then nothing may have to be gathered
        where = neighbours(rows, request.lengths, request.starts)
    if where is None:
        where = ragged_arange(starts, lengths, cumulative(lengths))
    return _Piece(
        request.token_ids[where],
        lengths,
        share.begins,
        None if request.type_ids is None else request.type_ids[where],
        None if request.skip is None else request.skip[rows],
        None if request.key_limits is None else request.key_limits[rows],
        None if request.adapters is None else request.adapters[rows],
    )


def _attended(keys: Ints | None, lengths: Ints) -> Ints | None:
    """How many leading tokens of each row are attended to; None where it is all of every row."""
    if keys is None:
        return None
    keys = np.where(keys > 0, np.minimum(keys, lengths), lengths)
    return None if (keys == lengths).all() else keys


_ABSENT = {"type_ids": 0, "skip": 0, "keys": 0, "context": 0, "adapters": -1}


def _joined(pieces: Sequence[_Piece], name: str) -> Ints | None:
    """Optional integers of all pieces; those that a piece lacks mean "none", and all lacking is None."""
    parts: list[Ints | None] = [getattr(piece, name) for piece in pieces]
    if all(part is None for part in parts):
        return None
    sizes = (len(piece.token_ids if name == "type_ids" else piece.lengths) for piece in pieces)
    return np.concatenate(
        [
            np.full(size, _ABSENT[name], dtype=np.int32) if part is None else part
            for part, size in zip(parts, sizes, strict=True)
        ]
    )


def _slices(shares: Sequence[ScheduledRows], slot_of: Ints) -> tuple[RowSlice, ...]:
    slices, at = [], 0
    for share in shares:
        end = at + len(share.rows)
        slots = slot_of[at:end]
        slices.append(
            RowSlice(
                share.request,
                share.rows,
                slots,
                share.begins,
                share.ends,
                share.cached,
                share.cached_documents,
            )
        )
        at = end
    return tuple(slices)


def _groups(
    lengths: Ints, cu_lengths: Ints, context: Ints | None, limited: Ints | None
) -> tuple[LengthGroup, ...]:
    changes = lengths[1:] != lengths[:-1]
    if limited is not None:
        changes |= limited[1:] != limited[:-1]
        limited = np.where(limited < lengths, limited, 0)
    if context is not None:
        changes |= context[1:] != context[:-1]
    if not len(lengths):
        return ()
    firsts = [0, *(np.flatnonzero(changes) + 1).tolist()]
    ends = [*firsts[1:], len(lengths)]
    keys = cu_lengths if context is None else cumulative(lengths + context)
    return tuple(
        LengthGroup(
            first,
            end - first,
            int(lengths[first]),
            int(cu_lengths[first]),
            0 if context is None else int(context[first]),
            int(keys[first]),
            0 if limited is None else int(limited[first]),
        )
        for first, end in zip(firsts, ends, strict=True)
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
        for params in piece.request.all_params:
            slots = piece.step_rows
            if piece.ends is not None and not params.per_token:
                slots = slots[piece.finished]
                whole = whole and len(slots) == len(piece.step_rows)
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


def _kv_plan(
    shares: Sequence[ScheduledRows], order: Ints, lengths: Ints, context: Ints, block_size: int
) -> KVPlan:
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
    write_tokens = ragged_arange(cu_lengths[:-1], write, cumulative(write))
    write_slots = slots(np.repeat(rows, write), written)
    token_slots = np.full(cu_lengths[-1], -1, dtype=np.int32)
    token_slots[write_tokens] = write_slots
    return KVPlan(
        cu_keys=cu_keys,
        max_keys=int(keys.max()),
        new_key_at=ragged_arange(cu_keys[:-1] + context, lengths, cu_lengths),
        cached_key_at=ragged_arange(cu_keys[:-1], context, cumulative(context)),
        read_slots=slots(np.repeat(rows, context), old),
        write_tokens=write_tokens,
        write_slots=write_slots,
        token_slots=token_slots,
        carry=CarryPlan(cut, blocks[cut, 0], (context[cut] > 0).astype(np.int32)) if len(cut) else None,
    )
