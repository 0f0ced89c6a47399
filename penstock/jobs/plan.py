"""The plan of a run: which rows are left to compute, and how they are cut into chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.jobs.parts import Cut, Span
from penstock.jobs.rows import Chunk, Columns, Source

_MAX_RANGE_CHUNKS = 64  # per range; if a reader dies, its range is read again


def read_chunks(source: Source, columns: Columns, cut: Cut, start: int, stop: int | None) -> Iterator[Chunk]:
    """Yield chunks from the one that contains row `start`. Every run cuts them at the same places."""
    for chunk in source.chunks(columns, start=start, stop=stop, size=cut.rows):
        yield from chunk.split(cut.chars)


def without_committed(chunks: Iterator[Chunk], done: set[Span]) -> Iterator[Chunk]:
    ends = {span.first: span.end for span in done}
    for chunk in chunks:
        if ends.get(chunk.first) != chunk.end:
            yield chunk


class RowRange(NamedTuple):
    """The rows of one read task. Both ends are chunk boundaries."""

    start: int
    stop: int | None  # None: to the end of the input


def missing_ranges(
    file_rows: tuple[int, ...] | None, cut: Cut, limit: int | None, committed: set[Span]
) -> list[RowRange]:
    """Compute the ranges left to read. If `file_rows` is None, rows must be read in order, as one range."""
    if file_rows is None:
        return [RowRange(first_missing(committed), limit)]
    done = sorted(committed)
    ranges: list[RowRange] = []
    for start, stop in _grid(file_rows, cut.rows, limit):
        if _is_covered(start, stop, done):
            continue
        last = ranges[-1] if ranges else None
        max_rows = _MAX_RANGE_CHUNKS * cut.rows
        if last is not None and last.stop == start and stop - last.start <= max_rows:
            ranges[-1] = RowRange(last.start, stop)
        else:
            ranges.append(RowRange(start, stop))
    return ranges


def _grid(file_rows: tuple[int, ...], size: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """Yield the boundaries of chunks. Each file is cut at multiples of `size`."""
    before = 0
    for rows in file_rows:
        for start in range(before, before + rows, size):
            stop = min(start + size, before + rows)
            if limit is not None and start >= limit:
                return
            yield start, stop if limit is None else min(stop, limit)
        before += rows


def _is_covered(start: int, stop: int, done: list[Span]) -> bool:
    """Whether committed spans cover all these rows. A chunk of long texts may be several spans."""
    row = start
    for span in done[bisect_left(done, (start, 0)) :]:
        if span.first != row or row >= stop:
            break
        row = span.end
    return row >= stop


def first_missing(committed: Iterable[Span]) -> int:
    """Find the first row that is not committed."""
    row = 0
    for span in sorted(committed):
        if span.first != row:
            break
        row = span.end
    return row
