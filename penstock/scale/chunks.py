"""Chunks of rows as a dataset of Ray Data: each row of the dataset is a bundle of consecutive chunks.

A task of Ray costs some milliseconds. Bundles grow while engines take chunks faster than that is worth.

Imports Ray: import it late.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from penstock.jobs.formats import InputFormat
from penstock.jobs.inputs import InputFile, open_inputs
from penstock.jobs.parts import Cut, Span
from penstock.jobs.plan import RowRange, read_chunks, without_committed
from penstock.jobs.rows import Chunk, Columns

BUNDLE = "bundle"  # the only column
SCHEMA = pa.schema([(BUNDLE, pa.large_binary())])


class BundleSize:
    """How many chunks are sent together: as many as engines compute in about `TARGET_S`.

    The time that a bundle takes is known once readers wait for engines; before, it is the time of reading.
    So the size doubles only after several bundles that were fast, and falls at once.
    """

    TARGET_S, MAX_CHUNKS, NUM_FAST = 0.25, 8, 4

    def __init__(self) -> None:
        self.num_chunks = 1
        self._num_fast = 0

    def took(self, seconds: float) -> None:
        """A bundle of this size took so long, from one to the next."""
        if seconds > self.TARGET_S:
            self.num_chunks, self._num_fast = max(1, int(self.num_chunks * self.TARGET_S / seconds)), 0
            return
        self._num_fast += 1
        if self._num_fast >= self.NUM_FAST and 2 * seconds <= self.TARGET_S:
            self.num_chunks, self._num_fast = min(self.MAX_CHUNKS, 2 * self.num_chunks), 0


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
            yield from bundled(without_committed(chunks, set(self.done)))


def bundled(chunks: Iterator[Chunk]) -> Iterator[pa.Table]:
    """The chunks in bundles. The caller takes the next bundle when engines have room for it."""
    size, began_s = BundleSize(), time.monotonic()
    bundle: list[Chunk] = []
    for chunk in chunks:
        bundle.append(chunk)
        if len(bundle) >= size.num_chunks:
            yield packed(bundle)
            bundle, ended_s = [], time.monotonic()
            size.took(ended_s - began_s)
            began_s = ended_s
    if bundle:
        yield packed(bundle)


def packed(bundle: list[Chunk]) -> pa.Table:
    """Chunks as a table of one row, which Ray does not divide."""
    own = [
        replace(each, carried={name: _own_buffers(v) for name, v in each.carried.items()}) for each in bundle
    ]
    return pa.table([pa.array([pickle.dumps(own, protocol=5)], pa.large_binary())], SCHEMA)


def unpacked(batch: pa.Table) -> list[Chunk]:
    return [chunk for value in batch[BUNDLE] for chunk in pickle.loads(value.as_buffer())]


def _own_buffers(values: Any) -> Any:
    """A slice of an array without the rest of it, which pickling would include."""
    if isinstance(values, list):
        return values
    return pa.concat_arrays([values, values.slice(0, 0)])


class ChunkSource(Datasource):  # type: ignore[misc]
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
