"""The folder that the processes of one server share: sockets, metrics, the engine's status.

Anyone who can write to it could impersonate the engine. So only this user has access, and it lies where no
other user can replace it. The supervisor removes the folder when it exits. If the supervisor is killed, its
children remove it when they exit. If all are killed, the next server of this user removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import ConfigError

PREFIX = "penstock-serve-"
MAX_SOCKET_PATH_BYTES = 100  # the limit for a Unix socket is 104 to 108, depending on the system
_ROOT_UID = 0
_LOCK = "lock"


class RuntimeFolder:
    """A new runtime folder. It is in use as long as any process holds its lock."""

    def __init__(self, candidates: Iterable[Path] | None = None) -> None:
        parent = choose_parent(default_candidates() if candidates is None else candidates)
        remove_stale_folders(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # mode 0700
        self._lock_fd = _create_lock(self.path)

    def remove(self) -> None:
        os.close(self._lock_fd)
        shutil.rmtree(self.path, ignore_errors=True)


def default_candidates() -> list[Path]:
    """Possible parents of the folder, in order of preference."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    candidates = [tempfile.gettempdir(), *([runtime] if runtime else []), "/tmp", "/var/tmp", "/dev/shm"]
    return [Path(candidate) for candidate in candidates]


def choose_parent(candidates: Iterable[Path]) -> Path:
    """Choose the first folder that is writable, has a short path, and is safe from other users."""
    refused: list[str] = []
    for candidate in dict.fromkeys(candidates):
        if (problem := _problem(candidate)) is None:
            return candidate.resolve()
        refused.append(f"{candidate}: {problem}")
    raise ConfigError(
        "there is no folder for the server's sockets; set TMPDIR to a folder that only you can write to "
        f"({'; '.join(refused)})"
    )


def _problem(place: Path) -> str | None:
    try:
        resolved = place.resolve(strict=True)
    except OSError as error:
        return str(error.strerror)
    socket_path = resolved / f"{PREFIX}12345678" / "1234" / "engine255"
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        return "its path is too long for a Unix socket"
    if not os.access(resolved, os.W_OK | os.X_OK):
        return "not writable"
    if (
        unsafe := next((each for each in (resolved, *resolved.parents) if not _is_safe(each)), None)
    ) is not None:
        return f"other users can replace what is in {unsafe}"
    return None


def _is_safe(folder: Path) -> bool:
    """Whether no user except root can rename or remove this user's files in the folder."""
    found = folder.stat()
    if found.st_uid not in (_ROOT_UID, os.getuid()):
        return False
    return not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or bool(found.st_mode & stat.S_ISVTX)


def _create_lock(folder: Path) -> int:
    """Create the lock file. It gets its name only after it is locked."""
    draft = folder / f"{_LOCK}.part"
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    draft.rename(folder / _LOCK)
    return descriptor


def hold_lock(folder: Path) -> None:
    """Keep the folder in use until this process exits."""
    with contextlib.suppress(OSError):  # the server is shutting down
        fcntl.flock(os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC), fcntl.LOCK_SH | fcntl.LOCK_NB)


def remove_stale_folders(parent: Path) -> None:
    """Remove the folders of this user's servers that have no processes left."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
