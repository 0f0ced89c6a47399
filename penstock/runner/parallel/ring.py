"""Sends plans from rank 0 to the other ranks: plans in shared memory, and a socket for each rank to wake it.

A plan is written once, whatever the number of ranks. A notice of 16 bytes says where it is. Each rank copies
the plan, then records in a page of counters how far it has read. Rank 0 overwrites nothing that a rank has
not read. A rank blocks on its socket until the next notice. If the socket is closed, rank 0 is gone.
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
_NOTICE = struct.Struct("<qq")  # position of the plan, and its number of integers
_INLINE, _STOP = -1, -2  # instead of a position: the plan follows on the socket; no more plans
_WAIT_S = 0.0005  # between checks of the counters while the ring is full, which is rare


def create_memory(size: int = RING_BYTES) -> int:
    """The anonymous file of a ring. Nothing is left behind, however the processes end."""
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
    """The writing end, on rank 0."""

    def __init__(self, file: int, sockets: list[socket.socket], check: Callable[[], None]) -> None:
        """`sockets`: one for each rank from 1 on. `check` raises if a rank is gone."""
        self._memory = _Memory(file)
        self._sockets = sockets
        self._check = check
        # Position after the last plan. Positions count integers since the start; modulo the ring's size, they
        # are offsets in the ring.
        self._written = 0

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
    """The reading end, on another rank."""

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
    """Receive exactly `size` bytes; None if the other end is closed."""
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
