"""Memory that an engine process shares with API processes, so that large outputs need not be sent.

The engine owns the memory and allocates blocks; API processes map it read-only. A block becomes free when the
engine's own array is gone and every process that was given the block has released it or has exited.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.free_ranges import FreeRanges
from penstock.types import Array
from penstock.wire.processes import WatchedProcess

log = logging.getLogger("penstock.engine")
MIN_SHARED_BYTES = 1 << 18  # releasing the block of a smaller array by message costs more than a copy
_PAGE = mmap.PAGESIZE


class Region(NamedTuple):
    """The bytes of an array in shared memory."""

    start: int  # also names the block
    size: int


class SharedMemoryInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a process needs to map the engine's memory."""

    name: str  # unique to this memory
    path: str
    size: int


@dataclass(slots=True, eq=False)
class Reader:
    """An API process that has mapped the memory."""

    name: str
    process: WatchedProcess
    references: Counter[int] = field(default_factory=Counter)  # block → times that the process was given it

    @classmethod
    def open(cls, name: str, pid: int) -> Reader | None:
        """None if the process has already exited."""
        process = WatchedProcess.open(pid)
        return None if process is None else cls(name, process)


@dataclass(slots=True)
class _Block:
    size: int
    num_references: int = 1  # the engine's own array, plus one for each time a process was given the block


class SharedMemory:
    """The engine's side. Used only on the engine's thread, but arrays may be deleted on any thread."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _PAGE) * _PAGE
        name = f"penstock-{secrets.token_hex(8)}"
        # A memfd leaves no file behind however the process ends, and does not need /dev/shm, which may be
        # small.
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, self.size)
            self._memory = memoryview(mmap.mmap(self._file, self.size))
        except OSError:
            os.close(self._file)
            raise
        _seal(self._file)
        self._address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self.info = SharedMemoryInfo(name, f"/proc/{os.getpid()}/fd/{self._file}", self.size)
        self._free = FreeRanges(self.size)
        self._blocks: dict[int, _Block] = {}
        self._readers: dict[bytes, Reader] = {}  # by connection
        self._dropped: deque[int] = deque()  # blocks whose array was deleted, appended on any thread

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Like `np.empty`, but in shared memory if the array is large, has a reader and fits."""
        size = math.prod(shape) * dtype.itemsize
        if size < MIN_SHARED_BYTES or not self._readers or (start := self._allocate(size)) is None:
            return np.empty(shape, dtype=dtype)
        owner = np.frombuffer(self._memory[start : start + size], dtype=np.uint8)  # all views keep it alive
        weakref.finalize(owner, self._dropped.append, start).atexit = False
        return owner.view(dtype).reshape(shape)

    def share(self, array: Array, connection: bytes) -> Region | None:
        """Share an array with a process until it releases the block. None if the array is not in this memory
        or the process has not mapped it."""
        reader = self._readers.get(connection)
        start = array.ctypes.data - self._address
        block = self._blocks.get(start)
        if reader is None or block is None or array.nbytes > block.size or not array.flags.c_contiguous:
            return None
        block.num_references += 1
        reader.references[start] += 1
        return Region(start, array.nbytes)

    def add_reader(self, connection: bytes, name: str, pid: int) -> None:
        """Add a process that has mapped the memory. A process that reconnects keeps its blocks."""
        self._remove_exited_readers()
        known = [key for key, reader in self._readers.items() if reader.name == name]
        reader = self._readers.pop(known[0]) if known else Reader.open(name, pid)
        if reader is not None:
            self._readers[connection] = reader

    def release(self, connection: bytes, blocks: list[int]) -> None:
        """Release blocks that a process no longer reads. Blocks that it was not given are ignored."""
        if (reader := self._readers.get(connection)) is None:
            return
        for start in blocks:
            if start in reader.references:
                reader.references[start] -= 1
                if not reader.references[start]:
                    del reader.references[start]
                self._unreference(start)

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated blocks."""
        self._unreference_dropped()
        return sum(block.size for block in self._blocks.values())

    def close(self) -> None:
        """Close the memory, so that no further process can map it. Existing arrays stay valid."""
        os.close(self._file)
        for reader in self._readers.values():
            reader.process.close()
        self._readers.clear()

    def _allocate(self, size: int) -> int | None:
        self._unreference_dropped()
        size = -(-size // _PAGE) * _PAGE
        if (start := self._free.take(size)) is None:
            self._remove_exited_readers()
            start = self._free.take(size)
        if start is not None:
            self._blocks[start] = _Block(size)
        return start

    def _unreference_dropped(self) -> None:
        while self._dropped:
            self._unreference(self._dropped.popleft())

    def _remove_exited_readers(self) -> None:
        for connection, reader in list(self._readers.items()):
            if reader.process.has_exited:
                del self._readers[connection]
                reader.process.close()
                for start in reader.references.elements():
                    self._unreference(start)

    def _unreference(self, start: int) -> None:
        block = self._blocks[start]
        block.num_references -= 1
        if not block.num_references:
            del self._blocks[start]
            self._free.give(start, block.size)


def _seal(file: int) -> None:
    """Forbid resizing the file: a smaller file would crash processes that have mapped it."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def open_shared_memory(size: int) -> SharedMemory | None:
    """Allocate shared memory. None if `size` is 0 or, with a warning, the system does not support it."""
    if size <= 0:
        return None
    try:
        return SharedMemory(size)
    except (OSError, AttributeError) as error:
        log.warning("no memory is shared with API processes, large outputs are sent instead: %s", error)
        return None


class MappedMemory:
    """The API process's side: the engine's memory, read-only."""

    def __init__(self, info: SharedMemoryInfo, release: Callable[[str, int], None]) -> None:
        """`release` is called, on any thread, with the memory's name and a block that is no longer read."""
        self.name = info.name
        self._release = release
        file = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = memoryview(mmap.mmap(file, info.size, prot=mmap.PROT_READ))
        finally:
            os.close(file)

    def read(self, region: Region) -> NDArray[np.uint8]:
        """The bytes of a region. The block is released when no array views its bytes any more."""
        view = self._memory[region.start : region.start + region.size]
        array: NDArray[np.uint8] = np.frombuffer(view, dtype=np.uint8)
        weakref.finalize(array, self._release, self.name, region.start).atexit = False
        return array
