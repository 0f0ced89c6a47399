"""Allocates ranges of the vector store on the device, which scores read from. Bookkeeping only, no tensors.

A request with pairs holds room for its queries while its documents run. Vectors of queries (and of documents,
if these are cached too) stay until their room is needed. So repeated rows do not run again.
"""

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
    num_users: int = 1
    is_published: bool = False


class VectorCache:
    """Ranges of the vector store, by content. Other requests find an entry when its request has succeeded."""

    def __init__(self, size: int, *, documents: bool = False, reuse: bool = True) -> None:
        self.size = size
        self.keeps_documents = documents and reuse
        self.reuse = reuse  # whether later requests may find entries
        self.query_hits = self.query_lookups = 0
        self.document_hits = self.document_lookups = 0
        self._free = FreeRanges(size)
        self._published: dict[_Key, _Entry] = {}
        self._idle: OrderedDict[int, _Entry] = OrderedDict()  # by start; published, unused, oldest first
        self._by_request: dict[str, list[_Entry]] = {}

    def hold(self, request: Request) -> CachedVectors | None:
        """Reserve room for all queries, and for the documents that fit. None while the queries do not fit."""
        lengths = vector_counts(request)
        starts = np.full(request.num_rows, -1, dtype=np.int32)
        ready = np.zeros(request.num_rows, dtype=bool)
        queries = request.num_queries
        num_rows = request.num_rows if self.keeps_documents else queries
        entries: list[_Entry] = []
        keys = self._keys(request, num_rows) if self.reuse else [()] * num_rows
        for row, key in enumerate(keys):
            entry = self._published.get(key)
            if entry is not None:
                ready[row] = True
                self._use(entry)
            elif (entry := self._allocate(key, max(1, int(lengths[row])))) is None:
                if row < queries:
                    self._stop_using(entries)
                    return None
                continue
            starts[row] = entry.start
            entries.append(entry)
        self._by_request[request.id] = entries
        self.query_lookups += queries
        self.query_hits += int(ready[:queries].sum())
        self.document_lookups += num_rows - queries
        self.document_hits += int(ready[queries:].sum())
        return CachedVectors(starts, lengths, ready)

    @staticmethod
    def _keys(request: Request, num_rows: int) -> list[_Key]:
        """The keys of the first `num_rows` rows."""
        shared = (request.params.late, *scope(request))
        return [(key, *shared) for key in row_keys(request)[:num_rows]]

    def release(self, request_id: str, *, succeeded: bool) -> None:
        """Release the entries of a request that has ended. If it succeeded, publish its vectors."""
        entries = self._by_request.pop(request_id, ())
        for entry in entries if succeeded and self.reuse else ():
            if not entry.is_published and entry.key not in self._published:
                self._published[entry.key] = entry
                entry.is_published = True
        self._stop_using(entries)

    def forget(self) -> None:
        """Drop every entry that no request uses, because the contents of the store are lost."""
        while self._idle:
            self._evict_oldest()

    def check_integrity(self) -> None:
        """Assert that every range is free or belongs to one entry."""
        entries = {e.start: e for used in self._by_request.values() for e in used}
        entries |= {e.start: e for e in self._published.values()}
        ranges = [(e.start, e.length) for e in entries.values()]
        ranges += list(zip(self._free.starts, self._free.sizes, strict=True))
        at = 0
        for start, size in sorted(ranges):
            assert start == at, f"vectors {at} to {start} are lost or used twice"
            at = start + size
        assert at == self.size

    def _use(self, entry: _Entry) -> None:
        entry.num_users += 1
        self._idle.pop(entry.start, None)

    def _allocate(self, key: _Key, length: int) -> _Entry | None:
        """Allocate a new entry, evicting idle entries if needed, oldest first. None if it does not fit."""
        if length > self.size:
            return None
        while (start := self._free.take(length)) is None:
            if not self._idle:
                return None
            self._evict_oldest()
        return _Entry(start, length, key)

    def _evict_oldest(self) -> None:
        _, oldest = self._idle.popitem(last=False)
        del self._published[oldest.key]
        self._free.give(oldest.start, oldest.length)

    def _stop_using(self, entries: list[_Entry] | tuple[()]) -> None:
        for entry in entries:
            entry.num_users -= 1
            if entry.num_users:
                continue
            if entry.is_published:
                self._idle[entry.start] = entry
            else:
                self._free.give(entry.start, entry.length)


def vector_counts(request: Request) -> Ints:
    """How many vectors of each row take part in a score."""
    if not request.params.late:
        return np.ones(request.num_rows, dtype=np.int32)
    if request.token_mask is None:
        return request.lengths
    return np.add.reduceat(request.token_mask, request.starts).astype(np.int32)
