"""Opening of inputs: files, stdin, folders, patterns, Lance datasets, or URIs of these."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import msgspec

from penstock.errors import BadValue
from penstock.jobs.formats import InputFormat
from penstock.jobs.images import DEFAULT_PDF_DPI, is_image_file, open_images
from penstock.jobs.records import RecordSource
from penstock.jobs.remote import is_remote, local_path, open_file_system, version_of
from penstock.jobs.rows import Chunk, Columns, Source, check_columns
from penstock.jobs.tables import LanceSource, ParquetSource, TableSource

log = logging.getLogger("penstock.jobs")
STDIN = "-"
BY_EXTENSION = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".csv": InputFormat.CSV,
    ".parquet": InputFormat.PARQUET,
    ".txt": InputFormat.TEXT,
    ".text": InputFormat.TEXT,
    ".lance": InputFormat.LANCE,
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"), InputFormat.IMAGE),
    ".pdf": InputFormat.PDF,
}
_BUFFER_BYTES = 1 << 20
F = TypeVar("F")


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an input, or one Lance dataset."""

    location: str  # path or URI
    form: InputFormat
    size: int | None = None  # bytes; None if unknown
    version: str = ""  # changes when the file changes

    def open(self) -> Source:
        if is_image_file(self):
            return open_images([self], DEFAULT_PDF_DPI)
        if self.form is InputFormat.LANCE:
            return LanceSource(self.location)
        if is_remote(self.location):
            file_system, path = open_file_system(self.location, "input")
            stream: BinaryIO = file_system.open(path, "rb")
            if self.form is InputFormat.PARQUET:
                return ParquetSource(stream, self.location)
            return RecordSource(stream, self.location, self.form, self.size)
        if self.form is InputFormat.PARQUET:
            return ParquetSource(self.location, self.location)
        stream = open(self.location, "rb", buffering=_BUFFER_BYTES)  # noqa: SIM115, PTH123
        return RecordSource(stream, self.location, self.form, self.size)


def open_source(path: str, wanted: InputFormat | None) -> Source:
    """Open one input of any kind."""
    return open_inputs(find_files([path], wanted), wanted)


def open_inputs(
    files: Sequence[InputFile], wanted: InputFormat | None, *, pdf_dpi: int = DEFAULT_PDF_DPI
) -> Source:
    """Open the files that `find_files` has found. An empty list means stdin."""
    if not files:
        return _open_stdin(wanted)
    if any(map(is_image_file, files)):
        return open_images(files, pdf_dpi)
    return files[0].open() if len(files) == 1 else ChainedSource(files)


def find_files(inputs: Sequence[str], wanted: InputFormat | None) -> list[InputFile]:
    """Find the files of the inputs, in order; files of a folder or pattern by name. Empty for stdin."""
    if STDIN in inputs:
        if len(inputs) > 1:
            raise BadValue("stdin (-) cannot be combined with files", param="input")
        _check_stdin(wanted)
        return []
    found = [file for each in inputs for file in _find(each, wanted)]
    if not found:
        raise BadValue(f"{', '.join(inputs)} names no files", param="input")
    return found


def describe_files(files: Sequence[InputFile]) -> dict[str, Any]:
    """Return an identity of this input. It changes when the input's content changes."""
    if len(files) == 1:
        file = files[0]
        return {"input": file.location, "input_size": file.size, "input_version": file.version}
    digest = hashlib.blake2b(msgspec.json.encode(list(files)), digest_size=16).hexdigest()
    return {"input_files": len(files), "input_size": sum(file.size or 0 for file in files), "input": digest}


def by_extension(name: str, known: Mapping[str, F], flag: str) -> F:
    path = PurePosixPath(name)
    if (form := known.get(path.suffix.lower())) is None:
        raise BadValue(f"{path.name} has no known extension ({', '.join(known)}); give {flag}", param=flag)
    return form


def _find(given: str, wanted: InputFormat | None) -> list[InputFile]:
    if is_remote(given):
        return _find_remote(given, wanted)
    path = Path(local_path(given))
    if not path.exists() and glob.has_magic(given):
        matches = sorted(glob.glob(local_path(given), recursive=True))  # noqa: PTH207 - may be absolute
        if not matches:
            raise BadValue(f"no file matches {given}", param="input")
        return [file for match in matches for file in _find_local(Path(match), wanted)]
    return _find_local(path, wanted)


def _find_local(path: Path, wanted: InputFormat | None) -> list[InputFile]:
    if path.is_dir():
        if wanted is InputFormat.LANCE or (wanted is None and path.suffix == ".lance"):
            return [_lance_dataset(str(path.resolve()))]
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_visible(file, path)]
        chosen = _with_known_extension([str(file) for file in files], str(path), wanted)
        return [_local_file(Path(file), wanted) for file in chosen]
    if not path.is_file():
        raise BadValue(f"there is no file {path}", param="input")
    return [_local_file(path, wanted)]


