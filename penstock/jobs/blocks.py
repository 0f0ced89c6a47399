"""Finished blocks of rows, converted to Arrow columns or JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.jobs.formats import VectorKind
from penstock.jobs.parts import Span
from penstock.jobs.rows import BadRow
from penstock.jobs.stamp import Stamp
from penstock.outputs.sparse import SparseRow
from penstock.types import OutputDtype

Vectors = NDArray[Any]
_WIDE = {VectorKind.DENSE: "vector", VectorKind.SPARSE: "sparse", VectorKind.MULTI_VECTOR: "multi_vector"}


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows with their vectors. `span` counts rows of the input, bad rows included."""

    span: Span
    carried: dict[str, Any]  # name → list, NumPy or Arrow array; the id first
    vectors: dict[VectorKind, Any]  # ndarray [rows, width], list of `SparseRow`, or list of [tokens, width]
    bad: tuple[BadRow, ...] = ()


@dataclass(frozen=True, slots=True)
class VectorColumns:
    """The vector columns of an output."""

    widths: dict[VectorKind, int]  # numbers per stored vector; 0 for sparse vectors
    dtype: OutputDtype
    stamp: Stamp
    dense_name: str = "embedding"  # the name in files; stores call it `vector`

    @property
    def kinds(self) -> tuple[VectorKind, ...]:
        return tuple(self.widths)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(self.name, self.widths))

    def name(self, kind: VectorKind) -> str:
        return self.dense_name if kind is VectorKind.DENSE else _WIDE[kind]

    def empty(self) -> dict[VectorKind, Any]:
        """Make the vectors of a block without rows."""
        return {
            kind: np.zeros((0, width), self.dtype.numpy) if kind is VectorKind.DENSE else []
            for kind, width in self.widths.items()
        }

    def table(self, block: Block) -> Any:
        """Convert a block to a `pyarrow.Table` whose schema carries the stamp."""
        import pyarrow as pa

        columns = {name: carried_array(values) for name, values in block.carried.items()}
        for kind in self.kinds:
            columns[self.name(kind)] = self.array(kind, block.vectors[kind])
        return pa.table(columns).replace_schema_metadata(self.stamp.metadata)

    def json_columns(self, block: Block) -> dict[str, Sequence[Any]]:
        """Convert a block to columns of values that orjson can write."""
        columns: dict[str, Sequence[Any]] = {name: _plain(values) for name, values in block.carried.items()}
        for kind in self.kinds:
            columns[self.name(kind)] = self._json_values(kind, block.vectors[kind])
        return columns

    def _json_values(self, kind: VectorKind, values: Any) -> Sequence[Any]:
        if kind is VectorKind.DENSE:
            return np.ascontiguousarray(self._numbers(values))  # type: ignore[return-value]
        if kind is VectorKind.SPARSE:
            return [{"indices": row.ids, "values": row.weights} for row in values]
        return [np.ascontiguousarray(self._numbers(row)) for row in values]

    def array(self, kind: VectorKind, values: Any) -> Any:
        if kind is VectorKind.SPARSE:
            return _sparse_array(values)
        width = self.widths[kind]
        if kind is VectorKind.DENSE:
            return _fixed_lists(self._numbers(values), width)
        return _multi_array([self._numbers(row) for row in values], width, self.dtype)

    def _numbers(self, values: Vectors) -> Vectors:
        """Convert bfloat16 values to float32. They arrive as bits: the upper half of a float32."""
        if self.dtype is OutputDtype.BFLOAT16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values


def _fixed_lists(values: Vectors, width: int) -> Any:
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), width)


def _multi_array(rows: list[Vectors], width: int, dtype: OutputDtype) -> Any:
    import pyarrow as pa

    number = np.dtype(np.float32) if dtype is OutputDtype.BFLOAT16 else dtype.numpy
    flat = np.concatenate(rows) if rows else np.zeros((0, width), number)
    return pa.ListArray.from_arrays(_offsets(map(len, rows)), _fixed_lists(flat, width))


def _sparse_array(rows: list[SparseRow]) -> Any:
    import pyarrow as pa

    offsets = _offsets(len(row.ids) for row in rows)
    ids = np.concatenate([row.ids for row in rows]) if rows else np.zeros(0, np.int32)
    weights = np.concatenate([row.weights for row in rows]) if rows else np.zeros(0, np.float32)
    return pa.StructArray.from_arrays(
        [
            pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.int32, copy=False))),
            pa.ListArray.from_arrays(offsets, pa.array(weights.astype(np.float32, copy=False))),
        ],
        names=["indices", "values"],
    )


def _offsets(lengths: Iterable[int]) -> Any:
    import pyarrow as pa

    return pa.array(np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int32))


def carried_array(values: Any) -> Any:
    """Convert a carried column to an array. Lists, objects and mixed types become JSON text."""
    import pyarrow as pa

    if isinstance(values, pa.Array | pa.ChunkedArray | np.ndarray):
        return pa.array(values) if isinstance(values, np.ndarray) else values
    if any(isinstance(value, dict | list) for value in values):
        return as_text(values)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError):
        return as_text(values)


def as_text(values: Iterable[Any]) -> Any:
    import pyarrow as pa

    return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _plain(values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    plain: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    return plain
