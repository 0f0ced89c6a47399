"""The state of a pooling request between arrival and answer: it collects the rows of finished steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.types import Array, Ints, PoolingParams, PoolPlan, Request, RowSlice, split_rows

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # makes an array of a shape and a type
Values = Array | list[Array]  # one output of a slice: an array of its rows, or the tokens of each row
_NO_VALUES: Array = np.empty((0, 0), dtype=np.float32)


@dataclass(slots=True, eq=False)
class Progress:
    """The results that a request has so far. Its rows come from one or more steps, or from other requests.

    `job` holds the rows that run for it: all of them, or those that no other request computes.
    """

    request: Request
    job: Request
    values: list[Array | None]  # outputs of the job, one for each of `all_params`
    num_rows_done: int = 0
    start_by_s: float | None = None  # latest start, also of rows that run in place of a leader's
    first_launch_s: float | None = None
    device_s: float = 0.0
    source_rows: Ints | None = None  # [rows], the job's row that computes each; -1: a leader computes it
    num_leaders: int = 0  # requests whose rows it still waits for
    received: list[tuple[Progress, Follower]] = field(default_factory=list)  # leaders that are complete
    followers: list[Follower] = field(default_factory=list)
    is_relay: bool = False  # it runs only for its followers; no caller knows its id
    dedup_scope: tuple[object, ...] = ()  # with `dedup_keys`: where others find rows to follow
    dedup_keys: list[bytes] = field(default_factory=list)
    allocate: Allocate = np.empty  # makes the arrays of the answer

    @classmethod
    def of(cls, request: Request, job: Request | None = None, source_rows: Ints | None = None) -> Progress:
        num_outputs = 1 + len(request.extra_params)
        return cls(request, job or request, [None] * num_outputs, source_rows=source_rows)

    @property
    def queue_s(self) -> float:
        """Time from arrival until the launch of its first row."""
        launched_s = self.first_launch_s
        return 0.0 if launched_s is None else max(0.0, launched_s - self.request.arrival_s)

    @property
    def ends_with_its_row(self) -> bool:
        """Whether it has one row and one output, and the row runs only for it, in one step."""
        request = self.request
        if self.job is not request or request.num_rows != 1 or request.extra_params:
            return False
        return not (self.followers or self.is_relay or self.num_leaders or self.device_s)

    @property
    def complete(self) -> bool:
        needed = self.job.num_rows - self.job.num_queries
        return self.num_rows_done == needed and not self.num_leaders

    def store(self, row_slice: RowSlice, values: Sequence[Values]) -> None:
        """Copy rows of a step, because its memory is reused. `values` has one item for each of
        `all_params`."""
        if row_slice.request.pairs is not None:
            rows = scored_documents(row_slice)
            self.num_rows_done += len(rows)
            self._put(0, rows - self.job.num_queries, _rows(values[0]), len(row_slice.request.pairs))
            return
        if row_slice.ends is None and self.job.num_rows == 1:
            self.num_rows_done = 1
            self.values = [self._copy(part[0] if isinstance(part, list) else part) for part in values]
            return
        finished = row_slice.finished
        self.num_rows_done += len(finished)
        for number, part in enumerate(values):
            if isinstance(part, list):
                starts = row_slice.request.starts[row_slice.rows]
                starts = starts if row_slice.begins is None else starts + row_slice.begins
                self._put_tokens(number, starts, part, self.job.num_tokens)
            else:
                self._put(number, row_slice.rows[finished], part, self.job.num_rows)

    def outputs(self) -> list[Array]:
        """The arrays of a complete request, one for each of `all_params`."""
        found = [array for array in self.values if array is not None]
        if len(found) != len(self.values):
            raise RuntimeError(f"request {self.request.id!r} is complete but lacks an output")
        return found

    def _copy(self, array: Array) -> Array:
        values = self.allocate(array.shape, array.dtype)
        values[...] = array
        return values

    def _put(self, number: int, rows: Ints, array: Array, size: int) -> None:
        if not len(array):
            return  # its rows end in later steps
        if (values := self.values[number]) is None:
            values = self.values[number] = self.allocate((size, *array.shape[1:]), array.dtype)
        values[rows] = array

    def _put_tokens(self, number: int, starts: Ints, rows: list[Array], size: int) -> None:
        """Copy the tokens of each row to the start of the row. Rows may come in any order."""
        for start, row in zip(starts.tolist(), rows, strict=True):
            if (values := self.values[number]) is None:
                values = self.values[number] = self.allocate((size, *row.shape[1:]), row.dtype)
            values[start : start + len(row)] = row

    def spread(self) -> None:
        """Copy the rows of the job, and those of other requests, to all rows of the request."""
        if self.source_rows is None or self._share_arrays():
            return
        own = np.flatnonzero(self.source_rows >= 0).astype(np.int32)
        givers = [(self.values, self.job, own, self.source_rows[own])]
        givers += [(leader.values, leader.request, f.rows, f.leader_rows) for leader, f in self.received]
        self.values = [None] * len(self.values)
        for values, giver, rows, their_rows in givers:
            for number, array in enumerate(values):
                if array is not None:
                    self._copy_rows(number, rows, array, giver, their_rows)

    def _share_arrays(self) -> bool:
        """Share the arrays of a leader that has the same rows in the same order. The arrays become
        read-only."""
        if len(self.received) != 1 or self.job.num_rows:
            return False
        leader, follower = self.received[0]
        if leader.request.num_rows != len(follower.rows) or (follower.rows != follower.leader_rows).any():
            return False
        self.values = leader.values
        for array in self.values:
            if array is not None:
                array.flags.writeable = False
        return True

    def receive(self, leader: Progress, follower: Follower) -> None:
        """Record that a leader is complete."""
        self.received.append((leader, follower))
        self.num_leaders -= 1
        self.device_s += leader.device_s
        if self.first_launch_s is None:
            self.first_launch_s = leader.first_launch_s

    def detach(self) -> list[Follower]:
        """Return the followers, and drop the references between requests, so that their arrays are freed."""
        followers, self.followers, self.received = self.followers, [], []
        return followers

    def _copy_rows(self, number: int, rows: Ints, values: Array, giver: Request, their_rows: Ints) -> None:
        """Copy `their_rows` of another request to `rows` of this one."""
        if not self.request.all_params[number].per_token:
            self._put(number, rows, values[their_rows], self.request.num_rows)
            return
        begins = giver.starts[their_rows]
        ends = begins + giver.lengths[their_rows]
        parts = [values[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        self._put_tokens(number, self.request.starts[rows], parts, self.request.num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Follower:
    """A request that waits for another, its leader: its `rows` equal the leader's `leader_rows`."""

    progress: Progress
    rows: Ints
    leader_rows: Ints


