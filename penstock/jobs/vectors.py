"""File formats of an output: each block is written as a part, and all parts are joined into the output.

Joining streams: only a few parts are in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from penstock.errors import BadValue
from penstock.jobs.blocks import Block, VectorColumns, as_text
from penstock.jobs.formats import OutputFormat
from penstock.types import OutputDtype

BY_EXTENSION = {
    ".parquet": OutputFormat.PARQUET,
    ".jsonl": OutputFormat.JSONL,
    ".ndjson": OutputFormat.JSONL,
    ".lance": OutputFormat.LANCE,
}
_GROUP_BYTES = 32 << 20  # size of a Parquet row group


class VectorFormat(Protocol):
    """A file format. Picklable, so that workers can write parts."""

    suffix: str  # file extension of parts

    def write(self, file: Path, block: Block) -> None:
        """Write one part: the carried columns, then the vectors."""

    def join(self, parts: Sequence[Path], target: Path) -> None:
        """Join all parts, in order, into one file or folder."""


def vector_format(form: OutputFormat, columns: VectorColumns) -> VectorFormat:
    if form is OutputFormat.JSONL:
        return JsonlVectors(columns)
    return LanceVectors(columns) if form is OutputFormat.LANCE else ParquetVectors(columns)


def check_storable(form: OutputFormat, dtype: OutputDtype) -> None:
    if form is OutputFormat.JSONL:
        return
    name = "Parquet" if form is OutputFormat.PARQUET else "Lance"
    if dtype is OutputDtype.BFLOAT16:
        raise BadValue(
            f"{name} has no bfloat16; use --embed-dtype float16 or float32, or write .jsonl",
            param="--embed-dtype",
        )


class JsonlVectors:
    """One `{"id": …, "embedding": […]}` per line."""

    suffix = ".jsonl"

    def __init__(self, columns: VectorColumns) -> None:
        self._columns = columns

    def write(self, file: Path, block: Block) -> None:
        columns = self._columns.json_columns(block)
        names = tuple(columns)
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        with file.open("wb") as stream:
            for row in zip(*columns.values(), strict=True):
                stream.write(orjson.dumps(dict(zip(names, row, strict=True)), default=str, option=options))

    def join(self, parts: Sequence[Path], target: Path) -> None:
        with target.open("wb") as whole:
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, whole, 1 << 20)


class ParquetVectors:
    """Carried columns, then vector columns. The stamp is in the file's metadata."""

    suffix = ".parquet"

    def __init__(self, columns: VectorColumns) -> None:
        self._columns = columns

    def write(self, file: Path, block: Block) -> None:
        import pyarrow.parquet as pq

        pq.write_table(self._columns.table(block), file, compression="none", use_dictionary=False)

    def join(self, parts: Sequence[Path], target: Path) -> None:
        import pyarrow.parquet as pq

        schema = self._common_schema(parts)
        texts = [name for name in schema.names if name not in self._columns.names]
        with pq.ParquetWriter(target, schema, compression="zstd", use_dictionary=texts) as writer:
            for table in _row_groups(parts, schema):
                writer.write_table(table, row_group_size=max(1, table.num_rows))

    def _common_schema(self, parts: Sequence[Path]) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schemas = [pq.read_schema(part) for part in parts]
        fields = [(name, common_type({one.field(name).type for one in schemas})) for name in schemas[0].names]
        stamp = self._columns.stamp
        about = {"model": stamp.model, "dimensions": str(stamp.dimension), "embed_dtype": stamp.dtype}
        return pa.schema(
            fields,
            metadata={
                **{f"penstock.{key}".encode(): v.encode() for key, v in about.items()},
                **stamp.metadata,
            },
        )


class LanceVectors(ParquetVectors):
    """Parts are Parquet files, which are joined into one Lance dataset."""

    def join(self, parts: Sequence[Path], target: Path) -> None:
        import pyarrow as pa

        from penstock.jobs.tables import import_lance

        lance = import_lance(str(target))
        schema = self._common_schema(parts)
        batches = (batch for table in _row_groups(parts, schema) for batch in table.to_batches())
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        lance.write_dataset(reader, str(target), mode="create")


def _row_groups(parts: Iterable[Path], schema: Any) -> Iterator[Any]:
    """Combine the tables of the parts into row groups of about `_GROUP_BYTES`."""
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

    columns = [fitted_column(table[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def fitted_column(column: Any, kind: Any) -> Any:
    import pyarrow as pa

    if column.type == kind:
        return column
    if pa.types.is_string(kind) and not pa.types.is_null(column.type):
        return pa.chunked_array([as_text(column.to_pylist())], type=kind)
    return column.cast(kind, safe=False)


def common_type(kinds: set[Any]) -> Any:
    """Find one type for a column whose parts have different types; text if nothing else fits all."""
    import pyarrow as pa

    kinds = {kind for kind in kinds if not pa.types.is_null(kind)}
    if len(kinds) <= 1:
        return kinds.pop() if kinds else pa.string()
    try:
        single = [pa.schema([("column", kind)]) for kind in kinds]
        return pa.unify_schemas(single, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return pa.string()
