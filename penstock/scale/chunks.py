"""Chunks of rows as a dataset of Ray Data: each row of the dataset is a bundle of consecutive chunks.

A Ray task costs a few milliseconds, about as long as a fast engine takes for a chunk of short rows. When a
node dies, Ray runs its read tasks again and skips as many bundles as it has already received. So a bundle
must hold the same rows every time: its size depends only on its rows, never on timing.

This module imports Ray, so import it late.
"""

from __future__ import annotations

import pickle
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
# A bundle ends with the chunk that reaches either limit. An H200 embeds a bundle in a fraction of a second.
BUNDLE_CHARS, BUNDLE_CHUNKS = 1 << 18, 8


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
    """Group chunks into bundles. The same chunks always give the same bundles."""
    bundle: list[Chunk] = []
    num_chars = 0
    for chunk in chunks:
        bundle.append(chunk)
        num_chars += _num_chars(chunk)
        if len(bundle) >= BUNDLE_CHUNKS or num_chars >= BUNDLE_CHARS:
            yield packed(bundle)
            bundle, num_chars = [], 0
    if bundle:
        yield packed(bundle)


def _num_chars(chunk: Chunk) -> int:
    """Count the characters of a chunk's texts. An image counts as a full bundle."""
    inputs: list[Any] = chunk.texts
    return sum(len(each) if isinstance(each, str) else BUNDLE_CHARS for each in inputs)


def packed(bundle: list[Chunk]) -> pa.Table:
    """Pack chunks into a table with one row, which Ray does not split."""
    own = [
        replace(each, carried={name: _own_buffers(v) for name, v in each.carried.items()}) for each in bundle
    ]
    return pa.table([pa.array([pickle.dumps(own, protocol=5)], pa.large_binary())], SCHEMA)


def unpacked(batch: pa.Table) -> list[Chunk]:
    return [chunk for value in batch[BUNDLE] for chunk in pickle.loads(value.as_buffer())]


def _own_buffers(values: Any) -> Any:
    """Copy a slice of an array: pickling the slice would include the whole array."""
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