def split_outputs(plan: PoolPlan, arrays: Sequence[Array]) -> list[tuple[RowSlice, tuple[Values, ...]]]:
    """Each slice of the plan, with its part of the variants' arrays: one for each requested output."""
    if plan.variants and (first := plan.variants[0]).rows is None:
        values = arrays[0]
        if first.params.per_token:
            return [(each, (_tokens(plan, values, each.step_rows),)) for each in plan.slices]
        return [(each, (_vectors(values, each.step_rows),)) for each in plan.slices]
    cursors = {
        variant.params: _Cursor(array, variant.pairs.num_from_store if variant.pairs else 0)
        for variant, array in zip(plan.variants, arrays, strict=True)
    }
    # A variant lists the rows of its slices in the order of the plan's slices.
    return [
        (each, tuple(_take(each, params, plan, cursors) for params in each.request.all_params))
        for each in plan.slices
    ]


def _vectors(values: Array, slots: Ints) -> Array:
    if len(slots) == 1:
        slot = int(slots[0])
        return values[slot : slot + 1]
    return values[slots]


def _tokens(plan: PoolPlan, values: Array, slots: Ints) -> list[Array]:
    """A view of the tokens of each row."""
    begins, ends = plan.cu_lengths[slots].tolist(), plan.cu_lengths[slots + 1].tolist()
    return [values[begin:end] for begin, end in zip(begins, ends, strict=True)]


class _Cursor:
    """Reads an array from front to back; scores of cached documents come last and have their own cursor."""

    def __init__(self, array: Array, num_from_store: int) -> None:
        self.array = array
        self.at = 0
        self.cached_at = len(array) - num_from_store

    def take(self, count: int) -> Array:
        self.at += count
        return self.array[self.at - count : self.at]

    def take_cached(self, count: int) -> Array:
        self.cached_at += count
        return self.array[self.cached_at - count : self.cached_at]


def _take(
    row_slice: RowSlice, params: PoolingParams, plan: PoolPlan, cursors: dict[PoolingParams, _Cursor]
) -> Values:
    if row_slice.request.pairs is not None:
        cursor, cached = cursors[params], row_slice.cached_documents
        num_cached = 0 if cached is None else len(cached)
        run = cursor.take(len(scored_documents(row_slice)) - num_cached)
        return np.concatenate([run, cursor.take_cached(num_cached)]) if num_cached else run
    if params.per_token:
        lengths = plan.lengths[row_slice.step_rows]
        return split_rows(cursors[params].take(int(lengths.sum())), lengths)
    count = len(row_slice.finished)
    return cursors[params].take(count) if count else _NO_VALUES  # a variant without rows is left out


def scored_documents(row_slice: RowSlice) -> Ints:
    """The rows of a slice that get a score in this step, in the order of its values."""
    rows = row_slice.rows[row_slice.finished]
    rows = rows[rows >= row_slice.request.num_queries]
    cached = row_slice.cached_documents
    return rows if cached is None else np.concatenate([rows, cached])


def _rows(values: Values) -> Array:
    if isinstance(values, list):
        raise TypeError("a score belongs to a row, not to a token")
    return values


def all_finite(parts: Sequence[Values], are_flags: bool) -> bool:
    """Whether all values are finite. `are_flags`: the parts hold flags, which are 0 where a value was not."""
    arrays = [array for part in parts for array in (part if isinstance(part, list) else [part])]
    return all((array if are_flags else np.isfinite(array)).all() for array in arrays)
