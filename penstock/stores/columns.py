"""Columns of a table of vectors: its layout, and conversions of values."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.jobs.stamp import Stamp
from penstock.types import OutputDtype

ID, VECTOR, SPARSE, MULTI_VECTOR = "id", "vector", "sparse", "multi_vector"
RESERVED = (ID, VECTOR, SPARSE, MULTI_VECTOR)
FOREIGN_ID = "payload_id"
SPARSE_DIMENSION = 1 << 20  # for stores that require a dimension; larger than any vocabulary


class DenseType(enum.StrEnum):
    """Number formats of dense vectors. `bits` has eight dimensions per byte."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    UINT8 = "uint8"
    BITS = "bits"


@dataclass(frozen=True)
class Layout:
    """The columns and types of a table."""

    schema: pa.Schema
    stamp: Stamp

    @classmethod
    def of(cls, schema: pa.Schema, stamp: Stamp) -> Layout:
        layout = cls(schema, stamp)
        if ID not in schema.names:
            raise BadValue(f"the table has no column {ID!r}: {', '.join(schema.names)}")
        if not layout.vector_names:
            raise BadValue(f"the table has none of the columns {VECTOR}, {SPARSE} and {MULTI_VECTOR}")
        if not (
            is_whole_number(layout.id_type) or is_text(layout.id_type) or pa.types.is_null(layout.id_type)
        ):
            raise BadValue(
                f"ids are {layout.id_type}; a vector store takes whole numbers or texts", param="--id-column"
            )
        return layout

    @property
    def id_type(self) -> pa.DataType:
        return _plain(self.schema.field(ID).type)

    @property
    def has_number_ids(self) -> bool:
        return is_whole_number(self.id_type)

    @property
    def vector_names(self) -> list[str]:
        return [name for name in (VECTOR, SPARSE, MULTI_VECTOR) if name in self.schema.names]

    @property
    def payload(self) -> list[pa.Field]:
        """The columns that are neither the id nor a vector."""
        return [field for field in self.schema if field.name not in RESERVED]

    @property
    def has_sparse(self) -> bool:
        return SPARSE in self.schema.names

    @property
    def width(self) -> int:
        """Numbers per stored dense vector."""
        return int(self.schema.field(VECTOR).type.list_size)

    @property
    def dimension(self) -> int:
        """The dimension of a dense vector before packing."""
        return self.stamp.dimension or self.width

    @cached_property
    def dense_type(self) -> DenseType | None:
        if VECTOR not in self.schema.names:
            return None
        value = self.schema.field(VECTOR).type.value_type
        if OutputDtype(self.stamp.dtype).is_packed:
            return DenseType.BITS
        names = {pa.float32(): "float32", pa.float16(): "float16", pa.int8(): "int8", pa.uint8(): "uint8"}
        if value not in names:
            raise BadValue(f"the column {VECTOR} holds {value}, which no vector store takes")
        return DenseType(names[value])

    @property
    def multi_width(self) -> int | None:
        """Numbers per vector of a multi-vector."""
        if MULTI_VECTOR not in self.schema.names:
            return None
        return int(self.schema.field(MULTI_VECTOR).type.value_type.list_size)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_whole_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(_plain(kind)))


def is_text(kind: pa.DataType) -> bool:
    kind = _plain(kind)
    views = hasattr(pa.types, "is_string_view") and pa.types.is_string_view(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or views)


def plain_ids(table: pa.Table) -> pa.Table:
    """Convert ids to int64 or string, so that stores have only these two types to handle."""
    place = table.schema.get_field_index(ID)
    column = table.column(place)
    wanted = pa.int64() if is_whole_number(column.type) else pa.string()
    if column.null_count:
        raise BadValue(f"a row has no {ID}", param="--id-column")
    return table if column.type == wanted else table.set_column(place, ID, column.cast(wanted))


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast the kept columns to the types in `schema`. A column without values becomes text."""
    for place, field in enumerate(table.schema):
        wanted = schema.field(field.name).type
        if field.name in RESERVED or field.type == wanted:
            continue
        kind = pa.string() if pa.types.is_null(wanted) else wanted
        try:
            column = table.column(place).cast(kind)
        except pa.ArrowException:
            raise BadValue(
                f"the column {field.name!r} holds {field.type} here, but {wanted} in earlier rows; "
                "give its values one type",
                param="--keep",
            ) from None
        table = table.set_column(place, pa.field(field.name, kind, metadata=field.metadata), column)
    return table


def last_of_each_id(table: pa.Table) -> pa.Table:
    """Keep only the last row of each id, in the order of the table."""
    last = {value: row for row, value in enumerate(table.column(ID).to_pylist())}
    if len(last) == table.num_rows:
        return table
    return table.take(pa.array(sorted(last.values()), pa.int64()))


def dense_rows(table: pa.Table, dense_type: DenseType) -> NDArray[Any]:
    """Return dense vectors [rows, width]. Bits are unsigned bytes; the highest bit is the first dimension."""
    column = table.column(VECTOR).combine_chunks()
    width = column.type.list_size
    values = np.asarray(column.flatten()).reshape(len(column), width)
    if dense_type is DenseType.BITS and values.dtype == np.int8:  # signed bytes are offset by 128
        return values.view(np.uint8) ^ np.uint8(128)
    return values


def sparse_rows(table: pa.Table) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Yield token ids in ascending order and weights of each row. Terms with weight 0 are left out."""
    column = table.column(SPARSE).combine_chunks()
    for indices, values in zip(column.field("indices"), column.field("values"), strict=True):
        at = np.asarray(indices.values.to_numpy(zero_copy_only=False), np.int32)
        weights = np.asarray(values.values.to_numpy(zero_copy_only=False), np.float32)
        kept = np.flatnonzero(weights)
        order = kept[np.argsort(at[kept], kind="stable")]
        yield at[order], weights[order]


def multi_rows(table: pa.Table) -> Iterator[NDArray[Any]]:
    """Yield the token vectors [tokens, width] of each row."""
    column = table.column(MULTI_VECTOR).combine_chunks()
    width = column.type.value_type.list_size
    for row in column:
        yield np.asarray(row.values.flatten()).reshape(-1, width)


def rows_of(table: pa.Table, names: list[str]) -> list[dict[str, Any]]:
    """Convert rows to dictionaries of plain Python values."""
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    return rows


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column holds dense or multi-vectors, judged by its type."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_vector(kind.value_type)
    return bool(pa.types.is_fixed_size_list(kind))


def arrow_table(ids: Sequence[Any], rows: Sequence[dict[str, Any]], names: Sequence[str] | None) -> pa.Table:
    """Convert rows of a store without a schema to a table: `id`, then the named or all columns."""
    if names is None:
        names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _array([row.get(name) for row in rows]) for name in names if name != ID}
    return pa.table({ID: pa.array(ids), **columns})


def _array(values: list[Any]) -> pa.Array:
    """Convert values of any types to an array; to JSON text if they have no common type."""
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError):
        texts = [
            v if v is None or isinstance(v, str) else orjson.dumps(v, default=str).decode() for v in values
        ]
        return pa.array(texts, pa.string())


def without_id(payload: Mapping[str, Any], own_id: Any) -> dict[str, Any]:
    """Remove Penstock's copy of the id from a payload. A foreign field `id` is kept as `payload_id`."""
    rest = dict(payload)
    given = rest.pop(ID, None)
    if given is not None and given != own_id:
        rest[FOREIGN_ID] = given
    return rest


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of Arrow values to JSON values. Times become ISO 8601."""
    return {name: _json_value(value) for name, value in row.items()}


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    if isinstance(value, dict):
        return json_row(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)
