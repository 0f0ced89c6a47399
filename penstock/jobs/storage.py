"""A folder of files with atomic writes, on a local disk or in an object store.

Several processes may commit files at the same time, even from several machines.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.errors import BadValue
from penstock.jobs.remote import OBJECT_STORES, is_remote, local_path, open_file_system

DRAFT = "draft-"  # prefix of the names of unfinished files
Write = Callable[[Path], object]


class Folder(ABC):
    """Picklable, so that it can be sent to the processes that write to it."""

    location: str

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def create(self) -> None: ...

    @abstractmethod
    def names(self) -> list[str]:
        """List the names of its files in order, without drafts."""

    @abstractmethod
    def commit(self, name: str, write: Write, check: Callable[[], None] = lambda: None) -> None:
        """Let `write` write a file to a local path, then publish it as `name`.

        `check` is called in between, and raises if the file must no longer be published.
        """

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def remove_drafts(self) -> None: ...

    @abstractmethod
    def remove_folder(self) -> None:
        """Remove the empty folder."""

    @abstractmethod
    def lock(self) -> int | None:
        """Lock the folder against other runs until this process ends, if the storage supports locks."""


def open_folder(location: str) -> Folder:
    if is_remote(location):
        return RemoteFolder(location.rstrip("/"))
    return LocalFolder(str(Path(local_path(location)).resolve()))


class LocalFolder(Folder):
    def __init__(self, location: str) -> None:
        self.location = location

    @property
    def path(self) -> Path:
        return Path(self.location)

    def exists(self) -> bool:
        return self.path.is_dir()

    def create(self) -> None:
        self.path.mkdir(exist_ok=True)

    def names(self) -> list[str]:
        return sorted(file.name for file in self.path.iterdir() if not file.name.startswith(DRAFT))

    def commit(self, name: str, write: Write, check: Callable[[], None] = lambda: None) -> None:
        draft = self.path / f"{DRAFT}{uuid.uuid4().hex}"
        try:
            write(draft)
            sync(draft)
            check()
            move(draft, self.path / name)
        except BaseException:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        sync(self.path)

    def read(self, name: str) -> bytes | None:
        file = self.path / name
        return file.read_bytes() if file.is_file() else None

    def remove(self, name: str) -> None:
        remove(self.path / name)

    def remove_drafts(self) -> None:
        for draft in self.path.glob(f"{DRAFT}*"):
            remove(draft)

    def remove_folder(self) -> None:
        with suppress(OSError):  # somebody else has put a file there
            self.path.rmdir()

    def lock(self) -> int | None:
        """Lock the folder until this process ends, however it ends."""
        try:
            import fcntl
        except ImportError:
            return None
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BadValue(f"another process is writing {self.path}", param="--output") from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            return None
        return descriptor


class RemoteFolder(Folder):
    """Files at a URI. Each is written to the local disk first, then uploaded as a whole."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._open()

    def __getstate__(self) -> str:
        return self.location

    def __setstate__(self, location: str) -> None:
        self.location = location
        self._open()

    def _open(self) -> None:
        self._file_system, self._root = open_file_system(self.location, "--output")
        self._puts_whole = self.location.split("://", 1)[0] in OBJECT_STORES

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def exists(self) -> bool:
        return bool(self.names())

    def create(self) -> None:
        if not self._puts_whole:
            self._file_system.makedirs(self._root, exist_ok=True)

    def names(self) -> list[str]:
        self._file_system.invalidate_cache()
        try:
            found = self._file_system.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [str(each).rstrip("/").rsplit("/", 1)[-1] for each in found]
        return sorted(name for name in names if not name.startswith(DRAFT))

    def commit(self, name: str, write: Write, check: Callable[[], None] = lambda: None) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            draft = Path(folder, "draft")
            write(draft)
            check()
            if self._puts_whole:
                self._file_system.put_file(str(draft), self._path(name))
                return
            remote_draft = self._path(f"{DRAFT}{uuid.uuid4().hex}")
            self._file_system.put_file(str(draft), remote_draft)
            self._file_system.mv(remote_draft, self._path(name))

    def read(self, name: str) -> bytes | None:
        try:
            content: bytes = self._file_system.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._file_system.rm_file(self._path(name))

    def remove_drafts(self) -> None:
        if self._puts_whole:
            return
        for each in self._file_system.ls(self._root, detail=False):
            if str(each).rsplit("/", 1)[-1].startswith(DRAFT):
                self._file_system.rm_file(each)

    def remove_folder(self) -> None:
        if not self._puts_whole:
            with suppress(OSError):
                self._file_system.rmdir(self._root)

    def lock(self) -> None:
        return None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    if path.is_dir() and os.name != "posix":
        return  # only POSIX systems can open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """Rename a file or a folder, replacing what has the target name."""
    if target.is_dir():
        aside = target.with_name(f"{target.name}.replaced-{uuid.uuid4().hex}")
        target.rename(aside)
        source.rename(target)
        remove(aside)
    else:
        source.replace(target)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
