"""Re-embedding: read the rows of one store, embed their texts again, and write them to another store.

A pass reads the whole old store and embeds the rows that the new store lacks. Passes repeat until one finds
nothing. So rows that are inserted meanwhile are included, and a killed run can be continued.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from penstock.errors import BadValue
from penstock.jobs.blocks import VectorColumns
from penstock.jobs.embedder import Embedder
from penstock.jobs.job import BlockMaker
from penstock.jobs.progress import report_line, show_progress
from penstock.jobs.rows import BadRow, Chunk, Columns
from penstock.jobs.vectors import common_type, fitted_column
from penstock.stores.base import Id, VectorStore
from penstock.stores.columns import ID, RESERVED, is_text
from penstock.stores.texts import TextFile

MAX_PASSES = 10
_MAX_SHOWN_BAD = 5


@dataclass(frozen=True, slots=True)
class OldRows:
    """The content of the old store: its number of rows, the columns to copy, and the column of texts."""

    schema: pa.Schema  # id first
    num_rows: int
    text_column: str | None  # None: texts come from a file

    @property
    def names(self) -> list[str]:
        return [name for name in self.schema.names if name != ID]


@dataclass(slots=True)
class Totals:
    read: int = 0  # rows, in the last pass
    embedded: int = 0
    bad: int = 0  # rows, in the last pass
    passes: int = 0
    is_caught_up: bool = False  # the last pass found nothing to do


def inspect(old: VectorStore, batch_rows: int, text_column: str | None, *, has_texts_file: bool) -> OldRows:
    """Find the columns of a store and their types. A store without a schema is read once as a whole."""
    found = old.find()
    if found is None:
        raise BadValue(f"there is no collection {old}", param="OLD")
    schemas: list[pa.Schema] = []
    for batch in old.read(batch_rows):
        if not schemas or batch.schema != schemas[-1]:
            schemas.append(batch.schema)
        if old.has_schema:
            break
    if not schemas:
        raise BadValue(f"{old} has no rows", param="OLD")
    schema = _common_schema(schemas)
    if taken := [name for name in RESERVED[1:] if name in schema.names]:
        raise BadValue(
            f"{old} has a field {taken[0]!r} that is no vector; rename it, because the new store keeps "
            "vectors under that name",
            param="OLD",
        )
    text = None if has_texts_file else _text_column(old, schema, text_column)
    return OldRows(schema, found.num_rows, text)


def _common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    if len(schemas) == 1:
        return schemas[0]
    names = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    kinds = {name: {schema.field(name).type for schema in schemas if name in schema.names} for name in names}
    return pa.schema([(name, common_type(kinds[name])) for name in names])


def _text_column(old: VectorStore, schema: pa.Schema, wanted: str | None) -> str:
    names: list[str] = [field.name for field in schema if is_text(field.type) and field.name != ID]
    if wanted is not None:
        if wanted not in schema.names:
            raise BadValue(
                f"{old} has no column {wanted!r}; it has: {', '.join(schema.names)}", param="--text-column"
            )
        return wanted
    if "text" in names:
        return "text"
    if len(names) == 1:
        return names[0]
    found = (
        f"several columns with text ({', '.join(names)}); choose one with --text-column"
        if names
        else ("no column with text; give the texts of its ids with --texts FILE")
    )
    raise BadValue(f"{old} has {found}", param="--text-column")


class Reembedding:
    """Moves rows from an old store through a model into a new store."""

    def __init__(
        self,
        rows: OldRows,
        embedder: Embedder,
        *,
        texts: TextFile | None,
        updated_column: str | None,
        batch_rows: int,
    ) -> None:
        if updated_column is not None and updated_column not in rows.schema.names:
            raise BadValue(
                f"the old store has no column {updated_column!r}; it has: {', '.join(rows.schema.names)}",
                param="--updated-column",
            )
        self._rows = rows
        self._embedder = embedder
        self._texts = texts
        self._updated = updated_column
        self._batch_rows = batch_rows
        self._vectors = replace(embedder.columns(), dense_name="vector")
        self._columns = Columns(rows.text_column or "text", ID, tuple(rows.names))
        self.totals = Totals()

    @property
    def vectors(self) -> VectorColumns:
        return self._vectors

    @property
    def schema(self) -> pa.Schema:
        """The schema of the tables that are written."""
        fields = [
            pa.field(
                field.name,
                pa.string() if pa.types.is_null(field.type) else field.type,
                metadata=field.metadata,
            )
            for field in self._rows.schema
        ]
        empty = self._vectors.empty()
        for kind in self._vectors.kinds:
            fields.append(pa.field(self._vectors.name(kind), self._vectors.array(kind, empty[kind]).type))
        return pa.schema(fields)

    def run(self, old: VectorStore, new: VectorStore) -> None:
        """Run passes until the new store has all rows of the old one, at most `MAX_PASSES`."""
        for _ in range(MAX_PASSES):
            before = self.totals.embedded
            self.run_pass(old, new)
            if self.totals.embedded == before:
                self.totals.is_caught_up = True
                return
        self.totals.is_caught_up = False

    def run_pass(self, old: VectorStore, new: VectorStore) -> None:
        maker = BlockMaker(self._columns, self._vectors, ID)
        self.totals.passes += 1
        self.totals.read = self.totals.bad = 0
        with show_progress(0) as advance:
            for prepared, vectors in self._embedder.embed(self._missing(old, new), self._columns):
                chunk = prepared.chunk
                if chunk.texts:
                    new.write(self._vectors.table(maker.block(chunk, vectors)))
                self._count_bad(chunk.bad)
                self.totals.embedded += len(chunk.texts)
                advance(len(chunk.texts), chunk.read)

    def _count_bad(self, bad: Sequence[BadRow]) -> None:
        for each in bad[: max(0, _MAX_SHOWN_BAD - self.totals.bad)]:
            if self.totals.passes == 1:
                report_line(f"skipped {each.id!r}: {each.reason}")
        self.totals.bad += len(bad)

    def _missing(self, old: VectorStore, new: VectorStore) -> Iterator[Chunk]:
        """Yield chunks of the rows that the new store lacks, or that were updated since they were copied."""
        for batch in old.read(self._batch_rows, self._rows.names):
            first = self.totals.read
            self.totals.read += batch.num_rows
            table = self._fitted(batch)
            ids = table.column(ID).to_pylist()
            stored = new.stored(ids, self._updated)
            updates = [None] * len(ids) if self._updated is None else table.column(self._updated).to_pylist()
            wanted = [
                row
                for row, (each, update) in enumerate(zip(ids, updates, strict=True))
                if each not in stored or _comparable(stored[each]) != _comparable(update)
            ]
            if wanted:
                share = min(1.0, self.totals.read / max(1, self._rows.num_rows))
                yield self._chunk(first, table.take(wanted), share)

    def _fitted(self, batch: pa.Table) -> pa.Table:
        schema, rows = self._rows.schema, batch.num_rows
        columns = [
            fitted_column(batch.column(field.name), field.type)
            if field.name in batch.column_names
            else pa.chunked_array([pa.nulls(rows, field.type)])
            for field in schema
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    def _chunk(self, first: int, table: pa.Table, share: float) -> Chunk:
        ids = table.column(ID).to_pylist()
        texts = self._texts_of(table, ids)
        bad: list[tuple[int, BadRow]] = []
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                bad.append((row, self._without_text(first + row, ids[row])))
        carried = {name: table.column(name) for name in table.column_names}
        chunk = Chunk(first, table.num_rows, [text or "" for text in texts], carried, share)
        return chunk.without(bad) if bad else chunk

    def _texts_of(self, table: pa.Table, ids: Sequence[Id]) -> Sequence[Any]:
        if self._texts is not None:
            return self._texts.texts(ids)
        texts: list[Any] = table.column(self._columns.text).to_pylist()
        return texts

    def _without_text(self, row: int, each: Id) -> BadRow:
        where = self._texts.name if self._texts is not None else f"the column {self._columns.text!r}"
        if not self._embedder.skips_bad_rows:
            raise BadValue(
                f"the row {each!r} has no text in {where}; skip such rows with --on-error skip",
                param="--text-column",
            )
        return BadRow(row, each, f"has no text in {where}", self._columns.text)


def _comparable(value: Any) -> Any:
    """Convert times to text: some stores return times, others the text that was written."""
    if isinstance(value, dt.datetime):
        in_utc = value.astimezone(dt.UTC) if value.tzinfo is not None else value
        return in_utc.isoformat()
    return value.isoformat() if isinstance(value, dt.date) else value
