"""Places in the store of vectors that scores read from: queries while their documents run, and both for
as long as there is room, so that what comes again need not be computed again. Counts only, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from penstock.content import row_keys, scope
from penstock.free_ranges import FreeRanges
from penstock.types import CachedVectors, Ints, Request

_Key = tuple[object, ...]


@dataclass(slots=True, eq=False)
class _Entry:
    start: int
    length: int
    key: _Key
    users: int = 1
    published: bool = False


class VectorCache:
    """Holds ranges for requests. An entry is found by others once its request has ended well."""

    def __init__(self, size: int, *, documents: bool = False, reuse: bool = True) -> None:
        self.size = size
        self.keeps_documents = documents and reuse  # whether vectors of documents are kept too
        self.reuse = reuse  # whether anything is found again
        self.query_hits = self.query_lookups = 0
        self.document_hits = self.document_lookups = 0
        self._free = FreeRanges(size)
        self._known: dict[_Key, _Entry] = {}
        self._idle: OrderedDict[int, _Entry] = OrderedDict()  # published and unused, oldest first; by start
        self._of_request: dict[str, list[_Entry]] = {}

    def hold(self, request: Request) -> CachedVectors | None:
        """Places for all queries, or None while there is no room; for documents as far as there is."""
        lengths = vector_counts(request)
        starts = np.full(request.num_rows, -1, dtype=np.int32)
        ready = np.zeros(request.num_rows, dtype=bool)
        queries = request.num_queries
        rows = request.num_rows if self.keeps_documents else queries
        entries: list[_Entry] = []
        keys = self._keys(request, rows) if self.reuse else [()] * rows
        for row, key in enumerate(keys):
            entry = self._known.get(key)
            if entry is not None:
                ready[row] = True
                self._use(entry)
            elif (entry := self._new(key, max(1, int(lengths[row])))) is None:
                if row < queries:
                    self._leave(entries)
                    return None
                continue
            starts[row] = entry.start
            entries.append(entry)
        self._of_request[request.id] = entries
        self.query_lookups += queries
        self.query_hits += int(ready[:queries].sum())
        self.document_lookups += rows - queries
        self.document_hits += int(ready[queries:].sum())
        return CachedVectors(starts, lengths, ready)

    @staticmethod
    def _keys(request: Request, rows: int) -> list[_Key]:
        """By which the first rows are found again."""
        shared = (request.params.late, *scope(request))
        return [(key, *shared) for key in row_keys(request)[:rows]]

    def release(self, request_id: str, *, well: bool) -> None:
        """The request has ended; `well` says that its vectors can be relied on."""
        entries = self._of_request.pop(request_id, ())
        for entry in entries if well and self.reuse else ():
            if not entry.published and entry.key not in self._known:
                self._known[entry.key] = entry
                entry.published = True
        self._leave(entries)

    def check_integrity(self) -> None:
        """Every place is free or belongs to one entry."""
        entries = {e.start: e for held in self._of_request.values() for e in held}
        entries |= {e.start: e for e in self._known.values()}
        ranges = [(e.start, e.length) for e in entries.values()]
        ranges += list(zip(self._free.starts, self._free.sizes, strict=True))
        at = 0
        for start, size in sorted(ranges):
            assert start == at, f"places {at} to {start} are lost or held twice"
            at = start + size
        assert at == self.size

    def _use(self, entry: _Entry) -> None:
        entry.users += 1
        self._idle.pop(entry.start, None)

    def _new(self, key: _Key, length: int) -> _Entry | None:
        if length > self.size:
            return None
        while (start := self._free.take(length)) is None:
            if not self._idle:
                return None
            _, oldest = self._idle.popitem(last=False)
            del self._known[oldest.key]
            self._free.give(oldest.start, oldest.length)
        return _Entry(start, length, key)

    def _leave(self, entries: list[_Entry] | tuple[()]) -> None:
        for entry in entries:
            entry.users -= 1
            if entry.users:
                continue
            if entry.published:
                self._idle[entry.start] = entry
            else:
                self._free.give(entry.start, entry.length)


def vector_counts(request: Request) -> Ints:
    """How many vectors each row has in a score."""
    if not request.params.late:
        return np.ones(request.num_rows, dtype=np.int32)
    if request.keep is None:
        return request.lengths
    return np.add.reduceat(request.keep, request.starts).astype(np.int32)