def _local_file(path: Path, wanted: InputFormat | None) -> InputFile:
    form = wanted or by_extension(path.name, BY_EXTENSION, "--format")
    stat = path.stat()
    location = os.path.abspath(path)  # noqa: PTH100 - a link keeps its name
    return InputFile(location=location, form=form, size=stat.st_size, version=str(stat.st_mtime_ns))


def _is_visible(file: Path, folder: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _find_remote(given: str, wanted: InputFormat | None) -> list[InputFile]:
    if wanted is InputFormat.LANCE or (wanted is None and given.rstrip("/").endswith(".lance")):
        return [_lance_dataset(given)]
    file_system, path = open_file_system(given, "input")
    try:
        if glob.has_magic(path):
            found = sorted(file_system.glob(path))
        elif file_system.isdir(path):
            found = _with_known_extension(sorted(file_system.find(path)), given, wanted)
        else:
            found = [path]
        infos = [(each, file_system.info(each)) for each in found]
    except FileNotFoundError:
        raise BadValue(f"there is no file {given}", param="input") from None
    except OSError as error:
        raise BadValue(f"{given} cannot be read: {error}", param="input") from None
    return [
        InputFile(
            location=file_system.unstrip_protocol(each),
            form=wanted or by_extension(each, BY_EXTENSION, "--format"),
            size=info.get("size"),
            version=version_of(info),
        )
        for each, info in infos
        if info.get("type") != "directory"
    ]


def _lance_dataset(location: str) -> InputFile:
    with LanceSource(location) as dataset:
        assert isinstance(dataset, LanceSource)
        return InputFile(location=location, form=InputFormat.LANCE, version=str(dataset.version))


def _with_known_extension(files: Sequence[str], folder: str, wanted: InputFormat | None) -> list[str]:
    """Select the files of a folder with known extensions; all files if a format is given."""
    known = [file for file in files if wanted or PurePosixPath(file).suffix.lower() in BY_EXTENSION]
    if known:
        _log_left_out(sorted(set(files) - set(known)), folder)
        return known
    raise BadValue(f"{folder} holds no file of a known format ({', '.join(BY_EXTENSION)})", param="input")


def _check_stdin(wanted: InputFormat | None) -> None:
    if wanted not in (InputFormat.JSONL, InputFormat.CSV, InputFormat.TEXT):
        raise BadValue("stdin needs --format jsonl, csv or text", param="--format")


def _log_left_out(files: Sequence[str], folder: str) -> None:
    if files:
        first = ", ".join(PurePosixPath(file).name for file in files[:3])
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        log.warning("files of %s that have no known extension are left out: %s%s", folder, first, more)


def _open_stdin(wanted: InputFormat | None) -> Source:
    assert wanted is not None
    # Not sys.stdin: its lock, held by a thread that waits for input, would keep the interpreter from exiting
    # after ctrl-C.
    stream = open(0, "rb", closefd=False)  # noqa: SIM115
    return RecordSource(stream, "stdin", wanted, None)


class ChainedSource(Source):
    """Several files, read one after another. A chunk never holds rows of two files."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self._counts: list[int | None] = [None] * len(files)
        with files[0].open() as first:
            super().__init__(f"{files[0].location} and {len(files) - 1} more", first.names, first.text_names)
        if all(file.form in (InputFormat.PARQUET, InputFormat.LANCE) for file in files):
            self._counts = [_num_rows(file) for file in files]

    @property
    def file_rows(self) -> tuple[int, ...] | None:
        counts = tuple(count for count in self._counts if count is not None)
        return counts if len(counts) == len(self._counts) else None

    def chunks(self, columns: Columns, *, start: int, stop: int | None, size: int) -> Iterator[Chunk]:
        before = 0  # rows of the files before this one
        for index, file in enumerate(self._files):
            if stop is not None and before >= stop:
                return
            count = self._counts[index]
            if count is not None and before + count <= start:
                before += count
                continue
            with file.open() as source:
                source.skips_bad_rows = self.skips_bad_rows
                if source.names:
                    check_columns(source, columns)
                end = before
                for chunk in source.chunks(
                    columns,
                    start=0 if count is None else max(0, start - before),
                    stop=_less(stop, before),
                    size=size,
                ):
                    end = before + chunk.end
                    if end > start:
                        yield chunk.shifted(before, self._share_read(index, chunk.read))
            before = end if count is None else before + count

    def empty_chunk(self, columns: Columns) -> Chunk:
        with self._files[0].open() as first:
            return first.empty_chunk(columns)

    def close(self) -> None:
        pass

    def _share_read(self, index: int, read: float | None) -> float | None:
        sizes = [file.size or 1 for file in self._files]
        return (sum(sizes[:index]) + sizes[index] * (read or 0.0)) / sum(sizes)


def _less(stop: int | None, rows: int) -> int | None:
    return None if stop is None else stop - rows


def _num_rows(file: InputFile) -> int:
    with file.open() as source:
        assert isinstance(source, TableSource)
        return source.file_rows[0]
