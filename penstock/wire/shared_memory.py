"""Memory that the engine's process shares with API processes: large answers lie there instead of travelling.

The engine owns it and hands out blocks; API processes map it and only read. A block is free again when the
engine's own array is gone and every process that was told of it has given it back, or has ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import secrets
import select
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.free_ranges import FreeRanges
from penstock.types import Array

log = logging.getLogger("penstock.engine")
MIN_SHARED_BYTES = 1 << 18  # bytes of an array from which on it is worth a message that gives it back
_PAGE = mmap.PAGESIZE

Region = tuple[int, int]  # of an array in shared memory: where it begins, and its bytes


class SharedMemoryInfo(msgspec.Struct, frozen=True, array_like=True):
    """Where a process finds the engine's memory."""

    name: str  # of this memory and no other
    path: str
    size: int


@dataclass(slots=True, eq=False)
class Reader:
    """An API process that has mapped the memory."""

    name: str
    pid: int
    life: int | None  # a descriptor that can be read once the process has ended, where the system has such
    holds: Counter[int] = field(default_factory=Counter)  # block → how often it was told of it

    @classmethod
    def of(cls, name: str, pid: int) -> Reader | None:
        """None: it has ended already."""
        try:
            return cls(name, pid, os.pidfd_open(pid))
        except ProcessLookupError:
            return None
        except (OSError, AttributeError):
            return cls(name, pid, None)

    @property
    def ended(self) -> bool:
        if self.life is not None:
            watch = select.poll()
            watch.register(self.life, select.POLLIN)
            return bool(watch.poll(0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def close(self) -> None:
        if self.life is not None:
            os.close(self.life)


@dataclass(slots=True)
class _Block:
    size: int
    users: int = 1  # the engine's own array, and those who were told


class SharedMemory:
    """The engine's side. All but the end of an array happens on the engine's thread."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // _PAGE) * _PAGE
        name = f"penstock-{secrets.token_hex(8)}"
        # In no folder: nothing is left behind however the process ends, and /dev/shm may be small.
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, self.size)
            self._memory = memoryview(mmap.mmap(self._file, self.size))
        except OSError:
            os.close(self._file)
            raise
        _seal(self._file)
        self._address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self.shared = SharedMemoryInfo(name, f"/proc/{os.getpid()}/fd/{self._file}", self.size)
        self._free = FreeRanges(self.size)
        self._blocks: dict[int, _Block] = {}
        self._readers: dict[bytes, Reader] = {}  # by the address of their connection
        self._dropped: deque[int] = deque()  # blocks whose array has ended, on whatever thread

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """As `np.empty`: in shared memory if it is large, somebody could read it and there is room."""
        size = math.prod(shape) * dtype.itemsize
        if size < MIN_SHARED_BYTES or not self._readers or (start := self._take(size)) is None:
            return np.empty(shape, dtype=dtype)
        owner = np.frombuffer(self._memory[start : start + size], dtype=np.uint8)  # all views keep it alive
        weakref.finalize(owner, self._dropped.append, start).atexit = False
        return owner.view(dtype).reshape(shape)

    def lend(self, array: Array, connection: bytes) -> Region | None:
        """Where a process will find the array, which is now its until it gives it back; None: it cannot."""
        reader = self._readers.get(connection)
        start = array.ctypes.data - self._address
        block = self._blocks.get(start)
        if reader is None or block is None or array.nbytes > block.size or not array.flags.c_contiguous:
            return None
        block.users += 1
        reader.holds[start] += 1
        return start, array.nbytes

    def attach(self, connection: bytes, name: str, pid: int) -> None:
        """A process has mapped the memory. One that comes again, by another connection, keeps what it has."""
        self._bury()
        known = [key for key, reader in self._readers.items() if reader.name == name]
        reader = self._readers.pop(known[0]) if known else Reader.of(name, pid)
        if reader is not None:
            self._readers[connection] = reader

    def give_back(self, connection: bytes, starts: list[int]) -> None:
        if (reader := self._readers.get(connection)) is None:
            return
        for start in starts:
            if start in reader.holds:
                reader.holds[start] -= 1
                if not reader.holds[start]:
                    del reader.holds[start]
                self._leave(start)

    @property
    def used(self) -> int:
        """Bytes that somebody holds."""
        self._tidy()
        return sum(block.size for block in self._blocks.values())

    def close(self) -> None:
        """Nobody can map it any more; arrays that are still held stay valid."""
        os.close(self._file)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _take(self, size: int) -> int | None:
        self._tidy()
        size = -(-size // _PAGE) * _PAGE
        if (start := self._free.take(size)) is None:
            self._bury()
            start = self._free.take(size)
        if start is not None:
            self._blocks[start] = _Block(size)
        return start

    def _tidy(self) -> None:
        while self._dropped:
            self._leave(self._dropped.popleft())

    def _bury(self) -> None:
        """What processes held that have ended is free."""
        for connection, reader in list(self._readers.items()):
            if reader.ended:
                del self._readers[connection]
                reader.close()
                for start in reader.holds.elements():
                    self._leave(start)

    def _leave(self, start: int) -> None:
        block = self._blocks[start]
        block.users -= 1
        if not block.users:
            del self._blocks[start]
            self._free.give(start, block.size)


def _seal(file: int) -> None:
    """A file that cannot shrink cannot end those who have mapped it."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def open_shared_memory(size: int) -> SharedMemory | None:
    """None, and a line that says so, where the system has no such memory."""
    if size <= 0:
        return None
    try:
        return SharedMemory(size)
    except (OSError, AttributeError) as error:
        log.warning("no memory is shared with API processes, answers are sent: %s", error)
        return None


class MappedMemory:
    """The API process's side: the engine's memory, to be read."""

    def __init__(self, shared: SharedMemoryInfo, give_back: Callable[[str, int], None]) -> None:
        """`give_back` is called with the memory's name and the block, on any thread."""
        self.name = shared.name
        self._give_back = give_back
        file = os.open(shared.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = memoryview(mmap.mmap(file, shared.size, prot=mmap.PROT_READ))
        finally:
            os.close(file)

    def block(self, place: Region) -> NDArray[np.uint8]:
        """The bytes there. They are given back when no array is left that views them."""
        start, size = place
        block: NDArray[np.uint8] = np.frombuffer(self._memory[start : start + size], dtype=np.uint8)
        weakref.finalize(block, self._give_back, self.name, start).atexit = False
        return block
