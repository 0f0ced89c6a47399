"""Turns scheduled rows into a `PoolPlan`: every integer of a step, in NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from types import NoneType
from typing import NamedTuple

import numpy as np

from penstock.scheduler.image_cache import ImageCache
from penstock.scheduler.images import PlacedRows, image_plan
from penstock.scheduler.labels import label_variant
from penstock.scheduler.pairs import pair_variant
from penstock.scheduler.ragged import consecutive_tokens, tokens_of
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import (
    CarryPlan,
    ImagePlan,
    Ints,
    KeyLimits,
    KVPlan,
    LengthGroup,
    PoolingParams,
    PoolPlan,
    RowSlice,
    Variant,
    cumulative,
    ragged_arange,
)


def build_plan(
    scheduled: Sequence[ScheduledRows], block_size: int = 0, image_cache: ImageCache | None = None
) -> PoolPlan:
    """Lay all scheduled rows out as one ragged run, ordered by length and then by cached tokens or key limit.
    Image rows follow all other rows."""
    parts = _StepParts.of(scheduled)
    lengths, num_rows = np.concatenate(parts.lengths), [len(part) for part in parts.lengths]
    num_cached = _concatenate([entry.begins for entry in scheduled], num_rows)
    keys = _key_limits(_concatenate(parts.key_limits, num_rows), lengths)
    if num_cached is not None and keys is not None:
        raise ValueError("a row that may be chunked has no key limit: its tokens attend to all before them")
    if num_cached is not None and not num_cached.any() and not _uses_blocks(scheduled):
        num_cached = None  # chunking is enabled, but all rows run whole
    token_ids = np.concatenate(parts.token_ids)
    type_ids = _concatenate(parts.type_ids, [len(part) for part in parts.token_ids])
    skip = _concatenate(parts.skip, num_rows)
    adapters = _concatenate(parts.adapters, num_rows, absent=-1)
    if adapters is not None and not (adapters >= 0).any():
        adapters = None
    has_images = not _are_absent([entry.request.images for entry in scheduled])
    is_image = _image_rows(scheduled, num_rows) if has_images else None
    rope = _rope_positions(scheduled, parts)
    second = num_cached if keys is None else keys
    order = step_row_of = np.arange(len(lengths), dtype=np.int32)
    cu_lengths = cumulative(lengths)
    if second is not None or is_image is not None or (lengths[1:] < lengths[:-1]).any():  # not in order yet
        sort_keys = [each for each in (second, lengths, is_image) if each is not None]
        order = np.lexsort(sort_keys).astype(np.int32)
        step_row_of = np.empty_like(order)
        step_row_of[order] = np.arange(len(order), dtype=np.int32)
        starts = cu_lengths[:-1][order]  # start of each row in the concatenated parts
        lengths = lengths[order]
        num_cached, keys, skip, adapters, is_image = (
            None if each is None else each[order] for each in (num_cached, keys, skip, adapters, is_image)
        )
        cu_lengths = cumulative(lengths)
        tokens = ragged_arange(starts, lengths, cu_lengths)
        token_ids, type_ids = token_ids[tokens], None if type_ids is None else type_ids[tokens]
        rope = None if rope is None else rope[tokens]
    origin = cu_lengths[:-1] if num_cached is None else cu_lengths[:-1] - num_cached
    slices = _slices(scheduled, num_rows, step_row_of)
    return PoolPlan(
        token_ids=token_ids,
        positions=np.arange(len(token_ids), dtype=np.int32) - np.repeat(origin, lengths),
        cu_lengths=cu_lengths,
        lengths=lengths,
        type_ids=type_ids,
        skip=skip,
        adapters=adapters,
        groups=_groups(lengths, cu_lengths, num_cached, keys, is_image),
        slices=slices,
        variants=_variants(slices, lengths, cu_lengths),
        kv=None if num_cached is None else _kv_plan(scheduled, order, lengths, num_cached, block_size),
        limits=None if keys is None else _limits(lengths, cu_lengths, keys),
        images=_images(slices, cu_lengths, is_image, image_cache) if has_images else None,
        rope_positions=None if rope is None else np.ascontiguousarray(rope.T).reshape(-1),
    )


def _image_rows(scheduled: Sequence[ScheduledRows], num_rows: Sequence[int]) -> Ints | None:
    """[rows], 1 where a row is an image; None if no row is an image."""
    if not any((images := entry.request.images) is not None and images.are_rows for entry in scheduled):
        return None
    parts = []
    for entry, count in zip(scheduled, num_rows, strict=True):
        images = entry.request.images
        has_image = np.isin(entry.rows, images.rows) if images is not None and images.are_rows else None
        parts.append(np.zeros(count, dtype=np.int32) if has_image is None else has_image.astype(np.int32))
    return np.concatenate(parts)


def _images(
    slices: Sequence[RowSlice], cu_lengths: Ints, is_image: Ints | None, cache: ImageCache | None
) -> ImagePlan | None:
    if cache is None:
        raise ValueError("a request with images needs an engine with a vision tower")
    placed = []
    for each in slices:
        if each.request.images is not None:
            begins = np.zeros_like(each.rows) if each.begins is None else each.begins
            ends = each.request.lengths[each.rows] if each.ends is None else each.ends
            placed.append(PlacedRows(each.request, each.rows, begins, ends, cu_lengths[each.step_rows]))
    num_text_rows = None if is_image is None else len(is_image) - int(is_image.sum())
    return image_plan(placed, cache, num_text_rows)


def _rope_positions(scheduled: Sequence[ScheduledRows], parts: _StepParts) -> Ints | None:
    """[tokens, 3]; rows without given positions use each token's index in the row. None if no row has any."""
    if _are_absent(parts.rope_positions):
        return None
    columns = []
    for entry, lengths, positions in zip(scheduled, parts.lengths, parts.rope_positions, strict=True):
        if positions is not None:
            columns.append(positions.reshape(-1, 3))
            continue
        begins = np.zeros_like(lengths) if entry.begins is None else entry.begins
        columns.append(np.repeat(ragged_arange(begins, lengths, cumulative(lengths))[:, None], 3, 1))
    return np.concatenate(columns)


