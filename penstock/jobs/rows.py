"""Reads rows from a file or stdin, a chunk at a time: plain text, JSONL, CSV, Parquet."""

from __future__ import annotations

import csv
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import orjson

from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat

STDIN = "-"
BY_EXTENSION = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".csv": InputFormat.CSV,
    ".parquet": InputFormat.PARQUET,
    ".txt": InputFormat.TEXT,
    ".text": InputFormat.TEXT,
}
_HEAD = 100  # records that are read to find the columns
_BUFFER_BYTES = 1 << 20
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a run reads. Without `id` the rows are numbered."""

    text: str
    id: str | None
    keep: tuple[str, ...]

    @property
    def carried(self) -> tuple[str, ...]:
        return self.keep if self.id is None else (self.id, *self.keep)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive rows: their texts, and the columns that are copied to the output."""

    first: int  # number of its first row, from 0
    texts: list[str]
    carried: dict[str, Any]  # name → list or Arrow array, one value a row
    read: float | None  # share of the input read so far, 0 to 1; None if unknown


class Record(NamedTuple):
    line: int  # from 1
    values: Mapping[str, Any]


class Source(ABC):
    """An open input. `names` are its columns, `text_names` those that appear to hold text."""

    def __init__(self, name: str, names: Sequence[str], text_names: Sequence[str]) -> None:
        self.name = name
        self.names = tuple(names)
        self.text_names = tuple(text_names)

    @abstractmethod
    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        """Rows `start` up to `stop` in chunks of at most `size`. Call it once."""

    @abstractmethod
    def empty_chunk(self, columns: Columns) -> Chunk:
        """A chunk without rows, for an input that has none."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(path: str, wanted: InputFormat | None) -> Source:
    if path == STDIN:
        return _open_stdin(wanted)
    file = Path(path)
    if file.is_dir():
        raise BadValue(f"{path} is a folder; give a file", param="input")
    if not file.is_file():
        raise BadValue(f"there is no file {path}", param="input")
    form = wanted or by_extension(file, BY_EXTENSION, "--format")
    if form is InputFormat.PARQUET:
        return ParquetSource(file)
    return RecordSource(file.open("rb", buffering=_BUFFER_BYTES), path, form, file.stat().st_size)


def by_extension(file: Path, known: Mapping[str, F], flag: str) -> F:
    if (form := known.get(file.suffix.lower())) is None:
        raise BadValue(f"{file.name} has no known extension ({', '.join(known)}); give {flag}", param=flag)
    return form


def _open_stdin(wanted: InputFormat | None) -> Source:
    if wanted is None or wanted is InputFormat.PARQUET:
        raise BadValue("stdin needs --format jsonl, csv or text", param="--format")
    stream = open(0, "rb", closefd=False)  # noqa: SIM115 - a reader of our own, not sys.stdin's, which is
    # locked while a thread waits in it and would stop the interpreter from ending after ctrl-C.
    return RecordSource(stream, "stdin", wanted, None)


def choose_columns(source: Source, text: str | None, id_column: str | None, keep: Sequence[str]) -> Columns:
    """The columns to read, checked against those of the source."""
    if not source.names:  # an empty input has no columns to check against
        return Columns(text or "text", id_column, tuple(keep))
    columns = Columns(text or _text_column(source), id_column, tuple(dict.fromkeys(keep)))
    for flag, name in [
        ("--column", columns.text),
        *([("--id-column", id_column)] if id_column else []),
        *(("--keep", name) for name in columns.keep),
    ]:
        if name not in source.names:
            raise BadValue(
                f"{source.name} has no column {name!r} for {flag}; it has: {_listed(source.names)}",
                param=flag,
            )
    return _without_conflicts(columns)


def _text_column(source: Source) -> str:
    if "text" in source.names:
        return "text"
    if len(source.text_names) == 1:
        return source.text_names[0]
    found = f"{len(source.text_names)} columns" if source.text_names else "no column"
    raise BadValue(
        f"{source.name} has no column 'text' and {found} with text; choose one with --column: "
        f"{_listed(source.names)}",
        param="--column",
    )


def _without_conflicts(columns: Columns) -> Columns:
    if columns.id is not None and columns.id in columns.keep:
        columns = Columns(
            columns.text, columns.id, tuple(name for name in columns.keep if name != columns.id)
        )
    if columns.id is None and "id" in columns.keep:
        raise BadValue(
            "the output stores row numbers in 'id'; give --id-column id instead of --keep id", param="--keep"
        )
    if "embedding" in columns.carried:
        raise BadValue("the column 'embedding' cannot be kept, because it holds the vectors", param="--keep")
    return columns


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


class RecordSource(Source):
    """Text, JSONL and CSV: lines that become records one by one."""

    def __init__(self, stream: BinaryIO, name: str, form: InputFormat, size: int | None) -> None:
        self._lines = _Lines(stream, name)
        self._size = size
        reader = {InputFormat.TEXT: _text, InputFormat.JSONL: _jsonl, InputFormat.CSV: _csv}[form]
        names, self._records = reader(self._lines)
        head = list(itertools.islice(self._records, _HEAD))
        self._records = itertools.chain(head, self._records)
        names = names or list(dict.fromkeys(key for record in head for key in record.values))
        super().__init__(name, names, [key for key in names if _holds_text(key, head, form)])

    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        records = itertools.islice(self._records, start, stop)
        for first in itertools.count(start, size):
            taken = list(itertools.islice(records, size))
            if not taken:
                return
            yield self._chunk(first, taken, columns, stop)

    def empty_chunk(self, columns: Columns) -> Chunk:
        return Chunk(0, [], {name: [] for name in columns.carried}, 1.0)

    def close(self) -> None:
        self._lines.close()

    def _chunk(self, first: int, records: list[Record], columns: Columns, stop: int | None) -> Chunk:
        texts = [self._text_of(record, first + i, columns.text) for i, record in enumerate(records)]
        carried = {name: [record.values.get(name) for record in records] for name in columns.keep}
        if columns.id is not None:
            ids = [self._id_of(record, first + i, columns.id) for i, record in enumerate(records)]
            carried = {columns.id: ids, **carried}
        return Chunk(first, texts, carried, self._share_read(first + len(records), stop))

    def _text_of(self, record: Record, row: int, name: str) -> str:
        text = record.values.get(name)
        if not isinstance(text, str):
            found = f"is {_kind(text)}, not a text" if name in record.values else "is missing"
            raise BadValue(f"{self.name}: row {row} (line {record.line}): {name!r} {found}", param="--column")
        return text

    def _id_of(self, record: Record, row: int, name: str) -> Any:
        if record.values.get(name) is None:
            raise BadValue(
                f"{self.name}: row {row} (line {record.line}): {name!r} is missing", param="--id-column"
            )
        return record.values[name]

    def _share_read(self, rows: int, stop: int | None) -> float | None:
        shares = [self._lines.bytes_read / self._size] if self._size else []
        if stop:
            shares.append(rows / stop)
        return min(1.0, max(shares)) if shares else None


class _Lines:
    """The lines of a stream, with counts of the lines and bytes read."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self.bytes_read = 0
        self.number = 0
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.bytes_read += len(line)
            self.number += 1
            yield line.removeprefix(b"\xef\xbb\xbf") if self.number == 1 else line

    def decoded(self) -> Iterator[str]:
        for line in self:
            try:
                yield line.decode()
            except UnicodeDecodeError:
                raise BadValue(f"{self.name}: line {self.number} is not UTF-8", param="input") from None

    def close(self) -> None:
        self._stream.close()


