"""Plain text, JSONL and CSV inputs, read line by line as records."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import orjson

from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat
from penstock.jobs.rows import BadRow, Chunk, Columns, Source, kind_of

_HEAD = 100  # records read ahead to find the columns


class Record(NamedTuple):
    line: int  # line number, from 1
    values: Mapping[str, Any]
    problem: str = ""  # why the line is not a valid record


class RecordSource(Source):
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
        begin = start - start % size
        records = itertools.islice(self._records, begin, stop)
        for first in itertools.count(begin, size):
            taken = list(itertools.islice(records, size))
            if not taken:
                return
            yield self._chunk(first, taken, columns, stop)

    def empty_chunk(self, columns: Columns) -> Chunk:
        return Chunk(0, 0, [], {name: [] for name in columns.carried}, 1.0)

    def close(self) -> None:
        self._lines.close()

    def _chunk(self, first: int, records: list[Record], columns: Columns, stop: int | None) -> Chunk:
        count, read = len(records), self._share_read(first + len(records), stop)
        texts = [record.values.get(columns.text) for record in records]
        bad: list[BadRow] = []
        ids = None if columns.id is None else [record.values.get(columns.id) for record in records]
        if not set(map(type, texts)) <= {str} or (ids is not None and None in ids):
            bad = [
                each for i, record in enumerate(records) if (each := self._bad(first + i, record, columns))
            ]
            gone = {each.row - first for each in bad}
            records = [record for i, record in enumerate(records) if i not in gone]
            texts = [record.values[columns.text] for record in records]
        carried = {name: [record.values.get(name) for record in records] for name in columns.carried}
        return Chunk(first, count, texts, carried, read, tuple(bad))  # type: ignore[arg-type]

    def _bad(self, row: int, record: Record, columns: Columns) -> BadRow | None:
        """Check a record. Returns None if it is valid. Otherwise raises, or returns a bad row to skip."""
        name, flag = columns.text, "--column"
        text = record.values.get(name)
        reason = record.problem
        if reason:
            name, flag = "", "input"
        elif not isinstance(text, str):
            found = f"is {kind_of(text)}, not a text" if name in record.values else "is missing"
            reason = f"{name!r} {found}"
        elif columns.id is not None and record.values.get(columns.id) is None:
            name, flag = columns.id, "--id-column"
            reason = f"{name!r} is missing"
        if not reason:
            return None
        if not self.skips_bad_rows:
            where = f"line {record.line}" if record.problem else f"row {row} (line {record.line}):"
            raise BadValue(f"{self.name}: {where} {reason}", param=flag)
        found_id = None if columns.id is None else record.values.get(columns.id)
        return BadRow(row, found_id, f"line {record.line}: {reason}", name or None)

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
    return ["text"], (_text_record(line, lines.number) for line in lines)


def _text_record(line: bytes, number: int) -> Record:
    try:
        return Record(number, {"text": line.rstrip(b"\r\n").decode()})
    except UnicodeDecodeError:
        return Record(number, {}, "is not UTF-8")


def _jsonl(lines: _Lines) -> tuple[list[str], Iterator[Record]]:
    return [], (_object(line, lines.number) for line in lines if not line.isspace())


def _object(line: bytes, number: int) -> Record:
    try:
        value = orjson.loads(line)
    except ValueError as error:
        return Record(number, {}, f"is not valid JSON: {error}")
    if not isinstance(value, dict):
        return Record(number, {}, f"holds {kind_of(value)}; each line must be a JSON object")
    return Record(number, value)


def _csv(lines: _Lines) -> tuple[list[str], Iterator[Record]]:
    # The default limit of 128 KiB is too small for long documents.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    rows = csv.reader(lines.decoded())
    header = next(_csv_rows(rows, lines), [])
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise BadValue(f"{lines.name}: the header names {twice!r} twice", param="input")
    return header, (_csv_record(row, header, lines.number) for row in _csv_rows(rows, lines))


def _csv_rows(rows: Iterator[list[str]], lines: _Lines) -> Iterator[list[str]]:
    try:
        yield from (row for row in rows if row)
    except csv.Error as error:
        raise BadValue(
            f"{lines.name}: line {lines.number} is not valid CSV: {error}", param="input"
        ) from None


def _csv_record(row: list[str], header: list[str], number: int) -> Record:
    if len(row) != len(header):
        return Record(number, {}, f"has {len(row)} fields, but the header has {len(header)}")
    return Record(number, dict(zip(header, row, strict=True)))


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
