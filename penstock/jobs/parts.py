"""The folder next to an unfinished output: finished parts, and the settings they were made with.

`OUT.parts/` holds `manifest.json` and one file for each chunk of rows, named by first row and count.
A file gets its name only when it is complete and on disk. A run that is killed at any moment leaves
complete parts and at most one draft, which is ignored:

    running   manifest, parts …                 --resume continues after the last part
    joined    manifest says so, `whole` is OUT   --resume only moves it into place
    finished  OUT is in its place                the folder is removed, the manifest last
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import BadValue

_PART = re.compile(r"(\d{12})-(\d+)\.\w+")
_MANIFEST, _WHOLE, _DRAFT = "manifest.json", "whole", "draft"
_LAYOUT = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    layout: int = _LAYOUT
    settings: dict[str, Any]
    overwrite: bool  # the run may replace an existing output
    joined_rows: int | None = None  # set when `whole` is complete


def parts_folder(output: Path) -> Path:
    return output.with_name(output.name + ".parts")


def check_output(output: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse early what would fail later or destroy an output."""
    if output.is_dir():
        raise BadValue(f"{output} is a folder; give a file", param="--output")
    if not output.parent.is_dir():
        raise BadValue(f"there is no folder {output.parent} to write {output.name} into", param="--output")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise BadValue(f"the folder {output.parent} is not writable", param="--output")
    folder = parts_folder(output)
    is_started = (folder / _MANIFEST).is_file()
    if is_started and not (resume or overwrite):
        raise BadValue(
            f"{folder} holds an unfinished run; continue with --resume, or start again with --overwrite",
            param="--output",
        )
    if output.exists() and not overwrite and not (resume and is_started):
        raise BadValue(f"{output} exists; replace it with --overwrite", param="--output")


class Parts:
    """The parts folder of one run. Only one process can open it at a time."""

    def __init__(
        self, output: Path, suffix: str, settings: dict[str, Any], *, resume: bool, overwrite: bool
    ) -> None:
        self.output = output
        self.folder = parts_folder(output)
        self._suffix = suffix
        self.folder.mkdir(exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            check_output(
                output, resume=resume, overwrite=overwrite
            )  # again, now that no other process can change it
            self._manifest = self._begin(settings, resume, overwrite)
            self._finished = self._contiguous()
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> int:
        """Number of rows on disk, from row 0 on."""
        if self._manifest.joined_rows is not None:
            return self._manifest.joined_rows
        first, count = _span(self._finished[-1]) if self._finished else (0, 0)
        return first + count

    @property
    def joined(self) -> bool:
        return self._manifest.joined_rows is not None

    def add(self, count: int, write: Callable[[Path], object]) -> None:
        """Add the next `count` rows. `write` creates the file."""
        part = self.folder / f"{self.rows:012d}-{count}{self._suffix}"
        self._commit(part, write)
        self._finished.append(part)

    def finish(self, join: Callable[[Sequence[Path], Path], None]) -> None:
        """Join the parts into the output and remove the folder."""
        whole = self.folder / _WHOLE
        if not self.joined:
            self._commit(whole, lambda draft: join(self._finished, draft))
            self._save(msgspec.structs.replace(self._manifest, joined_rows=self.rows))
        if whole.exists():
            whole.replace(self.output)
            _sync(self.output.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the folder, the manifest last, because it describes the rest."""
        if self.folder.exists():
            _clear(self.folder)
            self.folder.rmdir()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, settings: dict[str, Any], resume: bool, overwrite: bool) -> Manifest:
        _refuse_foreign_files(self.folder)
        found = _read_manifest(self.folder) if resume else None
        if found is None:
            _clear(self.folder)
            return self._save(Manifest(settings=settings, overwrite=overwrite))
        if changed := _changes(found.settings, settings):
            raise BadValue(
                f"{self.folder} was started with other settings ({changed}); "
                "use those, or start again with --overwrite",
                param="--resume",
            )
        self._check_output_state(found, overwrite)
        (self.folder / _DRAFT).unlink(missing_ok=True)
        return found

    def _check_output_state(self, found: Manifest, overwrite: bool) -> None:
        """Refuse an output that exists, unless the run may replace it or has written it itself."""
        moved = found.joined_rows is not None and not (self.folder / _WHOLE).exists()
        if moved and not self.output.exists():
            raise BadValue(
                f"{self.output} was finished, but no longer exists; start again with --overwrite",
                param="--resume",
            )
        if self.output.exists() and not (moved or overwrite or found.overwrite):
            raise BadValue(f"{self.output} exists; replace it with --overwrite", param="--output")

    def _contiguous(self) -> list[Path]:
        """The parts from row 0 up to the first gap. Parts after a gap are removed."""
        parts = sorted(file for file in self.folder.iterdir() if _PART.fullmatch(file.name))
        finished, rows = [], 0
        for part in parts:
            first, count = _span(part)
            if first == rows:
                finished.append(part)
                rows += count
            elif not self.joined:
                part.unlink()
        return finished

    def _save(self, manifest: Manifest) -> Manifest:
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        self._commit(self.folder / _MANIFEST, lambda draft: draft.write_bytes(text))
        self._manifest = manifest
        return manifest

    def _commit(self, file: Path, write: Callable[[Path], object]) -> None:
        """Write a draft, sync it, then rename it, so that `file` is always complete."""
        draft = self.folder / _DRAFT
        write(draft)
        _sync(draft)
        draft.replace(file)
        _sync(self.folder)


def _span(part: Path) -> tuple[int, int]:
    match = _PART.fullmatch(part.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _read_manifest(folder: Path) -> Manifest | None:
    file = folder / _MANIFEST
    if not file.is_file():
        return None
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise BadValue(f"{file} is damaged ({error}); start again with --overwrite") from None
    if manifest.layout != _LAYOUT:
        raise BadValue(f"{folder} was started by another version; start again with --overwrite")
    return manifest


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    after = msgspec.json.decode(msgspec.json.encode(after))  # as it is read back: tuples become lists
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "; ".join(f"{name}: {_shown(before.get(name))}, now {_shown(after.get(name))}" for name in names)


def _shown(value: Any) -> str:
    return "none" if value is None else msgspec.json.encode(value).decode()


def _refuse_foreign_files(folder: Path) -> None:
    """Refuse files that this module did not write, because it would remove them."""
    for file in folder.iterdir():
        if file.name not in (_MANIFEST, _WHOLE, _DRAFT) and not _PART.fullmatch(file.name):
            raise BadValue(
                f"{folder} holds {file.name}, which is not part of an unfinished run; move it away"
            )


def _clear(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name != _MANIFEST:
            file.unlink()
    (folder / _MANIFEST).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return  # only POSIX opens folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int | None:
    """Lock the folder until this process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadValue(f"another process is writing {folder}", param="--output") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor
