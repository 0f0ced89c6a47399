"""What a failed step takes with it: rows of steps behind it that read what it was to write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.progress import Part, documents_of
from penstock.engine.recovery.oom import part_of
from penstock.scheduler.scheduler import Share
from penstock.types import Array, Ints, Request, RowSlice

Rows = set[tuple[Request, int]]


class Spoiled:
    """Follows steps in the order in which they were launched, the one that failed first.

    A row is lost if an earlier part of it is, if it reads a block of memory that a lost row was to write, or
    if it is scored against a query that is lost. A block that another row has written since is sound again.
    """

    def __init__(self, failed: Sequence[Share], block_size: int) -> None:
        self.block_size = max(1, block_size)
        self.rows: Rows = {(share.request, row) for share in failed for row in share.rows.tolist()}
        self._blocks: set[int] = set()
        for share in failed:
            for place in range(len(share.rows)):
                self._blocks.update(self._memory(share, place)[1])

    def of(self, shares: Sequence[Share]) -> list[Share]:
        """The rows of a later step that are lost, as shares of it."""
        found = []
        for share in shares:
            places = [place for place in range(len(share.rows)) if self._loses(share, place)]
            stored = None if share.stored is None else self._scored_against_lost(share.request, share.stored)
            if places or stored is not None:
                which = np.array(places, dtype=np.int32)
                found.append(part_of(share, which)._replace(stored=stored))
        return found

    def _loses(self, share: Share, place: int) -> bool:
        request, row = share.request, int(share.rows[place])
        read, written = self._memory(share, place)
        lost = (request, row) in self.rows or not self._blocks.isdisjoint(read)
        if lost or self._scored_against_lost(request, share.rows[place : place + 1]) is not None:
            self.rows.add((request, row))
            self._blocks.update(written)
            return True
        self._blocks.difference_update(written)
        return False

    def _scored_against_lost(self, request: Request, rows: Ints) -> Ints | None:
        """Those of the rows that are documents of a lost query; None: there are none."""
        if request.pairs is None:
            return None
        first = request.num_queries
        lost = [row >= first and (request, int(request.pairs[row - first])) in self.rows for row in rows]
        return rows[lost] if any(lost) else None

    def _memory(self, share: Share, place: int) -> tuple[list[int], list[int]]:
        """The blocks that a row reads, and those that it writes."""
        table = share.tables[place] if share.tables else None
        if table is None or share.begins is None or share.ends is None:
            return [], []
        begin, end, size = int(share.begins[place]), int(share.ends[place]), self.block_size
        return table[: -(-begin // size)], table[begin // size : -(-end // size)]


def without(shares: Sequence[Share], lost: Rows) -> list[Share]:
    """What is left of the shares of a step; documents that are only scored count as its rows."""
    left = []
    for share in shares:
        keep = _mask(share.request, share.rows, lost)
        stored = share.stored
        if stored is not None:
            stored = stored[_mask(share.request, stored, lost)]
            stored = stored if len(stored) else None
        if keep.any() or stored is not None:
            left.append(part_of(share, np.flatnonzero(keep).astype(np.int32))._replace(stored=stored))
    return left


def sound_rows(
    piece: RowSlice, parts: tuple[Part, ...], lost: Rows
) -> tuple[RowSlice, tuple[Part, ...]] | None:
    """What is left of a slice and of its parts of the outputs; None: nothing is."""
    request = piece.request
    keep = _mask(request, piece.rows, lost)
    stored, finished = piece.stored, keep[piece.finished]
    if request.pairs is not None:
        finished = _mask(request, documents_of(piece), lost)
        stored = None if stored is None else stored[_mask(request, stored, lost)]
    if not keep.any() and (stored is None or not len(stored)):
        return None
    left = piece._replace(
        rows=piece.rows[keep],
        step_rows=piece.step_rows[keep],
        begins=None if piece.begins is None else piece.begins[keep],
        ends=None if piece.ends is None else piece.ends[keep],
        stored=stored,
    )
    return left, tuple(_kept(part, keep, finished) for part in parts)


def _kept(part: Part, keep: NDArray[np.bool_], finished: NDArray[np.bool_]) -> Part:
    if isinstance(part, list):
        return [tokens for tokens, kept in zip(part, keep.tolist(), strict=True) if kept]
    values: Array = part[finished]
    return values


def _mask(request: Request, rows: Ints, lost: Rows) -> NDArray[np.bool_]:
    return np.array([(request, row) not in lost for row in rows.tolist()], dtype=bool)