def _text(lines: _Lines) -> tuple[list[str], Iterator[Record]]:
    return ["text"], (Record(lines.number, {"text": line.rstrip("\r\n")}) for line in lines.decoded())


def _jsonl(lines: _Lines) -> tuple[list[str], Iterator[Record]]:
    return [], (Record(lines.number, _object(line, lines)) for line in lines if not line.isspace())


def _object(line: bytes, lines: _Lines) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except ValueError as error:
        raise BadValue(
            f"{lines.name}: line {lines.number} is not valid JSON: {error}", param="input"
        ) from None
    if not isinstance(value, dict):
        raise BadValue(
            f"{lines.name}: line {lines.number} holds {_kind(value)}; each line must be a JSON object",
            param="input",
        )
    return value


def _csv(lines: _Lines) -> tuple[list[str], Iterator[Record]]:
    csv.field_size_limit(
        min(sys.maxsize, 2**31 - 1)
    )  # the default stops at 128 KiB, less than a long document
    rows = csv.reader(lines.decoded())
    header = next(_csv_rows(rows, lines), [])
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise BadValue(f"{lines.name}: the header names {twice!r} twice", param="input")
    return header, (_csv_record(row, header, lines) for row in _csv_rows(rows, lines))


def _csv_rows(rows: Iterator[list[str]], lines: _Lines) -> Iterator[list[str]]:
    try:
        yield from (row for row in rows if row)
    except csv.Error as error:
        raise BadValue(
            f"{lines.name}: line {lines.number} is not valid CSV: {error}", param="input"
        ) from None


