"""A request between its first step and its answer: where the rows of steps go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.types import Array, Ints, PoolingParams, PoolPlan, Request, RowSlice, split_rows

Empty = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # makes an array of a shape and a type
Part = Array | list[Array]  # what a slice gets of an output: its rows, or for each of them its tokens
_NOTHING: Array = np.empty((0, 0), dtype=np.float32)


@dataclass(slots=True, eq=False)
class Progress:
    """A request on its way: its rows arrive over one or more steps, or from another request.

    `job` is what is run for it: itself, or the rows of it that no one else computes.
    """

    request: Request
    job: Request
    values: list[Array | None]  # of the job, for each of `wants`
    rows_done: int = 0
    first_launch_s: float | None = None
    device_s: float = 0.0
    source: Ints | None = None  # [rows], the row of the job that each is; -1: it comes from elsewhere
    waits_for: int = 0  # requests whose rows it still needs
    received: list[tuple[Progress, Follower]] = field(default_factory=list)  # whose rows have come
    followers: list[Follower] = field(default_factory=list)
    hidden: bool = False  # run for its followers alone; nobody asked under this id
    kind: tuple[object, ...] = ()  # with `keys`, how others find the rows that they may follow
    keys: list[bytes] = field(default_factory=list)
    empty: Empty = np.empty  # where its values are to lie

    @classmethod
    def of(cls, request: Request, job: Request | None = None, source: Ints | None = None) -> Progress:
        return cls(request, job or request, [None] * len(request.wants), source=source)

    @property
    def complete(self) -> bool:
        needed = self.job.num_rows - self.job.num_queries
        return self.rows_done == needed and not self.waits_for

    def store(self, piece: RowSlice, values: Sequence[Part]) -> None:
        """Rows of a step, each part for one of `wants`. They are copied: the step's memory is used again."""
        if piece.request.pairs is not None:
            rows = documents_of(piece)
            self.rows_done += len(rows)
            self._put(0, rows - self.job.num_queries, _rows(values[0]), len(piece.request.pairs))
            return
        if piece.ends is None and self.job.num_rows == 1:
            self.rows_done = 1
            self.values = [self._copied(part[0] if isinstance(part, list) else part) for part in values]
            return
        finished = piece.finished
        self.rows_done += len(finished)
        for number, part in enumerate(values):
            if isinstance(part, list):
                starts = piece.request.starts[piece.rows]
                starts = starts if piece.begins is None else starts + piece.begins
                self._put_runs(number, starts, part, self.job.num_tokens)
            else:
                self._put(number, piece.rows[finished], part, self.job.num_rows)

    def _copied(self, array: Array) -> Array:
        values = self.empty(array.shape, array.dtype)
        values[...] = array
        return values

    def _put(self, number: int, places: Ints, array: Array, size: int) -> None:
        if not len(array):
            return  # rows that go on in later steps
        if (values := self.values[number]) is None:
            values = self.values[number] = self.empty((size, *array.shape[1:]), array.dtype)
        values[places] = array

    def _put_runs(self, number: int, starts: Ints, rows: list[Array], size: int) -> None:
        """Tokens row by row to where each begins: every byte is copied once, however rows were ordered."""
        for start, row in zip(starts.tolist(), rows, strict=True):
            if (values := self.values[number]) is None:
                values = self.values[number] = self.empty((size, *row.shape[1:]), row.dtype)
            values[start : start + len(row)] = row

    def spread(self) -> None:
        """From the rows that were run, and those of others, to all rows of the request."""
        if self.source is None or self._shared():
            return
        own = np.flatnonzero(self.source >= 0).astype(np.int32)
        givers = [(self.values, self.job, own, self.source[own])]
        givers += [(p.values, p.request, f.rows, f.theirs) for p, f in self.received]
        self.values = [None] * len(self.values)
        for values, giver, rows, theirs in givers:
            for number, array in enumerate(values):
                if array is not None:
                    self._copy_rows(number, rows, array, giver, theirs)

    def _shared(self) -> bool:
        """Where all rows are those of one other request, in its order, both have the same arrays, which
        nobody may write to any more."""
        if len(self.received) != 1 or self.job.num_rows:
            return False
        giver, follower = self.received[0]
        if giver.request.num_rows != len(follower.rows) or (follower.rows != follower.theirs).any():
            return False
        self.values = giver.values
        for array in self.values:
            if array is not None:
                array.flags.writeable = False
        return True

    def receive(self, giver: Progress, follower: Follower) -> None:
        """A request whose rows this one waited for is complete."""
        self.received.append((giver, follower))
        self.waits_for -= 1
        self.device_s += giver.device_s
        if self.first_launch_s is None:
            self.first_launch_s = giver.first_launch_s

    def leave(self) -> list[Follower]:
        """Those who follow. Nothing is held in a circle any more: values go when the last has gone."""
        followers, self.followers, self.received = self.followers, [], []
        return followers

    def _copy_rows(self, number: int, rows: Ints, values: Array, giver: Request, theirs: Ints) -> None:
        """Rows of this request that are `theirs` of the giver's."""
        if not self.request.wants[number].per_token:
            self._put(number, rows, values[theirs], self.request.num_rows)
            return
        begins, ends = giver.starts[theirs], giver.starts[theirs] + giver.lengths[theirs]
        parts = [values[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        self._put_runs(number, self.request.starts[rows], parts, self.request.num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Follower:
    """A request some of whose rows are those of another: `rows` of its own are `theirs`."""

    progress: Progress
    rows: Ints
    theirs: Ints


def rows_of(plan: PoolPlan, arrays: Sequence[Array]) -> list[tuple[RowSlice, tuple[Part, ...]]]:
    """Each slice of the plan with its part of the variants' arrays, one for each output it wants."""
    if plan.variants and (first := plan.variants[0]).rows is None:
        values = arrays[0]
        if first.params.per_token:
            return [(piece, (_tokens(plan, values, piece.step_rows),)) for piece in plan.slices]
        return [(piece, (_vectors(values, piece.step_rows),)) for piece in plan.slices]
    takers = {
        variant.params: _Taker(array, variant.pairs.num_from_store if variant.pairs else 0)
        for variant, array in zip(plan.variants, arrays, strict=True)
    }
    out = []
    for piece in plan.slices:  # a variant lists the slots of its slices in this same order
        out.append((piece, tuple(_taken(piece, params, plan, takers) for params in piece.request.wants)))
    return out


def _vectors(values: Array, slots: Ints) -> Array:
    if len(slots) == 1:
        slot = int(slots[0])
        return values[slot : slot + 1]
    return values[slots]


def _tokens(plan: PoolPlan, values: Array, slots: Ints) -> list[Array]:
    """For each row a view of its tokens."""
    begins, ends = plan.cu_lengths[slots].tolist(), plan.cu_lengths[slots + 1].tolist()
    return [values[begin:end] for begin, end in zip(begins, ends, strict=True)]


class _Taker:
    """Hands out an array from its front; the part that comes from the store has a front of its own."""

    def __init__(self, array: Array, from_store: int) -> None:
        self.array = array
        self.at = 0
        self.stored_at = len(array) - from_store

    def take(self, count: int) -> Array:
        self.at += count
        return self.array[self.at - count : self.at]

    def take_stored(self, count: int) -> Array:
        self.stored_at += count
        return self.array[self.stored_at - count : self.stored_at]


def _taken(
    piece: RowSlice, params: PoolingParams, plan: PoolPlan, takers: dict[PoolingParams, _Taker]
) -> Part:
    if piece.request.pairs is not None:
        stored = 0 if piece.stored is None else len(piece.stored)
        run = takers[params].take(len(documents_of(piece)) - stored)
        return np.concatenate([run, takers[params].take_stored(stored)]) if stored else run
    if params.per_token:
        lengths = plan.lengths[piece.step_rows]
        return split_rows(takers[params].take(int(lengths.sum())), lengths)
    count = len(piece.finished)
    return takers[params].take(count) if count else _NOTHING


def documents_of(piece: RowSlice) -> Ints:
    """The rows of a slice that have a score in this step, in the order of its values."""
    rows = piece.rows[piece.finished]
    rows = rows[rows >= piece.request.num_queries]
    return rows if piece.stored is None else np.concatenate([rows, piece.stored])


def _rows(part: Part) -> Array:
    assert not isinstance(part, list), "scores are of rows, not of tokens"
    return part


def sound(parts: Sequence[Part], flags: bool) -> bool:
    """Whether all values are finite; `flags` says that they are not values but what tells so."""
    arrays = [array for part in parts for array in (part if isinstance(part, list) else [part])]
    return all((array if flags else np.isfinite(array)).all() for array in arrays)
