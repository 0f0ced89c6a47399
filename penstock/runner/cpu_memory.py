"""Bounds on the memory of an engine that computes on a CPU.

The matrix library generates code for every shape of product and caches it. A step's number of tokens is part
of the shape, so under mixed load nearly every step adds entries. Objects that live long among a step's large
tensors also leave holes in the heap, whose pages are returned to the system here.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# An entry takes about 0.6 MB. A model has four or five shapes of product for each number of tokens, so single
# texts of up to about 100 tokens always find theirs. Creating one takes about 0.3 ms.
MAX_CACHED_PRIMITIVES = 512
# torch's own cache in front of it holds descriptors of 0.3 MB each and saves no measurable time.
MAX_CACHED_DESCRIPTORS = 16
TRIM_INTERVAL_S = 30.0
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

_LIMITS = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": MAX_CACHED_PRIMITIVES,
    "LRU_CACHE_CAPACITY": MAX_CACHED_DESCRIPTORS,
}


def limit_primitive_caches() -> None:
    """Bound both caches, unless the environment does.

    The libraries read these variables when the process computes its first product, so this has to come
    before. In a process that has computed before, the earlier values stay.
    """
    for name, capacity in _LIMITS.items():
        os.environ.setdefault(name, str(capacity))


def total_memory_bytes() -> int:
    """The memory of this machine, or of the container if it may use less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        total = min(total, int(_CONTAINER_LIMIT.read_text()))
    return total


class HeapTrimmer:
    """Returns the free pages of the heap to the system, at most once in `interval_s`."""

    def __init__(self, trim: Callable[[], None] | None = None, interval_s: float = TRIM_INTERVAL_S) -> None:
        self._trim = trim or _malloc_trim()
        self._interval_s = interval_s
        self._trimmed_s = time.perf_counter()

    def after_step(self, now_s: float) -> None:
        """`now_s`: the time by `time.perf_counter`."""
        if now_s - self._trimmed_s >= self._interval_s:
            self._trimmed_s = now_s
            self._trim()


def _malloc_trim() -> Callable[[], None]:
    """glibc's function; nothing where the C library has none."""
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda: None
    return lambda: function(0)