def _uses_blocks(scheduled: Sequence[ScheduledRows]) -> bool:
    return any(table is not None for entry in scheduled for table in entry.tables)


class _StepParts(NamedTuple):
    """What each scheduled request runs in a step, as columns. Only the step's tokens are copied, however
    large the requests are. The fields have the names of the fields of `Request`."""

    token_ids: Sequence[Ints]
    lengths: Sequence[Ints]
    type_ids: Sequence[Ints | None]
    skip: Sequence[Ints | None]
    key_limits: Sequence[Ints | None]
    adapters: Sequence[Ints | None]
    rope_positions: Sequence[Ints | None]  # each [tokens · 3]

    @classmethod
    def of(cls, scheduled: Sequence[ScheduledRows]) -> _StepParts:
        return cls._make(zip(*map(_step_part, scheduled), strict=True))


_whole_request = attrgetter(*_StepParts._fields)
_StepPart = tuple[Ints, Ints, Ints | None, Ints | None, Ints | None, Ints | None, Ints | None]


def _step_part(entry: ScheduledRows) -> _StepPart:
    """One entry of each column of `_StepParts`."""
    request, rows = entry.request, entry.rows
    if entry.begins is None and request.num_rows == 1:
        whole: _StepPart = _whole_request(request)
        return whole
    lengths, starts = request.lengths[rows], request.starts[rows]
    if entry.begins is not None and entry.ends is not None:
        lengths, starts = entry.ends - entry.begins, starts + entry.begins
    tokens: Ints | slice | None = None
    if entry.begins is None:  # consecutive whole rows are a slice, which needs no gather
        tokens = consecutive_tokens(rows, request.lengths, request.starts)
    if tokens is None:
        tokens = ragged_arange(starts, lengths, cumulative(lengths))
    return (
        request.token_ids[tokens],
        lengths,
        None if request.type_ids is None else request.type_ids[tokens],
        None if request.skip is None else request.skip[rows],
        None if request.key_limits is None else request.key_limits[rows],
        None if request.adapters is None else request.adapters[rows],
        None if request.rope_positions is None else request.rope_positions.reshape(-1, 3)[tokens].reshape(-1),
    )


def _key_limits(keys: Ints | None, lengths: Ints) -> Ints | None:
    """How many leading tokens of each row are attended to; None if all rows attend to all their tokens."""
    if keys is None:
        return None
    keys = np.where(keys > 0, np.minimum(keys, lengths), lengths)
    return None if (keys == lengths).all() else keys


def _concatenate(arrays: Sequence[Ints | None], sizes: Sequence[int], absent: int = 0) -> Ints | None:
    """Concatenate optional arrays, with missing ones filled with `absent`; None if all are missing."""
    if _are_absent(arrays):
        return None
    return np.concatenate(
        [
            np.full(size, absent, dtype=np.int32) if array is None else array
            for array, size in zip(arrays, sizes, strict=True)
        ]
    )


def _are_absent(values: Sequence[object]) -> bool:
    """Whether all values are None. No Python loop, because this runs over all rows of every step."""
    return {*map(type, values)} <= {NoneType}


def _slices(
    scheduled: Sequence[ScheduledRows], num_rows: list[int], step_row_of: Ints
) -> tuple[RowSlice, ...]:
    if num_rows.count(1) == len(num_rows):
        step_rows: Iterable[Ints] = step_row_of[:, None]
    else:
        ends = accumulate(num_rows)
        step_rows = [step_row_of[end - count : end] for count, end in zip(num_rows, ends, strict=True)]
    return tuple(
        RowSlice(request, rows, in_step, begins, ends, cached, cached_documents)
        for (request, rows, begins, ends, _, cached, cached_documents), in_step in zip(
            scheduled, step_rows, strict=True
        )
    )


