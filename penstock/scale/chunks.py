"""Chunks of rows as a dataset of Ray Data: each row of the dataset is one chunk.

Imports Ray: import it late.
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

CHUNK = "chunk"  # the only column
SCHEMA = pa.schema([(CHUNK, pa.large_binary())])


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