def _csv_record(row: list[str], header: list[str], lines: _Lines) -> Record:
    if len(row) != len(header):
        raise BadValue(
            f"{lines.name}: line {lines.number} has {len(row)} fields, but the header has {len(header)}",
            param="input",
        )
    return Record(lines.number, dict(zip(header, row, strict=True)))


def _holds_text(name: str, head: Sequence[Record], form: InputFormat) -> bool:
    values = [value for record in head if (value := record.values.get(name)) not in (None, "")]
    if form is InputFormat.CSV:
        return not values or not all(_is_number(value) for value in values)
    return bool(values) and all(isinstance(value, str) for value in values)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


class ParquetSource(Source):
    """Reads columns through a small buffer, and skips whole row groups before its first row."""

    def __init__(self, file: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._file = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise BadValue(f"{file} is not a readable Parquet file: {error}", param="input") from None
        self._schema = self._file.schema_arrow
        names = self._schema.names
        texts = [field.name for field in self._schema if _is_text(field.type)]
        super().__init__(str(file), names, texts)

    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        import pyarrow as pa

        self._check_text(columns.text)
        total = self._file.metadata.num_rows
        stop = total if stop is None else min(stop, total)
        groups, row = self._groups_from(start)
        wanted = list(dict.fromkeys((columns.text, *columns.carried)))
        batches = self._file.iter_batches(batch_size=size, row_groups=groups, columns=wanted)
        try:
            for batch in batches:
                skipped = min(max(start - row, 0), batch.num_rows)
                kept = batch.slice(skipped, max(0, stop - row - skipped))
                if kept.num_rows:
                    yield self._chunk(row + skipped, kept, columns, stop)
                row += batch.num_rows
                if row >= stop:
                    return
        except pa.ArrowException as error:
            raise BadValue(f"{self.name} cannot be read after row {row}: {error}", param="input") from None

    def empty_chunk(self, columns: Columns) -> Chunk:
        empty = self._schema.empty_table()
        return Chunk(0, [], {name: empty[name].combine_chunks() for name in columns.carried}, 1.0)

    def close(self) -> None:
        self._file.close()

    def _check_text(self, name: str) -> None:
        if not _is_text(kind := self._schema.field(name).type):
            raise BadValue(f"{self.name}: column {name!r} holds {kind}, not text", param="--column")

    def _groups_from(self, start: int) -> tuple[list[int], int]:
        """The row groups from row `start` on, and the number of their first row."""
        metadata, row = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            if row + rows > start:
                return list(range(group, metadata.num_row_groups)), row
            row += rows
        return [], row

    def _chunk(self, first: int, batch: Any, columns: Columns, stop: int) -> Chunk:
        texts = batch.column(columns.text)
        carried = {name: batch.column(name) for name in columns.carried}
        required = [("--column", columns.text), *([("--id-column", columns.id)] if columns.id else [])]
        for flag, name in required:
            if (column := batch.column(name)).null_count:
                row = first + column.is_null().index(True).as_py()
                raise BadValue(f"{self.name}: row {row}: {name!r} is null", param=flag)
        return Chunk(first, texts.to_pylist(), carried, (first + len(texts)) / stop)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    text_kinds = {pa.string(), pa.large_string()} | (
        {pa.string_view()} if hasattr(pa, "string_view") else set()
    )
    return inner in text_kinds
