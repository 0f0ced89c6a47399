"""API processes as the engine sees them: who they are, on which connection, and whether they have exited."""

from __future__ import annotations

import os
import select
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class WatchedProcess:
    """A process whose exit is noticed however it ends, also where its process id is used again."""

    pid: int
    pidfd: int | None  # readable once the process has exited; None where the system has no pidfd

    @classmethod
    def open(cls, pid: int) -> WatchedProcess | None:
        """None if the process has already exited."""
        try:
            return cls(pid, os.pidfd_open(pid))
        except ProcessLookupError:
            return None
        except (OSError, AttributeError):
            return cls(pid, None)

    @property
    def has_exited(self) -> bool:
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    name: str
    process: WatchedProcess


class Clients:
    """The connections of API processes that are alive, one for each name."""

    def __init__(self) -> None:
        self._by_connection: dict[bytes, _Client] = {}
        self._by_pidfd: dict[int, bytes] = {}
        self._without_pidfd: set[bytes] = set()

    def __contains__(self, connection: bytes) -> bool:
        return connection in self._by_connection

    def __len__(self) -> int:
        return len(self._by_connection)

    def add(self, connection: bytes, name: str, pid: int) -> int | None:
        """Take on a connection, unless its process has exited. Returns a descriptor to poll, if there is one;
        it becomes readable when the process exits."""
        process = WatchedProcess.open(pid)
        if process is None:
            return None
        self._by_connection[connection] = _Client(name, process)
        if process.pidfd is None:
            self._without_pidfd.add(connection)
        else:
            self._by_pidfd[process.pidfd] = connection
        return process.pidfd

    def connections_of(self, name: str) -> list[bytes]:
        return [connection for connection, client in self._by_connection.items() if client.name == name]

    def exited(self, readable: Collection[object]) -> list[bytes]:
        """The connections of processes that have exited, given the descriptors that are readable."""
        gone = [self._by_pidfd[pidfd] for pidfd in self._by_pidfd.keys() & readable]
        for connection in self._without_pidfd:
            if self._by_connection[connection].process.has_exited:
                gone.append(connection)
        return gone

    def pidfd(self, connection: bytes) -> int | None:
        return self._by_connection[connection].process.pidfd

    def remove(self, connection: bytes) -> None:
        client = self._by_connection.pop(connection)
        self._without_pidfd.discard(connection)
        if client.process.pidfd is not None:
            del self._by_pidfd[client.process.pidfd]
        client.process.close()

    def close(self) -> None:
        for connection in list(self._by_connection):
            self.remove(connection)
