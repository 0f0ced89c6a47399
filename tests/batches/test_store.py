"""Owners find their files and batches page by page, and old ones are deleted."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.batches.leader import LeaderLock
from penstock.batches.records import BatchRecord, FileRecord, window_seconds
from penstock.batches.store import BatchStore
from penstock.errors import BadValue, ConfigError, NotFound


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "folder")


def add_file(store: BatchStore, name: str, owner: str = "", expires_at: int | None = None) -> FileRecord:
    store.upload_path(name).write_bytes(b"content")
    record = FileRecord(
        id=name,
        owner=owner,
        filename="in.jsonl",
        purpose="batch",
        bytes=7,
        created_at=1,
        expires_at=expires_at,
    )
    store.add_upload(record)
    return record


def add_batch(store: BatchStore, name: str, file_id: str, owner: str = "") -> BatchRecord:
    batch = BatchRecord(
        id=name,
        owner=owner,
        endpoint="/v1/embeddings",
        input_file_id=file_id,
        completion_window="24h",
        created_at=1,
        expires_at=2,
        output_file_id=f"{name}-out",
        error_file_id=f"{name}-err",
    )
    store.add_batch(batch)
    return batch


def test_an_owner_sees_its_own_files_and_batches_only(store: BatchStore) -> None:
    add_file(store, "file-a", "a")
    add_batch(store, "batch_a", "file-a", "a")
    assert store.file("file-a", "a").bytes == 7
    assert store.batch("batch_a", "a").status == "validating"
    with pytest.raises(NotFound):
        store.file("file-a", "b")
    with pytest.raises(NotFound):
        store.batch("batch_a", "b")
    with pytest.raises(NotFound):
        store.delete_file("file-a", "b")
    with pytest.raises(BadValue, match="no file 'file-a' was uploaded"):
        add_batch(store, "batch_b", "file-a", "b")
    assert store.files("b", limit=10) == ([], False)
    assert store.batches("b", limit=10) == ([], False)


def test_lists_have_pages(store: BatchStore) -> None:
    for number in range(5):
        add_file(store, f"file-{number}")
        add_batch(store, f"batch_{number}", f"file-{number}")

    def ids(found: tuple[list[FileRecord], bool]) -> tuple[list[str], bool]:
        return [each.id for each in found[0]], found[1]

    assert ids(store.files("", limit=2)) == (["file-4", "file-3"], True)
    assert ids(store.files("", limit=3, after="file-3")) == (["file-2", "file-1", "file-0"], False)
    assert ids(store.files("", limit=2, order="asc", after="file-1")) == (["file-2", "file-3"], True)
    assert ids(store.files("", limit=2, purpose="batch_output")) == ([], False)
    found, has_more = store.batches("", limit=2, after="batch_4")
    assert [each.id for each in found] == ["batch_3", "batch_2"]
    assert has_more
    with pytest.raises(BadValue, match="after is 'file-9', which is not in the list"):
        store.files("", limit=2, after="file-9")


def test_the_input_of_a_batch_that_runs_is_kept(store: BatchStore) -> None:
    add_file(store, "file-a", expires_at=5)
    add_batch(store, "batch_a", "file-a")
    with pytest.raises(BadValue, match="is the input of batch_a, which has not ended"):
        store.delete_file("file-a", "")
    assert store.delete_expired(10, None) == 0

    def end(record: BatchRecord) -> None:
        record.status, record.completed_at = "completed", 7

    store.end("batch_a", end)
    assert store.delete_expired(10, 8) == 2
    assert not store.path("file-a").exists()
    assert store.unfinished() == []
    with pytest.raises(NotFound):
        store.batch("batch_a")


def test_the_output_of_a_batch_is_no_input(store: BatchStore) -> None:
    add_file(store, "file-a")
    add_batch(store, "batch_a", "file-a")
    output = FileRecord(
        id="batch_a-out", owner="", filename="o", purpose="batch_output", bytes=3, created_at=1
    )
    store.end("batch_a", lambda record: None, [output])
    with pytest.raises(BadValue, match="upload one with purpose batch"):
        add_batch(store, "batch_b", "batch_a-out")
    assert store.used_bytes() == 10


def test_content_that_nothing_refers_to_is_deleted_when_it_is_old(store: BatchStore) -> None:
    add_file(store, "file-a")
    store.path("file-lost").write_bytes(b"x")
    store.upload_path("file-half").write_bytes(b"x")
    for path in (store.path("file-a"), store.path("file-lost"), store.upload_path("file-half")):
        os.utime(path, (1, 1))
    store.path("file-young").write_bytes(b"x")
    assert store.delete_orphans(100.0) == 2
    assert store.path("file-a").exists()
    assert store.path("file-young").exists()


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    store._db.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(ConfigError, match=r"written by another release .format 9, not 1."):
        BatchStore(tmp_path)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--batch-folder .* cannot be used"):
        BatchStore(tmp_path / "file")


def test_one_process_leads_and_another_takes_over(tmp_path: Path) -> None:
    first, second, other = (LeaderLock(tmp_path, name) for name in ("server 1", "server 1", "server 2"))
    assert first.try_to_lead()
    assert not second.try_to_lead()
    assert second.other_server == ""
    assert not other.try_to_lead()
    assert other.other_server == "server 1"
    first.release()
    assert second.try_to_lead()
    second.release()
    assert other.try_to_lead()
    assert other.other_server == ""


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90m", 5400), ("7d", 604_800), ("30s", 30)])
def test_windows_are_durations(text: str, seconds: int) -> None:
    assert window_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "0h", "-1h", "31d", "24 h", "1e3s", "99999999d"])
def test_other_windows_are_refused(text: str) -> None:
    with pytest.raises(BadValue, match="such as 24h, 90m or 7d"):
        window_seconds(text)


class FullDisk:
    """A database connection that fails to commit once."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._fails = True

    def execute(self, sql: str, *values: Any) -> Any:
        if sql == "COMMIT" and self._fails:
            self._fails = False
            raise sqlite3.OperationalError("database or disk is full")
        return self._db.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_a_failed_commit_is_rolled_back_and_blocks_no_later_write(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_db", FullDisk(store._db))
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        add_file(store, "file-1")
    with pytest.raises(NotFound):
        store.file("file-1", "")
    add_file(store, "file-2")
    assert store.file("file-2", "").id == "file-2"
