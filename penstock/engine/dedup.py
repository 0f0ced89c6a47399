"""Deduplication: identical rows in flight run once, and later ones wait for the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.content import row_keys, scope, select_rows
from penstock.engine.progress import Follower, Progress
from penstock.types import Ints, Request

_Rows = dict[bytes, tuple[Progress, int]]  # content → the request that runs it, and its row
_Scope = tuple[object, ...]


class LeaderRows(NamedTuple):
    """Rows of a request that are identical to rows of a request in flight, its leader."""

    leader: Progress
    rows: Ints
    leader_rows: Ints


class Split(NamedTuple):
    """The rows of a request that have to run, and those that requests in flight already compute."""

    scope: _Scope  # what rows must have in common before their keys are compared
    job: Request
    # [rows], the row of the job that computes each row; -1: a leader computes it. None: the job has all rows.
    source_rows: Ints | None
    keys: list[bytes]  # of the job's rows
    first_rows: Ints  # [rows of the job], the first row of the request with this content
    leaders: list[LeaderRows]


class Deduplicator:
    """Rows in flight, by requested outputs and by content."""

    def __init__(self, runs_soon: Callable[[Request], bool] = lambda leader: True) -> None:
        """`runs_soon` returns whether the rows of a request in flight will run soon."""
        self.shared_rows = 0
        self._runs_soon = runs_soon
        self._rows: dict[_Scope, _Rows] = {}

    def lead(self, request: Request) -> Progress | None:
        """The progress of a single-row request whose row has to run. None: the request has several rows, or
        may follow a request in flight; use `split`. Call `register` to let others follow the request."""
        if request.num_rows != 1:
            return None
        shared, keys = _scope_of(request), row_keys(request)
        known = self._rows.get(shared)
        found = None if known is None else known.get(keys[0])
        if found is not None:
            if self._may_follow(request, found[0].request):
                return None
            keys = []  # later requests follow the request that was found
        progress = Progress.of(request)
        progress.dedup_scope, progress.dedup_keys = shared, keys
        return progress

    def register(self, progress: Progress) -> None:
        """Let later requests follow the only row of this one."""
        for key in progress.dedup_keys:
            self._rows.setdefault(progress.dedup_scope, {})[key] = (progress, 0)

    def split(self, request: Request) -> Split:
        """Separate the rows that have to run from rows that are in flight or repeated within the request."""
        shared, keys = _scope_of(request), row_keys(request)
        known = self._rows.get(shared, {})
        own: dict[bytes, int] = {}  # content → row of the job
        first_rows: list[int] = []
        source_rows = np.empty(request.num_rows, dtype=np.int32)
        leaders: dict[int, tuple[Progress, list[int], list[int]]] = {}
        for row, key in enumerate(keys):
            found = known.get(key)
            if found is not None and self._may_follow(request, found[0].request):
                _, rows, leader_rows = leaders.setdefault(id(found[0]), (found[0], [], []))
                rows.append(row)
                leader_rows.append(found[1])
                source_rows[row] = -1
                continue
            job_row = own.setdefault(key, len(first_rows))
            if job_row == len(first_rows):
                first_rows.append(row)
            source_rows[row] = job_row
        to_run = _ints(first_rows)
        if len(to_run) == request.num_rows:
            return Split(shared, request, None, list(own), to_run, [])
        job = select_rows(request, to_run, request.id)
        found_rows = [
            LeaderRows(leader, _ints(mine), _ints(theirs)) for leader, mine, theirs in leaders.values()
        ]
        return Split(shared, job, source_rows, list(own), to_run, found_rows)

    def _may_follow(self, request: Request, leader: Request) -> bool:
        """Whether a request may wait for rows of another. It may not if these rows are less urgent, or if
        they belong to another client and will not run soon."""
        if leader.is_background is not request.is_background:
            return request.is_background
        if leader.priority > request.priority:
            return False
        return leader.client == request.client or self._runs_soon(leader)

    def begin(self, request: Request, split: Split) -> Progress:
        """Register a split request: it follows its leaders, and later requests may follow its own rows."""
        progress = Progress.of(request, split.job, split.source_rows)
        self.shared_rows += request.num_rows - split.job.num_rows
        for leader, rows, leader_rows in split.leaders:
            leader.followers.append(Follower(progress, rows, leader_rows))
            progress.num_leaders += 1
        progress.dedup_scope = split.scope
        known = self._rows.setdefault(split.scope, {})
        for key, row in zip(split.keys, split.first_rows.tolist(), strict=True):
            if key not in known:
                known[key] = (progress, row)
                progress.dedup_keys.append(key)
        return progress

    def forget(self, progress: Progress) -> None:
        """Let no further request follow this one."""
        if not progress.dedup_keys:
            return
        known = self._rows[progress.dedup_scope]
        for key in progress.dedup_keys:
            del known[key]
        progress.dedup_keys = []
        if not known:
            del self._rows[progress.dedup_scope]


def _scope_of(request: Request) -> _Scope:
    return (request.params, request.extra_params, *scope(request))


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
