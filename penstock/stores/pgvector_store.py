"""PostgreSQL with the extension pgvector: a table with a column for each kind of vector.

The mark is the last line of the table's comment, so it stays with the table when the table is renamed or
dumped. A block of rows is copied into a temporary table and merged by id, in one transaction.
"""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.errors import BadValue, NotPossible
from penstock.stores.base import (
    Found,
    Hit,
    Id,
    Mark,
    StoreFailed,
    StoreUnreachable,
    VectorStore,
    need,
    query_column,
    read_mark,
)
from penstock.stores.columns import (
    ID,
    SPARSE,
    SPARSE_DIMENSION,
    VECTOR,
    DenseType,
    Layout,
    dense_rows,
    is_text,
    is_whole_number,
    sparse_rows,
)
from penstock.stores.locations import Location, Metric

POSTGRES_TYPE = b"postgres"  # metadata of an Arrow field that holds the text form of another type
_VECTOR_TYPES = ("vector", "halfvec", "sparsevec", "bit")
_MAX_INDEXED = {DenseType.FLOAT32: 2_000, DenseType.FLOAT16: 4_000, DenseType.BITS: 64_000}
_OPERATORS = {Metric.COSINE: "<=>", Metric.DOT: "<#>", Metric.L2: "<->", Metric.HAMMING: "<~>"}
_OPERATOR_CLASSES = {Metric.COSINE: "cosine", Metric.DOT: "ip", Metric.L2: "l2", Metric.HAMMING: "hamming"}
_MARK_LINE = re.compile(r"^penstock: (\{.*\})$", re.MULTILINE)
_READ_AS = {  # PostgreSQL's name → Arrow
    **dict.fromkeys(("smallint", "integer", "bigint"), pa.int64()),
    **dict.fromkeys(("real", "double precision"), pa.float64()),
    "boolean": pa.bool_(),
    "text": pa.string(),
    "date": pa.date32(),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
    "bytea": pa.binary(),
}


@dataclass(frozen=True, slots=True)
class SqlColumn:
    """A column of a block, with its types in COPY (`wire_type`) and in the table."""

    source: str  # its name in the Arrow table
    name: str
    wire_type: str
    table_type: str


