"""A request between its first step and its answer: where the rows of steps go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core import (
    Array,
    Ints,
    PoolingParams,
    Request,
    RowSlice,
    StepPlan,
    cumulative,
    split_rows,
)
from penstock.scheduler.ragged import runs, tokens_of

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
    keys: list[bytes] = field(default_factory=list)  # of the rows that others may follow

    @classmethod
    def of(cls, request: Request, job: Request | None = None, source: Ints | None = None) -> Progress:
        return cls(request, job or request, [None] * len(request.wants), source=source)

    @property
    def complete(self) -> bool:
        needed = self.job.num_rows - self.job.num_queries
        return self.rows_done == needed and not self.waits_for

    def store(self, piece: RowSlice, values: Sequence[Array]) -> None:
        """Rows of a step, each array for one of `wants`."""
        if piece.request.pairs is not None:
            rows = documents_of(piece)
            self.rows_done += len(rows)
            self._put(0, rows - self.job.num_queries, values[0], len(piece.request.pairs))
            return
        finished = piece.finished
        self.rows_done += len(finished)
        for number, (params, array) in enumerate(zip(self.job.wants, values, strict=True)):
            if params.per_token:
                self._put(number, token_places(piece), array, self.job.num_tokens)
            else:
                self._put(number, piece.rows[finished], array, self.job.num_rows)

    def _put(self, number: int, places: Ints, array: Array, size: int) -> None:
        if not len(array):
            return  # rows that go on in later steps
        if (values := self.values[number]) is None:
            values = self.values[number] = np.empty((size, *array.shape[1:]), dtype=array.dtype)
        values[places] = array

    def spread(self) -> None:
        """From the rows that were run, and those of others, to all rows of the request."""
        if self.source is None:
            return
        own = np.flatnonzero(self.source >= 0).astype(np.int32)
        givers = [(self.values, self.job, own, self.source[own])]
        givers += [(p.values, p.request, f.rows, f.theirs) for p, f in self.received]
        self.values = [None] * len(self.values)
        for values, giver, rows, theirs in givers:
            for number, array in enumerate(values):
                if array is not None:
                    self._copy_rows(number, rows, array, giver, theirs)

    def receive(self, giver: Progress, follower: Follower) -> None:
        """A request whose rows this one waited for is complete."""
        self.received.append((giver, follower))
        self.waits_for -= 1
        self.device_s += giver.device_s
        if self.first_launch_s is None:
            self.first_launch_s = giver.first_launch_s

    def _copy_rows(self, number: int, rows: Ints, values: Array, giver: Request, theirs: Ints) -> None:
        """Rows of this request that are `theirs` of the giver's."""
        if self.request.wants[number].per_token:
            size, lengths = self.request.num_tokens, self.request.lengths[rows]
            places, values = (
                runs(self.request.starts[rows], lengths),
                values[runs(giver.starts[theirs], lengths)],
            )
        else:
            size, places, values = self.request.num_rows, rows, values[theirs]
        self._put(number, places, values, size)


@dataclass(frozen=True, slots=True, eq=False)
class Follower:
    """A request some of whose rows are those of another: `rows` of its own are `theirs`."""

    progress: Progress
    rows: Ints
    theirs: Ints


def rows_of(plan: StepPlan, arrays: Sequence[Array]) -> list[tuple[RowSlice, tuple[Array, ...]]]:
    """Each slice of the plan with its part of the variants' arrays, one for each output it wants."""
    if plan.variants and (first := plan.variants[0]).rows is None:
        values = arrays[0]
        if not first.params.per_token:
            return [(piece, (values[piece.slots],)) for piece in plan.slices]
        return [
            (piece, (part,)) for piece, part in zip(plan.slices, _tokens_by_slice(plan, values), strict=True)
        ]
    takers = {
        variant.params: _Taker(array, variant.pairs.from_store if variant.pairs else 0)
        for variant, array in zip(plan.variants, arrays, strict=True)
    }
    out = []
    for piece in plan.slices:  # a variant lists the slots of its slices in this same order
        out.append((piece, tuple(_taken(piece, params, plan, takers) for params in piece.request.wants)))
    return out


def _tokens_by_slice(plan: StepPlan, values: Array) -> list[Array]:
    """One gather for the whole step, none where its order is already that of the slices, then views."""
    slots = np.concatenate([piece.slots for piece in plan.slices])
    if (np.diff(slots) != 1).any():
        values = values[tokens_of(slots, plan.lengths, plan.cu_lengths)]
    rows = cumulative(np.array([len(piece.slots) for piece in plan.slices], dtype=np.int32))
    return split_rows(values, np.diff(cumulative(plan.lengths[slots])[rows]))


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
    piece: RowSlice, params: PoolingParams, plan: StepPlan, takers: dict[PoolingParams, _Taker]
) -> Array:
    if piece.request.pairs is not None:
        stored = 0 if piece.stored is None else len(piece.stored)
        run = takers[params].take(len(documents_of(piece)) - stored)
        return np.concatenate([run, takers[params].take_stored(stored)]) if stored else run
    if params.per_token:
        count = int(plan.lengths[piece.slots].sum())
    else:
        count = len(piece.finished)
    return takers[params].take(count) if count else _NOTHING


def documents_of(piece: RowSlice) -> Ints:
    """The rows of a slice that have a score in this step, in the order of its values."""
    rows = piece.rows[piece.finished]
    rows = rows[rows >= piece.request.num_queries]
    return rows if piece.stored is None else np.concatenate([rows, piece.stored])


def token_places(piece: RowSlice) -> Ints:
    """Where the tokens of a slice stand among all tokens of its request."""
    request = piece.request
    if piece.begins is None or piece.ends is None:
        return tokens_of(piece.rows, request.lengths, request.starts)
    return runs(request.starts[piece.rows] + piece.begins, piece.ends - piece.begins)