def _groups(
    lengths: Ints,
    cu_lengths: Ints,
    num_cached: Ints | None,
    limited: Ints | None,
    is_image: Ints | None = None,
) -> tuple[LengthGroup, ...]:
    changes = lengths[1:] != lengths[:-1]
    if is_image is not None:
        changes |= is_image[1:] != is_image[:-1]
    if limited is not None:
        changes |= limited[1:] != limited[:-1]
        limited = np.where(limited < lengths, limited, 0)
    if num_cached is not None:
        changes |= num_cached[1:] != num_cached[:-1]
    if not len(lengths):
        return ()
    edges = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(lengths)]])
    firsts = edges[:-1]
    keys = cu_lengths if num_cached is None else cumulative(lengths + num_cached)
    absent = np.zeros_like(firsts)
    columns = (
        firsts,
        edges[1:] - firsts,
        lengths[firsts],
        cu_lengths[firsts],
        absent if num_cached is None else num_cached[firsts],
        keys[firsts],
        absent if limited is None else limited[firsts],
    )
    return tuple(map(LengthGroup._make, zip(*(column.tolist() for column in columns), strict=True)))


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
    """Group rows by pooling parameters. A row that does not end in this step has only per-token outputs."""
    by_params: dict[PoolingParams, list[Ints]] = {}
    paired: dict[PoolingParams, list[RowSlice]] = {}
    all_rows_end = True
    has_labels = False
    for row_slice in slices:
        request = row_slice.request
        if request.pairs is not None:
            paired.setdefault(request.params, []).append(row_slice)
            continue
        for params in request.all_params if request.extra_params else (request.params,):
            rows = row_slice.step_rows
            if row_slice.ends is not None and not params.per_token:
                rows = rows[row_slice.finished]
                all_rows_end = all_rows_end and len(rows) == len(row_slice.step_rows)
            has_labels |= params.num_labels > 0
            by_params.setdefault(params, []).append(rows)
    if len(by_params) == 1 and all_rows_end and not paired and not has_labels:
        return (Variant(next(iter(by_params)), None),)
    variants = [pair_variant(params, each, lengths, cu_lengths) for params, each in paired.items()]
    for params, parts in by_params.items():
        rows = np.concatenate(parts)
        tokens = tokens_of(rows, lengths, cu_lengths) if params.reads_tokens else None
        if params.num_labels:
            variants.append(label_variant(params, rows, slices, lengths, cu_lengths))
        elif len(rows):
            variants.append(Variant(params, rows, tokens))
    return tuple(variants)


def _kv_plan(
    scheduled: Sequence[ScheduledRows], order: Ints, lengths: Ints, num_cached: Ints, block_size: int
) -> KVPlan:
    """Where keys and values are read from and written to, for the rows in step order."""
    unordered = [table for entry in scheduled for table in (entry.tables or (None,) * len(entry.rows))]
    row_lengths = np.concatenate([entry.request.lengths[entry.rows] for entry in scheduled])[order]
    tables = [unordered[row] for row in order]
    has_table = np.array([table is not None for table in tables], dtype=bool)
    block_tables = np.zeros((len(tables), max((len(t) for t in tables if t), default=1)), dtype=np.int32)
    for row, table in enumerate(tables):
        if table is not None:
            block_tables[row, : len(table)] = table
    num_keys = lengths + num_cached
    cu_keys, cu_lengths = cumulative(num_keys), cumulative(lengths)
    num_written = np.where(has_table, lengths, 0).astype(np.int32)
    chunked = np.flatnonzero(has_table & ((num_keys < row_lengths) | (num_cached > 0))).astype(np.int32)
    size = max(block_size, 1)

    def cache_slots(rows: Ints, positions: Ints) -> Ints:
        return block_tables[rows, positions // size] * size + positions % size

    rows = np.arange(len(lengths), dtype=np.int32)
    cu_cached, cu_written = cumulative(num_cached), cumulative(num_written)
    cached_positions = ragged_arange(np.zeros_like(num_cached), num_cached, cu_cached)
    written_positions = ragged_arange(num_cached, num_written, cu_written)
    write_tokens = ragged_arange(cu_lengths[:-1], num_written, cu_written)
    write_slots = cache_slots(np.repeat(rows, num_written), written_positions)
    token_slots = np.full(cu_lengths[-1], -1, dtype=np.int32)
    token_slots[write_tokens] = write_slots
    carry = None
    if len(chunked):
        carry = CarryPlan(chunked, block_tables[chunked, 0], (num_cached[chunked] > 0).astype(np.int32))
    return KVPlan(
        cu_keys=cu_keys,
        max_keys=int(num_keys.max()),
        new_key_at=ragged_arange(cu_keys[:-1] + num_cached, lengths, cu_lengths),
        cached_key_at=ragged_arange(cu_keys[:-1], num_cached, cu_cached),
        read_slots=cache_slots(np.repeat(rows, num_cached), cached_positions),
        write_tokens=write_tokens,
        write_slots=write_slots,
        token_slots=token_slots,
        carry=carry,
    )
