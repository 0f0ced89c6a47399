"""Outputs of a job: a file, a folder of files, or a vector store.

Rows arrive in blocks. The rows of a block are durable before its range of row numbers is recorded. So after a
crash at any moment, the next run knows which blocks to compute again. Committing a block again is harmless: a
file has the same name, and a store replaces rows by id.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.errors import BadValue
from penstock.jobs.blocks import Block, VectorColumns
from penstock.jobs.formats import OutputFormat
from penstock.jobs.inputs import by_extension
from penstock.jobs.parts import (
    ERRORS,
    WHOLE,
    Cut,
    Manifest,
    Parts,
    PartWriter,
    check_output,
    check_parent,
    output_exists,
    parts_folder,
    read_manifest,
    unfinished,
)
from penstock.jobs.remote import is_remote, local_path
from penstock.jobs.stamp import Stamp
from penstock.jobs.storage import LocalFolder, move, open_folder, remove, sync
from penstock.jobs.vectors import BY_EXTENSION, VectorFormat, vector_format


class TableSink(Protocol):
    """Receives finished tables, for example a vector store.

    A table has `id`, the kept columns, and one or more of `vector` (fixed-size list), `sparse` (struct of
    `indices` and `values`) and `multi_vector` (list of fixed-size lists). Its schema carries the stamp.
    """

    def open(self, schema: Any, stamp: Stamp) -> None:
        """Create what is missing. Raises `BadValue` if there are rows with another stamp or other columns."""

    def write(self, table: Any) -> None:
        """Store the rows durably. Rows whose ids already exist are replaced."""

    def finish(self) -> None:
        """Build indexes and close connections. Called once, after the last row."""


OpenSink = Callable[[], TableSink]  # picklable, so that every worker can open its own sink
# Like `TableSink.open`, but changes nothing. Returns the number of rows in the sink.
CheckSink = Callable[[Any, Stamp], int]


class BlockWriter(Protocol):
    """Commits blocks, in any process. Picklable."""

    def commit(self, block: Block) -> None: ...


class RunFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run, and how it treats existing output."""

    settings: dict[str, Any]
    cut: Cut
    resume: bool
    overwrite: bool


class Output(ABC):
    """An output that was begun. `parts` records which blocks are committed."""

    parts: Parts
    writer: BlockWriter
    label: str  # its name in messages

    @abstractmethod
    def finish(self) -> None:
        """Complete the output after every block is committed."""

    @property
    def errors_file(self) -> str | None:
        """The file that lists bad rows once the output is finished; None if there are none."""
        return None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.parts.close()


class FileBlocks:
    """Writes each block as a part."""

    def __init__(self, parts: PartWriter, form: VectorFormat) -> None:
        self._parts = parts
        self._form = form

    def commit(self, block: Block) -> None:
        self._parts.commit(block.span, lambda file: self._form.write(file, block), block.bad)


class FileOutput(Output):
    """One file or one Lance dataset. Parts are kept in `OUT.parts` until all of them exist."""

    def __init__(self, output: Path, form: OutputFormat, columns: VectorColumns, flags: RunFlags) -> None:
        self.output = output
        self.label = str(output)
        self._form = vector_format(form, columns)
        self._may_be_folder = form is OutputFormat.LANCE
        self._overwrite = flags.overwrite
        self._resume = flags.resume
        self._folder = LocalFolder(str(parts_folder(output.absolute())))
        self.parts = Parts(
            self._folder,
            self._form.suffix,
            flags.settings,
            stamp=msgspec.to_builtins(columns.stamp),
            cut=flags.cut,
            resume=flags.resume,
            overwrite=flags.overwrite,
            check=self._check,
        )
        self.writer = FileBlocks(self.parts.writer, self._form)

    @property
    def errors_file(self) -> str | None:
        file = self._errors
        return str(file) if file.exists() else None

    @property
    def _errors(self) -> Path:
        return self.output.with_name(self.output.name + ".errors.jsonl")

    def finish(self) -> None:
        """Join the parts into the output and remove their folder."""
        if self.parts.is_running:
            self._join()
        folder = self._folder.path
        if (folder / WHOLE).exists():
            if (folder / ERRORS).exists():
                move(folder / ERRORS, self._errors)
            elif not self.parts.manifest.bad_rows:
                remove(self._errors)  # left by the replaced output
            move(folder / WHOLE, self.output)
            sync(self.output.parent)
        self.parts.discard()

    def _join(self) -> None:
        files = [self._folder.path / part.name for part in self.parts.files()]
        bad_rows = self.parts.commit_errors()
        self._folder.commit(WHOLE, lambda draft: self._form.join(files, draft))
        self.parts.save(state="joined", input_rows=self.parts.rows, bad_rows=bad_rows)

    def _check(self, found: Manifest | None) -> None:
        check_output(
            self.output,
            resume=self._resume,
            overwrite=self._overwrite,
            may_be_folder=self._may_be_folder,
        )
        if found is None:
            return
        moved = found.state == "joined" and not (self._folder.path / WHOLE).exists()
        if moved and not self.output.exists():
            raise BadValue(
                f"{self.output} was finished, but no longer exists; start again with --overwrite",
                param="--resume",
            )
        if self.output.exists() and not (moved or self._overwrite or found.overwrite):
            raise output_exists(str(self.output))


