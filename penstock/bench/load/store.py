"""The requests of a run as one block of memory that every load process maps: serialised once, read by all.

A second file decides which request comes next: all processes read it through one shared offset,
so each ticket is drawn exactly once and in order. No process can hold a lock while it sleeps.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_TICKET_BYTES = 4


def write_store(requests: Sequence[bytes], due_s: NDArray[np.float64] | None) -> int:
    """Write the requests. Layout: number of requests, number of due times (int64) · offsets [count + 1] ·
    due times · the bytes of the requests."""
    moments = np.empty(0) if due_s is None else due_s
    offsets = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum([len(request) for request in requests], out=offsets[1:])
    fd = _memory_file()
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(np.array([len(requests), len(moments)], dtype=np.int64).tobytes())
        file.write(offsets.tobytes())
        file.write(moments.astype(np.float64).tobytes())
        for request in requests:
            file.write(request)
    return fd


class Store:
    """The mapped requests, and the time at which each ticket is due (empty without a rate)."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        count, moments = (int(n) for n in np.frombuffer(self._map, np.int64, 2))
        at = 16
        self._offsets: list[int] = np.frombuffer(self._map, np.int64, count + 1, at).tolist()
        at += 8 * (count + 1)
        self.due_s: list[float] = np.frombuffer(self._map, np.float64, moments, at).tolist()
        self._begin = at + 8 * moments
        self.count = count

    def __getitem__(self, index: int) -> bytes:
        return self._map[self._begin + self._offsets[index] : self._begin + self._offsets[index + 1]]


def write_tickets(count: int) -> int:
    """Write tickets to a regular file. Its offset is locked by the kernel during a read, unlike that of a
    `memfd`."""
    with tempfile.TemporaryFile() as file:
        file.write(np.arange(count, dtype="<i4").tobytes())
        file.seek(0)
        return os.dup(file.fileno())


def draw(fd: int) -> int | None:
    """Draw the next ticket; None if all are drawn."""
    ticket = os.read(fd, _TICKET_BYTES)
    return int.from_bytes(ticket, "little") if ticket else None


def _memory_file() -> int:
    """A file descriptor of a memfd, or of a nameless temporary file on systems without memfd."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-bench", 0)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