class PgvectorStore(VectorStore):
    kind = "pgvector"
    extra = "pgvector"
    dense_types = frozenset({DenseType.FLOAT32, DenseType.FLOAT16, DenseType.BITS})
    metrics = frozenset(Metric)
    has_schema = True
    max_dimension = 16_000
    holds_sparse = True

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._psycopg = need("psycopg", self.extra)
        self._sql = need("psycopg.sql", self.extra)
        self._pgvector = need("pgvector", self.extra)
        self._register = need("pgvector.psycopg", self.extra).register_vector
        self._open_connection: Any = None
        self._lock = threading.RLock()
        self._columns: list[SqlColumn] = []

    # Connections and names

    @property
    def _connection(self) -> Any:
        if self._open_connection is None or self._open_connection.closed:
            self._open_connection = self._psycopg.connect(self.location.address, autocommit=True)
            self._register_types()
        return self._open_connection

    def _register_types(self) -> None:
        try:
            self._register(self._open_connection)
        except self._psycopg.ProgrammingError:
            return  # the extension is created with the table

    def close(self) -> None:
        if self._open_connection is not None:
            self._open_connection.close()
            self._open_connection = None

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """Open a transaction and yield its cursor, for one thread at a time. Errors name the store."""
        errors = self._psycopg.errors
        try:
            with self._lock, self._connection.transaction(), self._connection.cursor() as cursor:
                yield cursor
        except self._psycopg.OperationalError as error:
            raise StoreUnreachable(f"{self}: {' '.join(str(error).split())}") from None
        except (errors.InsufficientPrivilege, errors.UndefinedFile, errors.FeatureNotSupported) as error:
            raise StoreFailed(f"{self}: {error}") from None
        except self._psycopg.DataError as error:
            raise BadValue(f"{self}: {' '.join(str(error).split())}", param="--to") from None
        except self._psycopg.Error as error:
            raise StoreFailed(f"{self}: {' '.join(str(error).split())}") from None

    @property
    def _table(self) -> Any:
        return self._sql.Identifier(*self.location.collection.split(".", 1))

    def _query(self, text: str, **parts: Any) -> Any:
        return self._sql.SQL(text).format(table=self._table, **parts)

    def _name(self, name: str) -> Any:
        return self._sql.Identifier(name)

    def _names(self, names: Sequence[str]) -> Any:
        return self._sql.SQL(", ").join(map(self._name, names))

    # Creating

    def check(self, layout: Layout) -> None:
        super().check(layout)
        if self.location.options.get("index") == "hnsw" and (dense := layout.dense_type) is not None:
            limit = _MAX_INDEXED[dense]
            if layout.dimension > limit:
                raise NotPossible(
                    f"an HNSW index of pgvector takes at most {limit:,} dimensions of {dense}, not "
                    f"{layout.dimension:,}; use --dimensions, --embed-dtype, or index=none in the URL",
                    param="--to",
                )

    def find(self) -> Found | None:
        types = self._types()
        if not types:
            return None
        with self._transaction() as cursor:
            (count,) = cursor.execute(self._query("SELECT count(*) FROM {table}")).fetchone()
        line = _MARK_LINE.search(self._comment())
        self.mark = read_mark(line[1]) if line else None
        return Found(self.mark, count, tuple(types))

    def _relation(self) -> str:
        return ".".join(
            '"' + part.replace('"', '""') + '"' for part in self.location.collection.split(".", 1)
        )

    def _types(self) -> dict[str, str]:
        """Read the table's columns and their types; {} if there is no table."""
        with self._transaction() as cursor:
            rows = cursor.execute(
                "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
                "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                (self._relation(),),
            ).fetchall()
        return dict(rows)

    def _comment(self) -> str:
        with self._transaction() as cursor:
            (text,) = cursor.execute(
                "SELECT obj_description(to_regclass(%s), 'pg_class')", (self._relation(),)
            ).fetchone()
        return text or ""

    def _create(self, layout: Layout, mark: Mark) -> None:
        self._create_extension()
        self._columns = [self._column(field, layout, {}) for field in layout.schema]
        key = self._sql.SQL("PRIMARY KEY ({})").format(self._name(self.column(ID)))
        definitions = [
            self._sql.SQL("{} {}").format(self._name(each.name), self._sql.SQL(each.table_type))
            for each in self._columns
        ]
        with self._transaction() as cursor:
            cursor.execute(
                self._query(
                    "CREATE TABLE {table} ({columns})", columns=self._sql.SQL(", ").join([*definitions, key])
                )
            )
            self._set_mark(cursor, "", mark)

    def _create_extension(self) -> None:
        try:
            with self._transaction() as cursor:
                cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except StoreFailed as error:
            raise StoreFailed(
                f"{error.message}; the database needs the extension vector: install pgvector on its server, "
                "and let an administrator run CREATE EXTENSION vector"
            ) from None
        self._register_types()

    def _set_mark(self, cursor: Any, comment: str, mark: Mark) -> None:
        others = _MARK_LINE.sub("", comment).strip()
        text = "\n".join(filter(None, (others, f"penstock: {mark.text()}")))
        cursor.execute(self._query("COMMENT ON TABLE {table} IS {comment}", comment=self._sql.Literal(text)))

    def _check_columns(self, layout: Layout, found: Found) -> None:
        super()._check_columns(layout, found)
        types = self._types()
        self._columns = [self._column(field, layout, types) for field in layout.schema]
        with self._transaction() as cursor:
            (is_unique,) = cursor.execute(
                "SELECT count(*) > 0 FROM pg_index i JOIN pg_attribute a "
                "ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
                "WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indnatts = 1 "
                "AND i.indpred IS NULL AND a.attname = %s",
                (self._relation(), self.column(ID)),
            ).fetchone()
        if not is_unique:
            raise BadValue(
                f"{self}: the column {self.column(ID)} has no primary key or unique index, which rows are "
                "replaced by",
                param="--to",
            )

    def _adopt(self, layout: Layout, mark: Mark) -> None:
        types = self._types()
        for name in layout.vector_names:
            wanted = self._column(layout.schema.field(name), layout, {}).table_type
            if (there := types[self.column(name)]) != wanted:
                raise BadValue(
                    f"{self}: the column {self.column(name)} is {there}, not {wanted}", param="--adopt"
                )
        with self._transaction() as cursor:
            self._set_mark(cursor, self._comment(), mark)

    def _column(self, field: pa.Field, layout: Layout, types: Mapping[str, str]) -> SqlColumn:
        name = self.column(field.name)
        wire = self._wire_type(field, layout)
        stored = (field.metadata or {}).get(POSTGRES_TYPE, b"").decode() or _table_type(field.type, wire)
        if field.name == VECTOR:
            stored = f"{wire}({layout.dimension})"
        elif field.name == SPARSE:
            stored = f"{wire}({SPARSE_DIMENSION})"
        return SqlColumn(field.name, name, wire, types.get(name, stored))

    def _wire_type(self, field: pa.Field, layout: Layout) -> str:
        if field.name == VECTOR:
            assert layout.dense_type is not None
            return {DenseType.FLOAT16: "halfvec", DenseType.BITS: "bit"}.get(layout.dense_type, "vector")
        if field.name == SPARSE:
            return "sparsevec"
        return _wire_type(field.type)

    # Writing

    def _upsert(self, table: pa.Table) -> None:
        assert self.layout is not None
        sql, columns = self._sql, self._columns
        values = [self._values(table, each) for each in columns]
        draft = [
            sql.SQL("{} {}").format(
                self._name(each.name), sql.SQL(each.table_type if each.wire_type == "bit" else each.wire_type)
            )
            for each in columns
        ]
        names = self._names([each.name for each in columns])
        casts = [
            sql.SQL("{}::{}").format(self._name(each.name), sql.SQL(each.table_type)) for each in columns
        ]
        key = self.column(ID)
        updates = [
            sql.SQL("{0} = excluded.{0}").format(self._name(each.name))
            for each in columns
            if each.name != key
        ]
        with self._transaction() as cursor:
            cursor.execute(
                sql.SQL("CREATE TEMPORARY TABLE penstock_block ({}) ON COMMIT DROP").format(
                    sql.SQL(", ").join(draft)
                )
            )
            copying = sql.SQL("COPY penstock_block ({}) FROM STDIN WITH (FORMAT BINARY)").format(names)
            with cursor.copy(copying) as copy:
                copy.set_types([each.wire_type for each in columns])
                for row in zip(*values, strict=True):
                    copy.write_row(row)
            cursor.execute(
                self._query(
                    "INSERT INTO {table} ({names}) SELECT {casts} FROM penstock_block "
                    "ON CONFLICT ({key}) DO UPDATE SET {updates}",
                    names=names,
                    casts=sql.SQL(", ").join(casts),
                    key=self._name(key),
                    updates=sql.SQL(", ").join(updates),
                )
            )

    def _values(self, table: pa.Table, column: SqlColumn) -> Sequence[Any]:
        """Convert one column of a block to values for psycopg."""
        assert self.layout is not None
        if column.source == VECTOR:
            assert self.layout.dense_type is not None
            rows = dense_rows(table, self.layout.dense_type)
            if self.layout.dense_type is DenseType.FLOAT32:
                return [self._pgvector.Vector(row) for row in rows]
            if self.layout.dense_type is DenseType.FLOAT16:
                return [self._pgvector.HalfVector(row) for row in rows]
            return self._bits(rows)
        if column.source == SPARSE:
            return [self._sparse(indices, values) for indices, values in sparse_rows(table)]
        values: list[Any] = table.column(column.source).to_pylist()
        if column.wire_type == "text" and not is_text(table.schema.field(column.source).type):
            return [value if isinstance(value, str) else _as_json(value) for value in values]
        return values

    def _bits(self, rows: Any) -> list[Any]:
        assert self.layout is not None
        dimension = self.layout.dimension
        return [self._pgvector.Bit(np.unpackbits(row)[:dimension].astype(bool)) for row in rows]

    def _sparse(self, indices: Any, values: Any) -> Any:
        terms = dict(zip(indices.tolist(), values.tolist(), strict=True))
        return self._pgvector.SparseVector(terms, SPARSE_DIMENSION)

    def finish(self) -> None:
        if self.location.options.get("index") != "hnsw" or self.mark is None or self.layout is None:
            return
        if self.layout.dense_type is None:
            return
        wire = self._wire_type(self.layout.schema.field(VECTOR), self.layout)
        name = f"{self.location.collection.rpartition('.')[2]}_{self.column(VECTOR)}_hnsw"
        with self._transaction() as cursor:
            cursor.execute(
                self._query(
                    "CREATE INDEX IF NOT EXISTS {name} ON {table} USING hnsw ({column} {operators})",
                    name=self._name(name),
                    column=self._name(self.column(VECTOR)),
                    operators=self._sql.SQL(f"{wire}_{_OPERATOR_CLASSES[self.mark.metric]}_ops"),
                )
            )

    # Reading

    def read(self, batch_rows: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Read in pages ordered by id, so that no transaction stays open while the caller works on a page."""
        types = self._types()
        key = self.column(ID)
        if key not in types:
            raise BadValue(f"{self} has no column {key}; name it with id= in the URL")
        if columns is None:
            columns = [name for name, kind in types.items() if kind.partition("(")[0] not in _VECTOR_TYPES]
        if unknown := [name for name in columns if name not in types]:
            raise BadValue(f"{self} has no column {unknown[0]}; it has: {', '.join(types)}")
        names = [key, *(name for name in columns if name != key)]
        schema = pa.schema([_field(ID if name == key else name, types[name]) for name in names])
        selected = self._sql.SQL(", ").join(self._selected(name, types[name]) for name in names)
        last: Any = None
        while rows := self._page(selected, key, types[key], last, batch_rows):
            last = rows[-1][0]
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(zip(*rows, strict=True), schema, strict=True)
            ]
            yield pa.Table.from_arrays(arrays, schema=schema)

    def _selected(self, name: str, kind: str) -> Any:
        return self._sql.SQL("{}" if kind in _READ_AS else "{}::text").format(self._name(name))

    def _page(self, selected: Any, key: str, kind: str, last: Any, limit: int) -> list[Any]:
        after = "" if last is None else "WHERE {key} > %(last)s::{kind} "
        query = self._query(
            "SELECT {selected} FROM {table} " + after + "ORDER BY {key} LIMIT %(limit)s",
            selected=selected,
            key=self._name(key),
            kind=self._sql.SQL(kind),
        )
        with self._transaction() as cursor:
            rows: list[Any] = cursor.execute(query, {"last": last, "limit": limit}).fetchall()
        return rows

    def stored(self, ids: Sequence[Id], column: str | None = None) -> Mapping[Id, Any]:
        types, key = self._types(), self.column(ID)
        value = self._selected(column, types[column]) if column else self._sql.SQL("NULL")
        query = self._query(
            "SELECT {id}, {value} FROM {table} WHERE {key} = ANY(%s::{kind}[])",
            id=self._selected(key, types[key]),
            value=value,
            key=self._name(key),
            kind=self._sql.SQL(types[key]),
        )
        with self._transaction() as cursor:
            return dict(cursor.execute(query, (list(ids),)).fetchall())

    def search(self, queries: pa.Table, k: int) -> list[list[Hit]]:
        name = query_column(queries)
        types, key = self._types(), self.column(ID)
        column = self.column(name)
        kind = types[column].partition("(")[0]
        metric = self.search_metric
        if name == SPARSE:
            metric, vectors = Metric.DOT, [self._sparse(*row) for row in sparse_rows(queries)]
        elif kind == "bit":
            dimension = int(types[column].rstrip(")").partition("(")[2])
            packed = dense_rows(queries, DenseType.BITS)
            vectors = [self._pgvector.Bit(np.unpackbits(row)[:dimension].astype(bool)) for row in packed]
        else:
            rows = dense_rows(queries, DenseType.FLOAT32)
            wrap = self._pgvector.HalfVector if kind == "halfvec" else self._pgvector.Vector
            vectors = [wrap(row) for row in rows]
        query = self._query(
            "SELECT {id}, {column} {operator} %s AS distance FROM {table} ORDER BY distance LIMIT %s",
            id=self._selected(key, types[key]),
            column=self._name(column),
            operator=self._sql.SQL(_OPERATORS[metric]),
        )
        with self._transaction() as cursor:
            cursor.execute("SET LOCAL enable_indexscan = off")  # index scans are approximate
            answers = [cursor.execute(query, (vector, k)).fetchall() for vector in vectors]
        return [[Hit(each, -distance) for each, distance in answer] for answer in answers]

    # Moving

    def check_cut_over(self, successor: VectorStore) -> None:
        super().check_cut_over(successor)
        with self._transaction() as cursor:
            found = cursor.execute(
                "SELECT relkind, relnamespace FROM pg_class WHERE oid = to_regclass(%s)", (self._relation(),)
            ).fetchone()
        if found is None or found[0] not in ("r", "p"):
            raise NotPossible(
                f"{self.location.collection} is no table, and only the names of tables are switched",
                param="--cut-over",
            )
        schemas = [store.location.collection.rpartition(".")[0] for store in (self, successor)]
        if schemas[0] != schemas[1]:
            raise NotPossible("a switch needs both tables in one schema", param="--cut-over")

    def cut_over(self, successor: VectorStore) -> VectorStore:
        """Swap names in one transaction. Other sessions always see one of the two tables under the name."""
        self.check_cut_over(successor)
        schema, dot, name = self.location.collection.rpartition(".")
        kept = f"{name[:30]}_replaced_{dt.datetime.now(dt.UTC):%Y%m%d_%H%M%S_%f}"  # at most 63 bytes
        replaced = PgvectorStore(self.location.beside(f"{schema}{dot}{kept}"))
        new = self._sql.Identifier(*successor.location.collection.split(".", 1))
        with self._transaction() as cursor:
            self._copy_grants(cursor, new)
            cursor.execute(self._query("ALTER TABLE {table} RENAME TO {kept}", kept=self._name(kept)))
            cursor.execute(self._sql.SQL("ALTER TABLE {} RENAME TO {}").format(new, self._name(name)))
        return replaced

    def _copy_grants(self, cursor: Any, new: Any) -> None:
        """Grant the roles that may use the table the same privileges on its successor."""
        granted = cursor.execute(
            "SELECT privilege_type, grantee::regrole::text, grantee FROM pg_class, aclexplode(relacl) "
            "WHERE pg_class.oid = to_regclass(%s) AND grantee <> relowner",
            (self._relation(),),
        ).fetchall()
        for privilege, role, number in granted:
            to = self._sql.SQL("PUBLIC") if number == 0 else self._sql.SQL(role)
            cursor.execute(self._sql.SQL("GRANT {} ON {} TO {}").format(self._sql.SQL(privilege), new, to))


def _field(name: str, kind: str) -> pa.Field:
    if kind in _READ_AS:
        return pa.field(name, _READ_AS[kind])
    return pa.field(name, pa.string(), metadata={POSTGRES_TYPE: kind.encode()})


def _wire_type(kind: pa.DataType) -> str:
    """Choose the COPY type of a kept column. Lists and structs are copied as JSON text."""
    if pa.types.is_boolean(kind):
        return "bool"
    if is_whole_number(kind):
        return "numeric" if pa.types.is_uint64(kind) else "int8"
    if pa.types.is_floating(kind):
        return "float8"
    if pa.types.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytea"
    return "numeric" if pa.types.is_decimal(kind) else "text"


def _table_type(kind: pa.DataType, wire_type: str) -> str:
    is_nested = pa.types.is_nested(kind)
    return (
        "jsonb" if is_nested else {"int8": "bigint", "float8": "double precision"}.get(wire_type, wire_type)
    )


def _as_json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value, default=str).decode()
