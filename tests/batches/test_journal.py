"""Every line of a batch is answered exactly once, whenever the process is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.batches import journal as journal_module
from penstock.batches.journal import Journal, LineAnswer
from penstock.batches.records import BatchRecord, FileRecord, Usage
from penstock.batches.store import BatchStore
from penstock.errors import EngineError

NUM_LINES = 12
GROUP = 3


class Killed(BaseException):
    """Stands in for the death of the process."""


def make_batch(store: BatchStore) -> BatchRecord:
    store.upload_path("file-in").write_bytes(b"x")
    store.add_upload(
        FileRecord(id="file-in", owner="", filename="in", purpose="batch", bytes=1, created_at=1)
    )
    batch = BatchRecord(
        id="batch_1",
        owner="",
        endpoint="/v1/embeddings",
        input_file_id="file-in",
        completion_window="24h",
        created_at=1,
        expires_at=2,
        status="in_progress",
        total=NUM_LINES,
        output_file_id="file-out",
        error_file_id="file-err",
    )
    store.add_batch(batch)
    return batch


def answer(line: int) -> LineAnswer:
    raw = json.dumps({"line": line, "text": "x" * line}).encode()
    return LineAnswer(line, raw, is_error=line % 4 == 0, usage=Usage(input_tokens=line))


def run(folder: Path) -> None:
    """Run a batch as its leader does: resume it, and answer the remaining lines."""
    store = BatchStore(folder)
    try:
        journal = Journal(store, store.batch("batch_1"))
        left = [line for line in range(1, NUM_LINES + 1) if line not in store.done_lines("batch_1")]
        for at in range(0, len(left), GROUP):
            journal.append([answer(line) for line in left[at : at + GROUP]])
        journal.close()
    finally:
        store.close()


def kill_at_write(size: int) -> Callable[[int, bytes], int]:
    def write(descriptor: int, content: bytes) -> int:
        os.write(descriptor, content[:size])
        raise Killed

    return write


def raise_killed(*_: object) -> None:
    raise Killed


def kill_points(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    commit_lines = BatchStore.commit_lines
    if point == "in a write":
        monkeypatch.setattr(journal_module, "_write", lambda d, c: kill_at_write(5)(d, c))
    elif point == "before a sync":
        monkeypatch.setattr(os, "fdatasync", raise_killed)
    elif point == "before the transaction":
        monkeypatch.setattr(BatchStore, "commit_lines", raise_killed)
    elif point == "in the transaction":
        monkeypatch.setattr(journal_module, "_count", raise_killed)
    elif point == "behind the transaction":

        def commit_and_die(self: BatchStore, *arguments: object) -> BatchRecord:
            commit_lines(self, *arguments)  # type: ignore[arg-type]
            raise Killed

        monkeypatch.setattr(BatchStore, "commit_lines", commit_and_die)


POINTS = (
    "in a write",
    "before a sync",
    "before the transaction",
    "in the transaction",
    "behind the transaction",
)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("num_groups", [0, 2])
def test_every_line_is_answered_once(tmp_path: Path, point: str, num_groups: int) -> None:
    store = BatchStore(tmp_path)
    journal = Journal(store, make_batch(store))
    for group in range(num_groups):
        journal.append([answer(line) for line in range(1 + GROUP * group, 1 + GROUP * (group + 1))])
    journal.close()
    store.close()
    with pytest.MonkeyPatch.context() as patch:
        kill_points(patch, point)
        with pytest.raises(Killed):
            run(tmp_path)
    run(tmp_path)
    store = BatchStore(tmp_path)
    batch = store.batch("batch_1")
    output = store.path("file-out").read_bytes()
    errors = store.path("file-err").read_bytes()
    assert (len(output), len(errors)) == (batch.output_bytes, batch.error_bytes)
    lines = [json.loads(line)["line"] for line in (output + errors).splitlines()]
    assert sorted(lines) == list(range(1, NUM_LINES + 1))
    assert (batch.completed, batch.failed) == (9, 3)
    assert batch.usage.input_tokens == sum(range(1, NUM_LINES + 1))
    store.close()


def test_a_file_that_has_lost_committed_bytes_is_refused(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    journal = Journal(store, make_batch(store))
    journal.append([answer(1)])
    journal.close()
    store.path("file-out").write_bytes(b"")
    with pytest.raises(EngineError, match=r"file-out has 0 bytes, but .* the folder is damaged"):
        Journal(store, store.batch("batch_1"))
    store.close()
