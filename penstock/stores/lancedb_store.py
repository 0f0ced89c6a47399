"""LanceDB: a folder of tables, on disk or in an object store. The schema's metadata holds the mark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import BadValue, NotPossible, PenstockError
from penstock.stores.base import (
    MARK_KEY,
    Found,
    Hit,
    Id,
    Mark,
    StoreFailed,
    VectorStore,
    need,
    query_column,
    read_mark,
)
from penstock.stores.columns import (
    ID,
    MULTI_VECTOR,
    VECTOR,
    DenseType,
    Layout,
    dense_rows,
    is_vector,
    multi_rows,
)
from penstock.stores.locations import Location, Metric

_WRITES_BETWEEN_COMPACTIONS = 128  # each write adds a fragment and a version


class LanceStore(VectorStore):
    kind = "lancedb"
    extra = "lance"
    dense_types = frozenset({DenseType.FLOAT32, DenseType.FLOAT16, DenseType.BITS})
    metrics = frozenset(Metric)
    has_schema = True
    max_dimension = 65_536
    holds_multi_vectors = True
    why_no_cut_over = (
        "its tables have neither aliases nor names that two of them can swap in one step; "
        "point your application to the new table"
    )

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._lancedb = need("lancedb", self.extra)
        need("lance", self.extra)
        if location.address.startswith("db://"):
            raise NotPossible("LanceDB's hosted service is not supported; use a folder", param="--to")
        self._connection: Any = None
        self._table: Any = None
        self._num_writes = 0

    def check(self, layout: Layout) -> None:
        super().check(layout)
        if layout.multi_width is not None and self._metric(layout) is not Metric.COSINE:
            raise NotPossible(
                f"lancedb compares multi-vectors by cosine alone, not by {self._metric(layout)}; add "
                "metric=cosine to the URL",
                param="--to",
            )

    def find(self) -> Found | None:
        if not self.location.is_remote and not Path(self.location.address).is_dir():
            return None
        try:
            self._table = self._database().open_table(self.location.collection)
        except (ValueError, FileNotFoundError):
            return None
        schema = self._table.schema
        self.mark = read_mark((schema.metadata or {}).get(MARK_KEY.encode()))
        return Found(self.mark, self._table.count_rows(), tuple(schema.names))

    def _database(self) -> Any:
        if self._connection is None:
            self._connection = self._lancedb.connect(self.location.address)
        return self._connection

    def _create(self, layout: Layout, mark: Mark) -> None:
        fields = [self._field(field, layout) for field in layout.schema]
        schema = pa.schema(fields, metadata={MARK_KEY: mark.text()})
        try:
            self._table = self._database().create_table(self.location.collection, schema=schema)
        except (RuntimeError, ValueError) as error:
            raise self._explained(error) from None

    def _field(self, field: pa.Field, layout: Layout) -> pa.Field:
        kind = field.type
        if field.name == ID:
            kind = pa.int64() if layout.has_number_ids else pa.string()
        elif field.name == VECTOR and layout.dense_type is DenseType.BITS:
            kind = pa.list_(pa.uint8(), layout.width)
        elif pa.types.is_null(kind):
            kind = pa.string()
        return pa.field(self.column(field.name), kind)

    def _adopt(self, layout: Layout, mark: Mark) -> None:
        there = self._table.schema
        for name in layout.vector_names:
            field = there.field(self.column(name))
            if field.type != self._field(layout.schema.field(name), layout).type:
                raise BadValue(f"{self}: the column {field.name} holds {field.type}", param="--adopt")
        self._table.to_lance().update_schema_metadata({MARK_KEY: mark.text()})
        self._table.checkout_latest()

    def _upsert(self, table: pa.Table) -> None:
        assert self.layout is not None
        if self.layout.dense_type is DenseType.BITS:
            bits = pa.array(dense_rows(table, DenseType.BITS).reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(bits, self.layout.width)
            table = table.set_column(table.schema.get_field_index(VECTOR), VECTOR, vectors)
        table = table.rename_columns([self.column(name) for name in table.column_names])
        schema = self._table.schema
        columns = [table.column(name).cast(schema.field(name).type) for name in table.column_names]
        fields = [schema.field(name) for name in table.column_names]
        merge = self._table.merge_insert(self.column(ID))
        merge = merge.when_matched_update_all().when_not_matched_insert_all()
        merge.execute(pa.Table.from_arrays(columns, schema=pa.schema(fields)))
        self._num_writes += 1
        if self._num_writes % _WRITES_BETWEEN_COMPACTIONS == 0:
            self._table.optimize()

    def _explained(self, error: Exception) -> Exception:
        """Convert the built-in errors that LanceDB raises."""
        is_store = isinstance(error, RuntimeError | ValueError) and not isinstance(error, PenstockError)
        return StoreFailed(f"{self}: {error}") if is_store else error

    def finish(self) -> None:
        if self._table is None:
            self.find()
        if self._table is not None and self._table.count_rows():
            self._table.optimize()

    def read(self, batch_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        schema = self._table.schema
        key = self.column(ID)
        if key not in schema.names:
            raise BadValue(f"{self} has no column {key}; name it with ?id= in the URL")
        names = [field.name for field in schema if not is_vector(field.type)] if columns is None else columns
        wanted = [key, *(name for name in names if name != key)]
        self._table.checkout_latest()
        for batch in self._table.to_lance().to_batches(columns=wanted, batch_size=batch_rows):
            yield pa.Table.from_batches([batch]).rename_columns([ID, *wanted[1:]])

    def stored(self, ids: Sequence[Id], column: str | None = None) -> Mapping[Id, Any]:
        if not ids:
            return {}
        key = self.column(ID)
        self._table.checkout_latest()
        names = [key] if column is None else [key, column]
        wanted = ", ".join(_literal(each) for each in ids)
        found = self._table.to_lance().to_table(columns=names, filter=f"`{key}` IN ({wanted})")
        values = [None] * found.num_rows if column is None else found.column(column).to_pylist()
        return dict(zip(found.column(key).to_pylist(), values, strict=True))

    def search(self, queries: pa.Table, k: int) -> list[list[Hit]]:
        name = query_column(queries)
        metric = self.search_metric
        if name == MULTI_VECTOR:
            rows: Any = multi_rows(queries)
        else:
            rows = dense_rows(queries, DenseType.BITS if metric is Metric.HAMMING else DenseType.FLOAT32)
        return [self._nearest(row, self.column(name), metric, k) for row in rows]

    def _nearest(self, query: Any, column: str, metric: Metric, k: int) -> list[Hit]:
        key = self.column(ID)
        search = self._table.search(np.asarray(query), vector_column_name=column)
        search = search.distance_type(metric.value).bypass_vector_index()
        found = search.select([key, "_distance"]).limit(k).to_arrow()
        hits = zip(found.column(key).to_pylist(), found.column("_distance").to_pylist(), strict=True)
        return [Hit(each, -distance) for each, distance in hits]


def _literal(value: Id) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
