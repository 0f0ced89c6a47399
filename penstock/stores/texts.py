"""Texts of a store's rows, from a file of ids and texts that may be larger than memory."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import BadValue
from penstock.jobs.inputs import open_source
from penstock.jobs.rows import choose_columns
from penstock.stores.base import Id

_ROWS = 4096


class TextFile:
    """The texts of a file by id, in a temporary database. Ids are compared as texts."""

    def __init__(self, file: str, text_column: str | None) -> None:
        self.name = file
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-texts-")
        self._rows = sqlite3.connect(Path(self._folder.name, "texts.db"), check_same_thread=False)
        self._rows.execute("PRAGMA synchronous = OFF")
        self._rows.execute("CREATE TABLE texts (id TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID")
        try:
            self._fill(text_column)
        except BaseException:
            self.close()
            raise

    def _fill(self, text_column: str | None) -> None:
        with open_source(self.name, None) as source:
            if "id" not in source.names:
                raise BadValue(
                    f"{self.name} has no column 'id'; it has: {', '.join(source.names)}", param="--texts"
                )
            columns = choose_columns(source, text_column, "id", ())
            for chunk in source.chunks(columns, start=0, stop=None, size=_ROWS):
                ids = chunk.carried["id"]
                ids = ids if isinstance(ids, list) else ids.to_pylist()
                rows = zip(map(str, ids), chunk.texts, strict=True)
                self._rows.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?)", rows)
        self._rows.commit()

    def texts(self, ids: Sequence[Id]) -> list[str | None]:
        """Look up the text of each id; None if the file has none."""
        return [self._text(str(each)) for each in ids]

    def _text(self, key: str) -> str | None:
        row = self._rows.execute("SELECT text FROM texts WHERE id = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def close(self) -> None:
        self._rows.close()
        self._folder.cleanup()
