"""Files and batches in one folder: records in SQLite, content in plain files.

Every API process of a server opens the folder. One of them, the leader, runs the batches. All changes are
transactions, so a process can be killed at any moment.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from penstock.batches.records import ENDED, UNFINISHED, BatchRecord, FileRecord
from penstock.errors import BadValue, ConfigError, NotFound

_VERSION = 1  # version of the table schema
_BUSY_S = 30.0  # longest wait for another process's transaction
_TABLES = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, bytes INTEGER NOT NULL, expires_at INTEGER, record BLOB NOT NULL
);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, record BLOB NOT NULL
);
CREATE TABLE done (batch TEXT NOT NULL, line INTEGER NOT NULL, PRIMARY KEY (batch, line)) WITHOUT ROWID;
CREATE INDEX files_of ON files (owner, seq);
CREATE INDEX batches_of ON batches (owner, seq);
CREATE INDEX batches_in ON batches (status);
"""
_encode = msgspec.json.encode
_decode_file = msgspec.json.Decoder(FileRecord).decode
_decode_batch = msgspec.json.Decoder(BatchRecord).decode


class BatchStore:
    """The folder of files and batches. Methods block, and can be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        try:
            for each in (folder, folder / "content", folder / "uploads"):
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "batches.sqlite", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # COMMIT returns only when the data is on disk
            self._make_tables()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"--batch-folder {folder} cannot be used: {error}", param="batch_folder"
            ) from None

    def _make_tables(self) -> None:
        with self._transaction() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in filter(str.strip, _TABLES.split(";")):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise ConfigError(
                    f"--batch-folder {self.folder} was written by another release (format {version}, not "
                    f"{_VERSION}); use an empty folder",
                    param="batch_folder",
                )

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction; an exception rolls it back. Writers in this and other processes wait."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")  # fails where the disk is full, for example
            except BaseException:
                if self._db.in_transaction:  # SQLite has rolled back by itself after some errors
                    self._db.execute("ROLLBACK")
                raise

    def _all(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    # --- files ------------------------------------------------------------------------------------------

    def path(self, file_id: str) -> Path:
        """Path of a file's content. Ids must come from the server, never from a client."""
        return self.folder / "content" / file_id

    def upload_path(self, file_id: str) -> Path:
        """Path of a file while it is being uploaded."""
        return self.folder / "uploads" / file_id

    def add_upload(self, record: FileRecord) -> None:
        """Add a file whose complete content is at `upload_path`."""
        self.upload_path(record.id).replace(self.path(record.id))
        sync_folder(self.folder / "content")
        with self._transaction() as db:
            _insert_file(db, record)

    def file(self, file_id: str, owner: str) -> FileRecord:
        found = self._all("SELECT record FROM files WHERE id = ? AND owner = ?", file_id, owner)
        if not found:
            raise _no_file(file_id)
        return _decode_file(found[0][0])

    def files(
        self,
        owner: str,
        *,
        limit: int,
        purpose: str | None = None,
        after: str | None = None,
        order: str = "desc",
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of an owner's files, and whether more follow."""
        wanted = (" AND purpose = ?", [purpose]) if purpose is not None else ("", [])
        rows = self._page("files", owner, limit, after, order, *wanted)
        return [_decode_file(row) for row in rows[:limit]], len(rows) > limit

    def _page(
        self, table: str, owner: str, limit: int, after: str | None, order: str, where: str, values: list[str]
    ) -> list[bytes]:
        is_rising = order == "asc"
        if after is not None:
            found = self._all(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", after, owner)
            if not found:
                raise BadValue(f"after is {after[:80]!r}, which is not in the list", param="after")
            where, values = where + f" AND seq {'>' if is_rising else '<'} ?", [*values, found[0][0]]
        query = (
            f"SELECT record FROM {table} WHERE owner = ?{where} ORDER BY seq {'ASC' if is_rising else 'DESC'}"
        )
        return [row for (row,) in self._all(f"{query} LIMIT ?", owner, *values, limit + 1)]

    def delete_file(self, file_id: str, owner: str) -> None:
        """Delete a file, unless it is the input of a batch that has not ended."""
        with self._transaction() as db:
            if not db.execute("SELECT 1 FROM files WHERE id = ? AND owner = ?", (file_id, owner)).fetchone():
                raise _no_file(file_id)
            query = f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {UNFINISHED!r}"
            if (used := db.execute(query, (file_id,)).fetchone()) is not None:
                raise BadValue(
                    f"file {file_id} is the input of {used[0]}, which has not ended; cancel it first"
                )
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def used_bytes(self) -> int:
        """Sum the bytes of all files, including files that batches are writing."""
        (files,) = self._all("SELECT COALESCE(SUM(bytes), 0) FROM files")[0]
        return int(files) + sum(batch.output_bytes + batch.error_bytes for batch in self.unfinished())

    # --- batches ----------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        with self._transaction() as db:
            query = "SELECT record FROM files WHERE id = ? AND owner = ?"
            found = db.execute(query, (record.input_file_id, record.owner)).fetchone()
            if found is None:
                raise BadValue(f"no file {record.input_file_id[:80]!r} was uploaded", param="input_file_id")
            if _decode_file(found[0]).purpose != "batch":
                raise BadValue(
                    f"file {record.input_file_id} has no lines of a batch; upload one with purpose batch",
                    param="input_file_id",
                )
            db.execute(
                "INSERT INTO batches (id, owner, status, input_file_id, record) VALUES (?, ?, ?, ?, ?)",
                (record.id, record.owner, record.status, record.input_file_id, _encode(record)),
            )

    def batch(self, batch_id: str, owner: str | None = None) -> BatchRecord:
        """Return a batch if it belongs to this owner. With None as owner, return it in any case."""
        found = self._all("SELECT owner, record FROM batches WHERE id = ?", batch_id)
        if not found or owner not in (None, found[0][0]):
            raise _no_batch(batch_id)
        return _decode_batch(found[0][1])

    def batches(self, owner: str, *, limit: int, after: str | None = None) -> tuple[list[BatchRecord], bool]:
        """Return a page of an owner's batches, newest first, and whether more follow."""
        rows = self._page("batches", owner, limit, after, "desc", "", [])
        return [_decode_batch(row) for row in rows[:limit]], len(rows) > limit

    def unfinished(self) -> list[BatchRecord]:
        """List the batches that have not ended, oldest first."""
        query = f"SELECT record FROM batches WHERE status IN {UNFINISHED!r} ORDER BY seq"
        return [_decode_batch(row) for (row,) in self._all(query)]

    def num_by_status(self) -> Counter[str]:
        return Counter(dict(self._all("SELECT status, COUNT(*) FROM batches GROUP BY status")))

    def update(self, batch_id: str, change: Callable[[BatchRecord], None]) -> BatchRecord:
        """Change a batch atomically."""
        with self._transaction() as db:
            return _update(db, batch_id, change)

    def commit_lines(
        self, batch_id: str, lines: Sequence[int], change: Callable[[BatchRecord], None]
    ) -> BatchRecord:
        """Record atomically that these lines are answered, and change the batch."""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO done (batch, line) VALUES (?, ?)", [(batch_id, line) for line in lines]
            )
            return _update(db, batch_id, change)

    def done_lines(self, batch_id: str) -> set[int]:
        return {line for (line,) in self._all("SELECT line FROM done WHERE batch = ?", batch_id)}

    def end(
        self, batch_id: str, change: Callable[[BatchRecord], None], files: Sequence[FileRecord] = ()
    ) -> BatchRecord:
        """End a batch, and make the files that it wrote visible to its owner."""
        with self._transaction() as db:
            for record in files:
                _insert_file(db, record)
            db.execute("DELETE FROM done WHERE batch = ?", (batch_id,))
            return _update(db, batch_id, change)

    # --- clean-up ---------------------------------------------------------------------------------------

    def delete_expired(self, now: int, ended_before: int | None) -> int:
        """Delete expired files, and batches that ended before `ended_before`. Returns the number deleted."""
        with self._transaction() as db:
            used = f"SELECT input_file_id FROM batches WHERE status IN {UNFINISHED!r}"
            query = f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({used})"
            files = [file_id for (file_id,) in db.execute(query, (now,))]
            db.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in files])
            batches: list[str] = []
            if ended_before is not None:
                rows = db.execute(f"SELECT record FROM batches WHERE status IN {ENDED!r} ORDER BY seq")
                old = (_decode_batch(row) for (row,) in rows)
                batches = [batch.id for batch in old if ended_at(batch) < ended_before]
                db.executemany("DELETE FROM batches WHERE id = ?", [(each,) for each in batches])
        for each in files:
            self.path(each).unlink(missing_ok=True)
        return len(files) + len(batches)

    def delete_orphans(self, before_s: float) -> int:
        """Delete content older than `before_s` that no record refers to. It remains when a process is killed
        during an upload."""
        known = {each for (each,) in self._all("SELECT id FROM files")}
        for batch in self.unfinished():
            known |= {batch.output_file_id, batch.error_file_id}
        count = 0
        for folder in ("content", "uploads"):
            for path in (self.folder / folder).iterdir():
                if path.name not in known and path.stat().st_mtime < before_s:
                    path.unlink(missing_ok=True)
                    count += 1
        return count


def ended_at(batch: BatchRecord) -> int:
    """Return when a batch ended, or when it was created if it has not ended."""
    times = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    return max((each for each in times if each is not None), default=batch.created_at)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _insert_file(db: sqlite3.Connection, record: FileRecord) -> None:
    db.execute(
        "INSERT INTO files (id, owner, purpose, bytes, expires_at, record) VALUES (?, ?, ?, ?, ?, ?)",
        (record.id, record.owner, record.purpose, record.bytes, record.expires_at, _encode(record)),
    )


def _update(db: sqlite3.Connection, batch_id: str, change: Callable[[BatchRecord], None]) -> BatchRecord:
    found = db.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if found is None:
        raise _no_batch(batch_id)
    batch = _decode_batch(found[0])
    change(batch)
    db.execute(
        "UPDATE batches SET status = ?, record = ? WHERE id = ?", (batch.status, _encode(batch), batch_id)
    )
    return batch


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id[:80]!r}; GET /v1/files lists yours", param="id")


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(f"there is no batch {batch_id[:80]!r}; GET /v1/batches lists yours", param="id")
