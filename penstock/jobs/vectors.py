"""Writes vectors to files: parts as they are computed, then all parts joined into the output.

Both formats stream: a part is one chunk of rows, and joining holds a few parts in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.jobs.formats import OutputFormat
from penstock.types import OutputDtype

BY_EXTENSION = {
    ".parquet": OutputFormat.PARQUET,
    ".jsonl": OutputFormat.JSONL,
    ".ndjson": OutputFormat.JSONL,
}
_GROUP_BYTES = 32 << 20  # size of a Parquet row group
Vectors = NDArray[Any]


class VectorFormat(Protocol):
    suffix: str

    def write(self, file: Path, carried: dict[str, Any], vectors: Vectors) -> None:
        """Write one part: the carried columns, then `vectors` [rows, width]."""

    def join(self, parts: Sequence[Path], file: Path) -> None:
        """Join all parts, in order, into one file."""


def vector_format(form: OutputFormat, dtype: OutputDtype, about: dict[str, str]) -> VectorFormat:
    """`about` is stored in the metadata of a Parquet file."""
    return JsonlVectors(dtype) if form is OutputFormat.JSONL else ParquetVectors(about)


def check_storable(form: OutputFormat, dtype: OutputDtype) -> None:
    if form is OutputFormat.PARQUET and dtype is OutputDtype.BFLOAT16:
        raise BadValue(
            "Parquet has no bfloat16; use --embed-dtype float16 or float32, or write .jsonl",
            param="--embed-dtype",
        )


class JsonlVectors:
    """`{"id": …, "embedding": […]}` a line."""

    suffix = ".jsonl"

    def __init__(self, dtype: OutputDtype) -> None:
        self._dtype = dtype

    def write(self, file: Path, carried: dict[str, Any], vectors: Vectors) -> None:
        names = (*carried, "embedding")
        columns = [_plain_list(values) for values in carried.values()]
        numbers = np.ascontiguousarray(self._as_numbers(vectors))
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        with file.open("wb") as stream:
            for row in zip(*columns, numbers, strict=True):
                stream.write(orjson.dumps(dict(zip(names, row, strict=True)), default=str, option=options))

    def join(self, parts: Sequence[Path], file: Path) -> None:
        with file.open("wb") as whole:
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, whole, 1 << 20)

    def _as_numbers(self, vectors: Vectors) -> Vectors:
        """bfloat16 arrives as bits, the upper half of a float32."""
        if self._dtype is OutputDtype.BFLOAT16:
            return (vectors.astype(np.uint32) << 16).view(np.float32)
        return vectors


class ParquetVectors:
    """A fixed-size list column `embedding` after the carried columns."""

    suffix = ".parquet"

    def __init__(self, about: dict[str, str]) -> None:
        self._about = {f"penstock.{key}": value for key, value in about.items()}

    def write(self, file: Path, carried: dict[str, Any], vectors: Vectors) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
        columns = {name: _arrow(values) for name, values in carried.items()}
        columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        pq.write_table(pa.table(columns), file, compression="none", use_dictionary=False)

    def join(self, parts: Sequence[Path], file: Path) -> None:
        import pyarrow.parquet as pq

        schema = self._common_schema([pq.read_schema(part) for part in parts])
        texts = [field.name for field in schema if field.name != "embedding"]
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=texts) as writer:
            for table in _row_groups(parts, schema):
                writer.write_table(table, row_group_size=max(1, table.num_rows))

    def _common_schema(self, schemas: Sequence[Any]) -> Any:
        import pyarrow as pa

        fields = [
            (name, _common_type({one.field(name).type for one in schemas})) for name in schemas[0].names
        ]
        return pa.schema(fields, metadata=self._about)


def _row_groups(parts: Iterable[Path], schema: Any) -> Iterator[Any]:
    """The tables of the parts, combined into row groups of about `_GROUP_BYTES`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    gathered: list[Any] = []
    for part in parts:
        gathered.append(_fitted(pq.read_table(part), schema))
        if sum(table.nbytes for table in gathered) >= _GROUP_BYTES:
            yield pa.concat_tables(gathered)
            gathered = []
    if gathered:
        yield pa.concat_tables(gathered)


def _fitted(table: Any, schema: Any) -> Any:
    import pyarrow as pa

    columns = [_fitted_column(table[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _fitted_column(column: Any, kind: Any) -> Any:
    import pyarrow as pa

    if column.type == kind:
        return column
    if pa.types.is_string(kind) and not pa.types.is_null(column.type):
        return pa.chunked_array([_as_text(column.to_pylist())], type=kind)
    return column.cast(kind, safe=False)


def _common_type(kinds: set[Any]) -> Any:
    """One type for a column whose parts have different types; text if no other type fits all."""
    import pyarrow as pa

    kinds = {kind for kind in kinds if not pa.types.is_null(kind)}
    if len(kinds) <= 1:
        return kinds.pop() if kinds else pa.string()
    try:
        single = [pa.schema([("column", kind)]) for kind in kinds]
        return pa.unify_schemas(single, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return pa.string()


def _arrow(values: Any) -> Any:
    """A carried column as an array. Lists, objects and mixtures of types become JSON text."""
    import pyarrow as pa

    if isinstance(values, pa.Array | np.ndarray):
        return pa.array(values)
    if any(isinstance(value, dict | list) for value in values):
        return _as_text(values)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError):
        return _as_text(values)


def _as_text(values: Iterable[Any]) -> Any:
    import pyarrow as pa

    return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _plain_list(values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    plain: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values.to_pylist()
    return plain
