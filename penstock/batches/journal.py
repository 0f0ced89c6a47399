"""The journal of a batch's answers. Every line is answered exactly once, even if the process is killed.

A group of answers is written and synced first. Then one transaction records the lines that they answer and
the new lengths of the files. Bytes beyond the recorded length were never committed: when the batch continues,
they are truncated, and their lines run again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.batches.records import BatchRecord, Usage
from penstock.batches.store import BatchStore, sync_folder
from penstock.errors import EngineError


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to one line of a batch. It becomes a line of the output file or of the error file."""

    line: int  # number of the line in the input file, from 1
    raw: bytes  # JSON, without a newline
    is_error: bool = False
    usage: Usage = field(default_factory=Usage)


class Journal:
    """The output file and the error file of one batch. Only one process at a time may open it."""

    def __init__(self, store: BatchStore, batch: BatchRecord) -> None:
        self._store = store
        self.batch = batch
        self._output = _open_at(store.path(batch.output_file_id), batch.output_bytes)
        self._errors = _open_at(store.path(batch.error_file_id), batch.error_bytes)
        sync_folder(store.folder / "content")

    def append(self, answers: Sequence[LineAnswer]) -> BatchRecord:
        """Commit answers to lines. They are durable when this returns."""
        output = b"".join(answer.raw + b"\n" for answer in answers if not answer.is_error)
        errors = b"".join(answer.raw + b"\n" for answer in answers if answer.is_error)
        for descriptor, content in ((self._output, output), (self._errors, errors)):
            if content:
                _write(descriptor, content)
                os.fdatasync(descriptor)
        self.batch = self._store.commit_lines(
            self.batch.id,
            [answer.line for answer in answers],
            lambda batch: _count(batch, answers, len(output), len(errors)),
        )
        return self.batch

    def close(self) -> None:
        os.close(self._output)
        os.close(self._errors)


def _count(batch: BatchRecord, answers: Sequence[LineAnswer], num_output: int, num_errors: int) -> None:
    batch.output_bytes += num_output
    batch.error_bytes += num_errors
    num_failed = sum(answer.is_error for answer in answers)
    batch.failed += num_failed
    batch.completed += len(answers) - num_failed
    for answer in answers:
        batch.usage.add(answer.usage)


def _open_at(path: Path, size: int) -> int:
    """Open a file for appending after its committed bytes. The rest is truncated."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor).st_size
    if found < size:
        os.close(descriptor)
        raise EngineError(f"{path.name} has {found} bytes, but {size} were written: the folder is damaged")
    os.ftruncate(descriptor, size)
    os.lseek(descriptor, size, os.SEEK_SET)
    return descriptor


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
