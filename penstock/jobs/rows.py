"""Rows of an input: chunks, the columns that a run reads, and rows that cannot be read.

Every source cuts its rows into chunks at multiples of the chunk size, however often it is read. So a range of
row numbers means the same rows in every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from penstock.errors import BadValue

RESERVED = ("embedding", "vector", "sparse", "multi_vector")  # columns of the output that hold vectors


class BadRow(msgspec.Struct, frozen=True):
    """A row without a vector, as listed in the errors file."""

    row: int  # number in the input, from 0
    id: Any  # value of `--id-column`; None if the row has none
    reason: str
    column: str | None = None  # the column at fault


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that a run reads. Without an `id` column, rows are numbered."""

    text: str
    id: str | None
    keep: tuple[str, ...]

    @property
    def carried(self) -> tuple[str, ...]:
        return self.keep if self.id is None else (self.id, *self.keep)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive rows: texts and the columns that are copied to the output. Bad rows are kept separately."""

    first: int  # number of its first row, from 0
    count: int  # rows of the input, bad ones included
    texts: list[str]
    carried: dict[str, Any]  # name → list or Arrow array, one value for each text
    read: float | None  # share of the input read so far, 0 to 1; None if unknown
    bad: tuple[BadRow, ...] = ()

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def numbers(self) -> list[int]:
        """The row number of each text."""
        if not self.bad:
            return list(range(self.first, self.end))
        bad = {each.row for each in self.bad}
        return [row for row in range(self.first, self.end) if row not in bad]

    def shifted(self, rows: int, read: float | None) -> Chunk:
        """Return the same rows with numbers that are `rows` higher."""
        bad = tuple(msgspec.structs.replace(each, row=each.row + rows) for each in self.bad)
        return replace(self, first=self.first + rows, read=read, bad=bad)

    def without(self, bad: Sequence[tuple[int, BadRow]]) -> Chunk:
        """Move some texts, given by their index in `texts`, to the bad rows."""
        gone = {index for index, _ in bad}
        kept = [index for index in range(len(self.texts)) if index not in gone]
        return replace(
            self,
            texts=[self.texts[index] for index in kept],
            carried={name: _taken(values, kept) for name, values in self.carried.items()},
            bad=tuple(sorted((*self.bad, *(each for _, each in bad)), key=lambda each: each.row)),
        )

    def id_of(self, index: int, columns: Columns) -> Any:
        """Return the id of a text; None if rows are numbered."""
        if columns.id is None:
            return None
        value = self.carried[columns.id][index]
        return value.as_py() if hasattr(value, "as_py") else value

    def split(self, max_chars: int) -> Iterator[Chunk]:
        """Split the chunk into pieces of at most `max_chars`. Pieces of long texts have fewer rows."""
        if self.bad or sum(map(len, self.texts)) <= max_chars:
            yield self
            return
        begin, size = 0, 0
        for at, text in enumerate(self.texts):
            if size and size + len(text) > max_chars:
                yield self._slice(begin, at)
                begin, size = at, 0
            size += len(text)
        yield self._slice(begin, len(self.texts))

    def _slice(self, begin: int, end: int) -> Chunk:
        carried = {name: values[begin:end] for name, values in self.carried.items()}
        return replace(
            self, first=self.first + begin, count=end - begin, texts=self.texts[begin:end], carried=carried
        )


def _taken(values: Any, indices: list[int]) -> Any:
    if isinstance(values, list):
        return [values[index] for index in indices]
    return values.take(np.array(indices, np.int64))  # Arrow cannot infer the type of an empty list


class Source(ABC):
    """An open input. `names` are its columns, `text_names` the columns that appear to hold text.

    A row that cannot be read is an error, unless `skips_bad_rows` is set. Then its chunk lists it as bad.
    """

    def __init__(self, name: str, names: Sequence[str], text_names: Sequence[str]) -> None:
        self.name = name
        self.names = tuple(names)
        self.text_names = tuple(text_names)
        self.skips_bad_rows = False

    @property
    def file_rows(self) -> tuple[int, ...] | None:
        """Rows of each file, if known without reading it. In that case any range can be read quickly."""
        return None

    @abstractmethod
    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        """Yield rows up to `stop` in chunks of at most `size`, from the chunk that contains row `start`.

        Chunks begin at multiples of `size` within each file, wherever `start` is. Can be called only once.
        """

    @abstractmethod
    def empty_chunk(self, columns: Columns) -> Chunk:
        """Return a chunk without rows, for an input without rows."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose_columns(source: Source, text: str | None, id_column: str | None, keep: Sequence[str]) -> Columns:
    """Choose the columns to read, and check them against the columns of the source."""
    if not source.names:  # an empty input has no columns to check against
        return Columns(text or "text", id_column, tuple(keep))
    columns = Columns(text or _text_column(source), id_column, tuple(dict.fromkeys(keep)))
    check_columns(source, columns)
    return _without_conflicts(columns)


def check_columns(source: Source, columns: Columns) -> None:
    """Raise `BadValue` if the source lacks one of the columns."""
    for flag, name in [
        ("--column", columns.text),
        *([("--id-column", columns.id)] if columns.id else []),
        *(("--keep", name) for name in columns.keep),
    ]:
        if name not in source.names:
            raise BadValue(
                f"{source.name} has no column {name!r} for {flag}; it has: {_listed(source.names)}",
                param=flag,
            )


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
    if taken := [name for name in RESERVED if name in columns.carried]:
        raise BadValue(f"the column {taken[0]!r} cannot be kept, because it holds vectors", param="--keep")
    return columns


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def kind_of(value: Any) -> str:
    names: Mapping[type, str] = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a text",
    }
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
