"""Files that may change while the server runs: keys and certificates. A timer checks them, so that no
request waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

WATCH_INTERVAL_S = 1.0
_SETTLED_S = 2.0  # a newer file may be written again within the same tick of the clock
log = logging.getLogger("penstock.api")
Signature = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles:
    """Detects whether any of several files has changed since it was last read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._seen: Signature | None = None

    def have_changed(self) -> bool:
        """Whether the files have to be read (again). Call it before reading them."""
        signature = tuple(map(_signature, self.paths))
        if signature == self._seen:
            return False
        newest_s = max((each[0] for each in signature if each is not None), default=0) / 1e9
        self._seen = signature if abs(time.time() - newest_s) > _SETTLED_S else None
        return True


def _signature(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


async def watch_files(checks: Sequence[Callable[[], None]]) -> None:
    """Run the checks on a thread, again and again, until cancelled."""
    while checks:
        await asyncio.sleep(WATCH_INTERVAL_S)
        for check in checks:
            try:
                await asyncio.to_thread(check)
            except Exception:
                log.exception("a watched file could not be checked")
