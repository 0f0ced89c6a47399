"""Finds lost rows: rows of later in-flight steps that read what a failed step should have written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.inflight import RowSet
from penstock.engine.progress import Values, scored_documents
from penstock.engine.recovery.oom import select
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import Array, Ints, Request, RowSlice


class LostRowTracker:
    """Goes through steps in launch order, starting with the failed one, and finds the lost rows.

    A row is lost if an earlier chunk of it is lost, if it reads a KV cache block that a lost row should have
    written, or if it is scored against a lost query. A block that a good row writes later is valid again.
    """

    def __init__(self, failed: Sequence[ScheduledRows], block_size: int) -> None:
        self.block_size = max(1, block_size)
        self.rows: RowSet = {(entry.request, row) for entry in failed for row in entry.rows.tolist()}
        self._blocks: set[int] = set()  # blocks with invalid content
        for entry in failed:
            for index in range(len(entry.rows)):
                self._blocks.update(self._blocks_of(entry, index)[1])

    def find(self, scheduled: Sequence[ScheduledRows]) -> list[ScheduledRows]:
        """The rows of a later step that are lost."""
        found = []
        for entry in scheduled:
            lost = [index for index in range(len(entry.rows)) if self._loses(entry, index)]
            documents = entry.cached_documents
            if documents is not None:
                documents = self._scored_against_lost(entry.request, documents)
            if lost or documents is not None:
                index = np.array(lost, dtype=np.int32)
                found.append(select(entry, index)._replace(cached_documents=documents))
        return found

    def _loses(self, entry: ScheduledRows, index: int) -> bool:
        request, row = entry.request, int(entry.rows[index])
        read, written = self._blocks_of(entry, index)
        lost = (request, row) in self.rows or not self._blocks.isdisjoint(read)
        if lost or self._scored_against_lost(request, entry.rows[index : index + 1]) is not None:
            self.rows.add((request, row))
            self._blocks.update(written)
            return True
        self._blocks.difference_update(written)
        return False

    def _scored_against_lost(self, request: Request, rows: Ints) -> Ints | None:
        """The documents of lost queries among these rows; None if there are none."""
        if request.pairs is None:
            return None
        first = request.num_queries
        lost = [row >= first and (request, int(request.pairs[row - first])) in self.rows for row in rows]
        return rows[lost] if any(lost) else None

    def _blocks_of(self, entry: ScheduledRows, index: int) -> tuple[list[int], list[int]]:
        """The blocks that a row reads, and those that it writes."""
        table = entry.tables[index] if entry.tables else None
        if table is None or entry.begins is None or entry.ends is None:
            return [], []
        begin, end, size = int(entry.begins[index]), int(entry.ends[index]), self.block_size
        return table[: -(-begin // size)], table[begin // size : -(-end // size)]


def rows_of(scheduled: Iterable[ScheduledRows]) -> RowSet:
    """All rows that run or are scored, including cached documents."""
    return {
        (entry.request, row)
        for entry in scheduled
        for rows in (entry.rows, entry.cached_documents)
        if rows is not None
        for row in rows.tolist()
    }


def excluding(scheduled: Sequence[ScheduledRows], lost: RowSet) -> list[ScheduledRows]:
    """The scheduled rows and cached documents that are not lost."""
    left = []
    for entry in scheduled:
        keep = _survives(entry.request, entry.rows, lost)
        documents = entry.cached_documents
        if documents is not None:
            documents = documents[_survives(entry.request, documents, lost)]
            documents = documents if len(documents) else None
        if keep.any() or documents is not None:
            index = np.flatnonzero(keep).astype(np.int32)
            left.append(select(entry, index)._replace(cached_documents=documents))
    return left


def surviving_values(
    row_slice: RowSlice, values: tuple[Values, ...], lost: RowSet
) -> tuple[RowSlice, tuple[Values, ...]] | None:
    """A slice and its values without the lost rows; None if no row is left."""
    request = row_slice.request
    keep = _survives(request, row_slice.rows, lost)
    documents, finished = row_slice.cached_documents, keep[row_slice.finished]
    if request.pairs is not None:
        finished = _survives(request, scored_documents(row_slice), lost)
        documents = None if documents is None else documents[_survives(request, documents, lost)]
    if not keep.any() and (documents is None or not len(documents)):
        return None
    left = row_slice._replace(
        rows=row_slice.rows[keep],
        step_rows=row_slice.step_rows[keep],
        begins=None if row_slice.begins is None else row_slice.begins[keep],
        ends=None if row_slice.ends is None else row_slice.ends[keep],
        cached_documents=documents,
    )
    return left, tuple(_select_values(part, keep, finished) for part in values)


def _select_values(part: Values, keep: NDArray[np.bool_], finished: NDArray[np.bool_]) -> Values:
    if isinstance(part, list):
        return [tokens for tokens, kept in zip(part, keep.tolist(), strict=True) if kept]
    values: Array = part[finished]
    return values


def _survives(request: Request, rows: Ints, lost: RowSet) -> NDArray[np.bool_]:
    """[rows], whether each row is not lost."""
    return np.array([(request, row) not in lost for row in rows.tolist()], dtype=bool)
