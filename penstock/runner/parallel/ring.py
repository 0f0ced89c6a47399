"""How rank 0 tells other ranks what to run: plans in shared memory, and a socket for each rank that wakes it.

A plan is written once, whatever the number of ranks. A notice of 16 bytes says where it is. Each rank copies
the plan, then writes to a page of counters how far it has read; rank 0 overwrites nothing that a rank has not
read. A rank waits in the kernel for its next notice, and learns from the closed socket that rank 0 is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

from penstock.runner.parallel.plans import Message
from penstock.types import Ints

RING_BYTES = 64 << 20  # of plans; only pages that were written take memory
_COUNTER_BYTES = mmap.PAGESIZE
_NOTICE = struct.Struct("<qq")  # where the plan begins in the ring, and how many integers it has
_INLINE, _STOP = -1, -2  # in place of the beginning: the plan follows on the socket; there are no more
_WAIT_S = 0.0005  # between looks at the counters while the ring is full, which is rare


def create_memory(size: int = RING_BYTES) -> int:
    """The file of a ring. It is in no folder, so nothing is left behind however the processes end."""
    file = os.memfd_create("penstock-plans", os.MFD_CLOEXEC)
    os.ftruncate(file, _COUNTER_BYTES + size)
    return file


class _Memory:
    def __init__(self, file: int) -> None:
        memory = mmap.mmap(file, 0)
        self.counters = np.frombuffer(memory, dtype=np.int64, count=_COUNTER_BYTES // 8)  # by rank
        self.numbers = np.frombuffer(memory, dtype=np.int32, offset=_COUNTER_BYTES)
        self.size = len(self.numbers)


class PlanWriter:
    """Rank 0's end."""

    def __init__(self, file: int, sockets: list[socket.socket], check: Callable[[], None]) -> None:
        """`sockets` are those of the ranks from 1 on. `check` raises if a rank is gone."""
        self._memory = _Memory(file)
        self._sockets = sockets
        self._check = check
        self._written = 0  # integers, ever; the ring's size divides the place of none

    def send(self, message: Message) -> None:
        """Tell every rank to run a plan."""
        size, ring = message.size, self._memory.size
        if size > ring // 2:
            self._send_inline(message)
            return
        begin = self._written
        if begin % ring + size > ring:
            begin += ring - begin % ring  # a plan does not wrap around
        self._wait_for_room(begin + size)
        message.write(self._memory.numbers[begin % ring : begin % ring + size])
        self._written = begin + size
        self._notify(_NOTICE.pack(begin, size))

    def stop(self) -> None:
        """Tell every rank to exit."""
        with contextlib.suppress(OSError):
            self._notify(_NOTICE.pack(_STOP, 0))

    def _send_inline(self, message: Message) -> None:
        numbers = np.empty(message.size, dtype=np.int32)
        message.write(numbers)
        self._notify(_NOTICE.pack(_INLINE, message.size) + numbers.tobytes())

    def _notify(self, notice: bytes) -> None:
        for each in self._sockets:
            each.sendall(notice)

    def _wait_for_room(self, end: int) -> None:
        read = self._memory.counters[1 : 1 + len(self._sockets)]
        while len(read) and end - int(read.min()) > self._memory.size:
            self._check()
            time.sleep(_WAIT_S)


class PlanReader:
    """The end of another rank."""

    def __init__(self, file: int, rank: int, connection: socket.socket) -> None:
        self._memory = _Memory(file)
        self._rank = rank
        self._connection = connection

    def next(self) -> Ints | None:
        """Wait for the next plan. None: there are no more, or rank 0 is gone."""
        if (notice := receive(self._connection, _NOTICE.size)) is None:
            return None
        begin, size = _NOTICE.unpack(notice)
        if begin == _STOP:
            return None
        if begin == _INLINE:
            sent = receive(self._connection, 4 * size)
            return None if sent is None else np.frombuffer(sent, dtype=np.int32).copy()
        at = begin % self._memory.size
        plan = self._memory.numbers[at : at + size].copy()
        self._memory.counters[self._rank] = begin + size
        return plan


def receive(connection: socket.socket, size: int) -> bytes | None:
    """Exactly so many bytes; None if the other end is closed."""
    parts = bytearray()
    while len(parts) < size:
        try:
            part = connection.recv(min(size - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
