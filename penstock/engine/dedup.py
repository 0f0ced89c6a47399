"""Identical rows in flight are computed once: later ones wait for the first instead of running."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.content import row_keys, scope
from penstock.engine.progress import Follower, Progress
from penstock.scheduler.ragged import runs
from penstock.types import ONE_ROW, Ints, Request

_Rows = dict[bytes, tuple[Progress, int]]
_Kind = tuple[object, ...]


class Split(NamedTuple):
    """What of a request has to be run, and what comes from requests that are on their way."""

    kind: _Kind  # what rows must have in common to be the same work
    job: Request
    source: Ints | None  # [rows], the row of the job that each is; -1: from elsewhere; None: as they are
    keys: list[bytes]  # of the job's rows
    first_rows: Ints  # [rows of the job], in the request
    leaders: list[tuple[Progress, Ints, Ints]]  # (whose, rows of the request, rows of theirs)


class Deduplicator:
    """Rows that are being computed, by what they want and by content."""

    def __init__(self) -> None:
        self.shared_rows = 0
        self._rows: dict[_Kind, _Rows] = {}

    def split(self, request: Request) -> Split:
        kind = _kind(request)
        known = self._rows.get(kind, {})
        if request.num_rows == 1:
            (key,) = row_keys(request)
            leader = known.get(key)
            if leader is None or leader[0].request.priority > request.priority:
                return Split(kind, request, None, [key], ONE_ROW, [])
        own: dict[bytes, int] = {}  # content → row of the job
        first_rows: list[int] = []
        source = np.empty(request.num_rows, dtype=np.int32)
        found: dict[int, tuple[Progress, list[int], list[int]]] = {}
        for row, key in enumerate(row_keys(request)):
            leader = known.get(key)
            if leader is not None and leader[0].request.priority <= request.priority:
                entry = found.setdefault(id(leader[0]), (leader[0], [], []))
                entry[1].append(row)
                entry[2].append(leader[1])
                source[row] = -1
                continue
            place = own.setdefault(key, len(first_rows))
            if place == len(first_rows):
                first_rows.append(row)
            source[row] = place
        rows = np.array(first_rows, dtype=np.int32)
        keys = list(own)
        if len(rows) == request.num_rows:
            return Split(kind, request, None, keys, rows, [])
        leaders = [(p, _ints(mine), _ints(theirs)) for p, mine, theirs in found.values()]
        return Split(kind, some_rows(request, rows, request.id), source, keys, rows, leaders)

    def begin(self, request: Request, split: Split) -> Progress:
        """The request is on its way: others may follow its rows, and it follows those it found."""
        progress = Progress.of(request, split.job, split.source)
        self.shared_rows += request.num_rows - split.job.num_rows
        for leader, rows, theirs in split.leaders:
            leader.followers.append(Follower(progress, rows, theirs))
            progress.waits_for += 1
        progress.kind = split.kind
        known = self._rows.setdefault(split.kind, {})
        for key, row in zip(split.keys, split.first_rows.tolist(), strict=True):
            if key not in known:
                known[key] = (progress, row)
                progress.keys.append(key)
        return progress

    def forget(self, progress: Progress) -> None:
        """No row can follow this request any more."""
        if not progress.keys:
            return
        known = self._rows[progress.kind]
        for key in progress.keys:
            del known[key]
        progress.keys = []
        if not known:
            del self._rows[progress.kind]


def some_rows(request: Request, rows: Ints, request_id: str) -> Request:
    """These rows as a request of their own."""
    lengths = request.lengths[rows]
    where = runs(request.starts[rows], lengths)

    def of(array: Ints | None, places: Ints) -> Ints | None:
        return None if array is None else array[places]

    return replace(
        request,
        id=request_id,
        token_ids=request.token_ids[where],
        lengths=lengths,
        type_ids=of(request.type_ids, where),
        keep=of(request.keep, where),
        skip=of(request.skip, rows),
        keys=of(request.keys, rows),
        adapters=of(request.adapters, rows),
    )


def _kind(request: Request) -> _Kind:
    return (request.wants, *scope(request))


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)
