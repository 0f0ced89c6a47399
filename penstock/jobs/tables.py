"""Parquet files and Lance datasets as inputs. Any range of rows can be read quickly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, BinaryIO

from penstock.errors import BadValue
from penstock.jobs.rows import BadRow, Chunk, Columns, Source

_BUFFER_BYTES = 1 << 20


class TableSource(Source):
    """An input with an Arrow schema and a known number of rows."""

    def __init__(self, name: str, schema: Any, rows: int) -> None:
        self._schema = schema
        self._rows = rows
        super().__init__(name, schema.names, [field.name for field in schema if is_text(field.type)])

    @property
    def file_rows(self) -> tuple[int, ...]:
        return (self._rows,)

    @abstractmethod
    def _batches(self, columns: list[str], start: int, stop: int, size: int) -> Iterator[Any]:
        """Yield the rows from `start` to `stop` as record batches of any size."""

    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        self._check_text(columns.text)
        stop = self._rows if stop is None else min(stop, self._rows)
        start -= start % size
        if start >= stop:
            return
        wanted = list(dict.fromkeys((columns.text, *columns.carried)))
        row = start
        try:
            for batch in _of_size(self._batches(wanted, start, stop, size), size):
                yield self._chunk(row, batch, columns, stop)
                row += batch.num_rows
        except (OSError, ValueError) as error:  # includes Arrow's errors
            if isinstance(error, BadValue):
                raise
            raise BadValue(f"{self.name} cannot be read after row {row}: {error}", param="input") from None

    def empty_chunk(self, columns: Columns) -> Chunk:
        empty = self._schema.empty_table()
        return Chunk(0, 0, [], {name: empty[name].combine_chunks() for name in columns.carried}, 1.0)

    def _check_text(self, name: str) -> None:
        if not is_text(kind := self._schema.field(name).type):
            raise BadValue(f"{self.name}: column {name!r} holds {kind}, not text", param="--column")

    def _chunk(self, first: int, batch: Any, columns: Columns, stop: int) -> Chunk:
        count = batch.num_rows
        bad = self._null_rows(first, batch, columns)
        if bad:
            import pyarrow as pa

            gone = {each.row - first for each in bad}
            batch = batch.take(pa.array([row for row in range(count) if row not in gone], pa.int64()))
        carried = {name: batch.column(name) for name in columns.carried}
        texts = batch.column(columns.text).to_pylist()
        return Chunk(first, count, texts, carried, (first + count) / stop, tuple(bad))

    def _null_rows(self, first: int, batch: Any, columns: Columns) -> list[BadRow]:
        bad: dict[int, BadRow] = {}
        required = [("--column", columns.text), *([("--id-column", columns.id)] if columns.id else [])]
        for flag, name in required:
            column = batch.column(name)
            if not column.null_count:
                continue
            reason = f"{name!r} is null"
            rows = [at for at, is_null in enumerate(column.is_null().to_pylist()) if is_null]
            if not self.skips_bad_rows:
                raise BadValue(f"{self.name}: row {first + rows[0]}: {reason}", param=flag)
            for at in rows:
                found_id = None if columns.id is None else batch.column(columns.id)[at].as_py()
                bad.setdefault(first + at, BadRow(first + at, found_id, reason, name))
        return [bad[row] for row in sorted(bad)]


class ParquetSource(TableSource):
    """A Parquet file. Reads columns through a small buffer, and skips row groups before the first row."""

    def __init__(self, file: Any, name: str) -> None:
        """`file` is a path or an open file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise BadValue(f"{name} is not a readable Parquet file: {error}", param="input") from None
        self._stream: BinaryIO | None = file if hasattr(file, "close") else None
        super().__init__(name, self._file.schema_arrow, self._file.metadata.num_rows)

    def _batches(self, columns: list[str], start: int, stop: int, size: int) -> Iterator[Any]:
        groups, row = self._groups_from(start)
        for batch in self._file.iter_batches(batch_size=size, row_groups=groups, columns=columns):
            skipped = min(max(start - row, 0), batch.num_rows)
            kept = batch.slice(skipped, max(0, stop - row - skipped))
            row += batch.num_rows
            if kept.num_rows:
                yield kept
            if row >= stop:
                return

    def close(self) -> None:
        self._file.close()
        if self._stream is not None:
            self._stream.close()

    def _groups_from(self, start: int) -> tuple[list[int], int]:
        """Find the row groups from row `start` on, and the number of their first row."""
        metadata, row = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if row + rows > start:
                return list(range(group, metadata.num_row_groups)), row
            row += rows
        return [], row


class LanceSource(TableSource):
    """A Lance dataset: a folder, or a URI that Lance opens itself."""

    def __init__(self, location: str) -> None:
        lance = import_lance(location)
        try:
            self._dataset = lance.dataset(location)
            rows = self._dataset.count_rows()
        except (OSError, ValueError) as error:
            raise BadValue(f"{location} is not a readable Lance dataset: {error}", param="input") from None
        super().__init__(location, self._dataset.schema, rows)

    @property
    def version(self) -> int:
        return int(self._dataset.version)

    def _batches(self, columns: list[str], start: int, stop: int, size: int) -> Iterator[Any]:
        scanner = self._dataset.scanner(
            columns=columns, offset=start, limit=stop - start, batch_size=size, scan_in_order=True
        )
        yield from scanner.to_batches()

    def close(self) -> None:
        pass


def import_lance(location: str) -> Any:
    try:
        import lance
    except ImportError:
        raise BadValue(
            f"{location} needs the package pylance; install penstock[lance]", param="input"
        ) from None
    return lance


def _of_size(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Regroup rows into batches of exactly `size`, except the last."""
    import pyarrow as pa

    pending: list[Any] = []
    rows = 0
    for batch in batches:
        pending.append(batch)
        rows += batch.num_rows
        while rows >= size:
            whole = _joined(pending, pa)
            yield whole.slice(0, size)
            rows -= size
            pending = [whole.slice(size)] if rows else []
    if rows:
        yield _joined(pending, pa)


def _joined(batches: list[Any], pa: Any) -> Any:
    if len(batches) == 1:
        return batches[0]
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def is_text(kind: Any) -> bool:
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    text_kinds = {pa.string(), pa.large_string()} | (
        {pa.string_view()} if hasattr(pa, "string_view") else set()
    )
    return inner in text_kinds
