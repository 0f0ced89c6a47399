"""Chunks of rows as a dataset of Ray Data: each row of the dataset is one chunk.

Imports Ray: import it late.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from penstock.jobs.formats import InputFormat
from penstock.jobs.inputs import InputFile, open_inputs
from penstock.jobs.job import OpenedJob, read_chunks, without_committed
from penstock.jobs.parts import Cut, Span
from penstock.jobs.rows import Chunk, Columns

CHUNK = "chunk"  # the only column
SCHEMA = pa.schema([(CHUNK, pa.large_binary())])
_MAX_READ_CHUNKS = 64  # of one read task; what a lost task has read is read again


class RowRange(NamedTuple):
    """Rows for one read task. Both ends are places where chunks are cut."""

    start: int
    stop: int | None  # None: to the end of the input


def missing_ranges(opened: OpenedJob) -> list[RowRange]:
    """What is left to read. Inputs that must be read from the front are one range."""
    parts, file_rows, limit = opened.output.parts, opened.source.file_rows, opened.job.limit
    if file_rows is None:
        return [RowRange(parts.first_missing, limit)]
    done = sorted(parts.spans)
    ranges: list[RowRange] = []
    for start, stop in _grid(file_rows, opened.cut.rows, limit):
        if _is_covered(start, stop, done):
            continue
        last = ranges[-1] if ranges else None
        if (
            last is not None
            and last.stop == start
            and stop - last.start <= _MAX_READ_CHUNKS * opened.cut.rows
        ):
            ranges[-1] = RowRange(last.start, stop)
        else:
            ranges.append(RowRange(start, stop))
    return ranges


def _grid(file_rows: tuple[int, ...], size: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """The chunks of an input: files are cut at multiples of `size`."""
    before = 0
    for rows in file_rows:
        for start in range(before, before + rows, size):
            stop = min(start + size, before + rows)
            if limit is not None and start >= limit:
                return
            yield start, stop if limit is None else min(stop, limit)
        before += rows


def _is_covered(start: int, stop: int, done: list[Span]) -> bool:
    """Whether spans that are committed hold all these rows. Chunks of long texts are several spans."""
    from bisect import bisect_left

    row = start
    for span in done[bisect_left(done, (start, 0)) :]:
        if span.first != row or row >= stop:
            break
        row = span.end
    return row >= stop


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read an input in another process."""

    files: list[InputFile]
    form: InputFormat | None
    columns: Columns
    cut: Cut
    skips_bad_rows: bool
    done: frozenset[Span]

    def read(self, rows: RowRange) -> Iterator[pa.Table]:
        with open_inputs(self.files, self.form) as source:
            source.skips_bad_rows = self.skips_bad_rows
            chunks = read_chunks(source, self.columns, self.cut, rows.start, rows.stop)
            for chunk in without_committed(chunks, set(self.done)):
                yield packed(chunk)


def packed(chunk: Chunk) -> pa.Table:
    """A chunk as a table of one row."""
    carried = {name: _own_buffers(values) for name, values in chunk.carried.items()}
    return pa.table(
        [pa.array([pickle.dumps(replace(chunk, carried=carried), protocol=5)], pa.large_binary())], SCHEMA
    )


def unpacked(batch: pa.Table) -> list[Chunk]:
    return [pickle.loads(value.as_buffer()) for value in batch[CHUNK]]


def _own_buffers(values: Any) -> Any:
    """A slice of an array without the rest of it, which pickling would include."""
    if isinstance(values, list):
        return values
    return pa.concat_arrays([values, values.slice(0, 0)])


class ChunkSource(Datasource):
    """A datasource with one read task for each range of rows."""

    def __init__(self, reading: Reading, ranges: list[RowRange]) -> None:
        super().__init__()
        self._reading = reading
        self._ranges = ranges

    def get_name(self) -> str:
        return "Rows"

    def estimate_inmemory_data_size(self) -> int | None:
        return sum(file.size or 0 for file in self._reading.files) or None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(partial(self._reading.read, rows), metadata, schema=SCHEMA) for rows in self._ranges]
