"""The memory of an engine that computes on a CPU.

Long-lived objects, such as the matrix library's code for each shape, are allocated between a step's large
tensors. The freed tensors then leave holes in the heap, whose pages are returned to the system here.
`layers.cpu_shapes` limits the number of shapes.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Trimming takes 5 to 20 ms, and the next steps fault their pages in again.
MIN_TRIM_INTERVAL_S = 5.0
MAX_UNTRIMMED_BYTES = 128 << 20
_MEMORY_USE = Path("/proc/self/statm")  # in pages
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")
_CONTAINER_STATISTICS = Path("/sys/fs/cgroup/memory.stat")
_MACHINE_MEMORY = Path("/proc/meminfo")


def total_memory_bytes() -> int:
    """The memory of this machine, or the limit of the container if it is lower."""
    total = _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return total


def available_memory_bytes() -> int:
    """The memory that this machine or the container has left, including the file cache of the system."""
    available = _PAGE_BYTES * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, KeyError, ValueError):
        lines = (line.split() for line in _MACHINE_MEMORY.read_text().splitlines())
        available = {name: int(size) << 10 for name, size, *_ in lines}["MemAvailable:"]
    with suppress(OSError, KeyError, ValueError):
        limit, used = int(_CONTAINER_LIMIT.read_text()), int(_CONTAINER_USE.read_text())
        statistics = dict(line.split() for line in _CONTAINER_STATISTICS.read_text().splitlines())
        available = min(available, max(0, limit - used + int(statistics["file"])))
    return available


class HeapTrimmer:
    """Returns the free pages of the heap to the system once the process has grown by `MAX_UNTRIMMED_BYTES`
    since the last time.

    The heap's own figures do not show how much a trim would return, because they include pages that were
    returned before. So growth of the process is the measure, checked once per `MIN_TRIM_INTERVAL_S`.
    """

    def __init__(
        self, trim: Callable[[], None] | None = None, private_bytes: Callable[[], int] | None = None
    ) -> None:
        self._trim = trim or malloc_trim()
        self._private_bytes = private_bytes or process_bytes
        self._trimmed_bytes = 0  # the process's memory after the last trim
        self._checked_s = time.perf_counter()

    def after_step(self, now_s: float) -> None:
        """`now_s`: the time by `time.perf_counter`."""
        if now_s - self._checked_s < MIN_TRIM_INTERVAL_S:
            return
        self._checked_s = now_s
        if self._private_bytes() > self._trimmed_bytes + MAX_UNTRIMMED_BYTES:
            self._trim()
            self._trimmed_bytes = self._private_bytes()


def process_bytes() -> int:
    """Private memory of this process, without mapped files; 0 if the system does not report it."""
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = map(int, _MEMORY_USE.read_text().split())
        return (resident - shared) * _PAGE_BYTES
    return 0


def malloc_trim() -> Callable[[], None]:
    """glibc's `malloc_trim`, or a function that does nothing if the C library has none."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda: None
    return lambda: function(0)