class FolderOutput(Output):
    """A folder of parts with a manifest, local or in an object store. Parts are not joined."""

    def __init__(self, location: str, form: OutputFormat, columns: VectorColumns, flags: RunFlags) -> None:
        self._folder = open_folder(location)
        self.label = location
        self._flags = flags
        self._form = vector_format(form, columns)
        self.parts = Parts(
            self._folder,
            self._form.suffix,
            flags.settings,
            stamp=msgspec.to_builtins(columns.stamp),
            cut=flags.cut,
            resume=flags.resume,
            overwrite=flags.overwrite,
            check=lambda found: check_folder(location, flags.resume, flags.overwrite),
        )
        self.writer = FileBlocks(self.parts.writer, self._form)

    @property
    def errors_file(self) -> str | None:
        return f"{self.label.rstrip('/')}/{ERRORS}" if self.parts.manifest.bad_rows else None

    def finish(self) -> None:
        """List the files in the manifest and mark the folder as complete."""
        if not self.parts.is_running:
            return
        files = self.parts.files()
        bad_rows = self.parts.commit_errors()
        self.parts.save(
            state="complete",
            input_rows=self.parts.rows,
            bad_rows=bad_rows,
            errors=ERRORS if bad_rows else None,
            files=files,
        )
        for _, name in self.parts.bad_rows():
            self._folder.remove(name)


class SinkBlocks:
    """Writes each block to a vector store, then records it in the run's folder."""

    def __init__(self, parts: PartWriter, open_sink: OpenSink, columns: VectorColumns) -> None:
        self.__setstate__((parts, open_sink, columns))

    def __getstate__(self) -> tuple[PartWriter, OpenSink, VectorColumns]:
        return self._parts, self._open_sink, self._columns

    def __setstate__(self, state: tuple[PartWriter, OpenSink, VectorColumns]) -> None:
        self._parts, self._open_sink, self._columns = state
        self._sink: TableSink | None = None
        self._lock = threading.Lock()  # a Ray worker commits from several threads

    def commit(self, block: Block) -> None:
        table = self._columns.table(block)
        with self._lock:
            self._opened(table.schema).write(table)
        schema = table.schema.serialize().to_pybytes()
        self._parts.commit(block.span, lambda file: file.write_bytes(schema), block.bad)

    def finish(self, committed: str) -> None:
        """Finish the store. If only other processes wrote to it, the part `committed` has the schema."""
        if self._sink is None:
            import pyarrow as pa

            schema = self._parts.folder.read(committed)
            assert schema is not None
            self._opened(pa.ipc.read_schema(pa.py_buffer(schema)))
        assert self._sink is not None
        self._sink.finish()

    def _opened(self, schema: Any) -> TableSink:
        """Return the sink. The first call opens it with the schema."""
        if self._sink is None:
            sink = self._open_sink()
            sink.open(schema, self._columns.stamp)
            self._sink = sink
        return self._sink


class SinkOutput(Output):
    """A vector store. Until it has all blocks, the folder `progress` records those that are stored."""

    def __init__(
        self, label: str, open_sink: OpenSink, progress: Path, columns: VectorColumns, flags: RunFlags
    ) -> None:
        self.label = label
        self._progress = progress
        self._folder = LocalFolder(str(progress.absolute()))
        self.parts = Parts(
            self._folder,
            ".done",
            {**flags.settings, "to": label},
            stamp=msgspec.to_builtins(columns.stamp),
            cut=flags.cut,
            resume=flags.resume,
            overwrite=flags.overwrite,
            check=lambda found: check_folder(str(progress), flags.resume, flags.overwrite),
        )
        self.writer: SinkBlocks = SinkBlocks(self.parts.writer, open_sink, columns)

    @property
    def errors_file(self) -> str | None:
        return str(self._errors) if self._errors.exists() else None

    @property
    def _errors(self) -> Path:
        return self._progress.with_name(self._progress.name.removesuffix(".parts") + ".errors.jsonl")

    def finish(self) -> None:
        self.writer.finish(self.parts.files()[0].name)
        if self.parts.commit_errors():
            move(self._folder.path / ERRORS, self._errors)
        self.parts.discard()


def check_folder(location: str, resume: bool, overwrite: bool) -> None:
    """Refuse early if a run would destroy a folder of parts."""
    if not is_remote(location):
        path = Path(local_path(location))
        if path.exists() and not path.is_dir():
            raise BadValue(f"{path} is a file, not a folder", param="--output")
        check_parent(path.absolute())
    folder = open_folder(location)
    found = read_manifest(folder) if not overwrite else None
    if found is not None and not resume:
        raise output_exists(location) if found.state == "complete" else unfinished(location)


def is_folder_output(output: str) -> bool:
    """Whether the output is a folder of parts: a URI, or a path that ends with / or has no extension."""
    return is_remote(output) or output.endswith("/") or not Path(output).suffix


def check_file_or_folder(
    output: str, form: OutputFormat | None, *, resume: bool, overwrite: bool
) -> OutputFormat:
    """Choose the format of an output, and refuse to destroy existing output."""
    if not is_folder_output(output):
        chosen = form or by_extension(output, BY_EXTENSION, "--output-format")
        is_dataset = chosen is OutputFormat.LANCE
        check_output(Path(local_path(output)), resume=resume, overwrite=overwrite, may_be_folder=is_dataset)
        return chosen
    if is_remote(output) and Path(output).suffix in BY_EXTENSION:
        raise BadValue(
            f"an output behind a URI is a folder of files; end it with /, such as "
            f"{output.removesuffix(Path(output).suffix)}/",
            param="--output",
        )
    if form is OutputFormat.LANCE:
        raise BadValue("a Lance output is one dataset; name it OUT.lance", param="--output-format")
    check_folder(output, resume, overwrite)
    return form or OutputFormat.PARQUET


def open_output(output: str, form: OutputFormat, columns: VectorColumns, flags: RunFlags) -> Output:
    """Begin or resume an output to a file or a folder."""
    if is_folder_output(output):
        return FolderOutput(output, form, columns, flags)
    return FileOutput(Path(local_path(output)), form, columns, flags)
