"""Leader election: the process that holds a file lock runs the batches of a folder.

The lock is released when its process ends, however it ends. Then another API process of the server takes
over. A second server on the same folder waits and reports this.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class LeaderLock:
    """The lock of a folder. `server` names the server that this process belongs to."""

    def __init__(self, folder: Path, server: str) -> None:
        self._path = folder / "leader.lock"
        self._server = server
        self._descriptor = -1
        self.other_server = ""  # the other server that holds the lock, or ""

    @property
    def is_held(self) -> bool:
        return self._descriptor >= 0

    def try_to_lead(self) -> bool:
        """Take the lock if it is free. Returns whether this process holds it."""
        if self.is_held:
            return True
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace").strip()
            self.other_server = "" if holder in ("", self._server) else holder
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self._server.encode(), 0)
        self._descriptor, self.other_server = descriptor, ""
        return True

    def release(self) -> None:
        if self.is_held:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1
