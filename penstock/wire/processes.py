"""The API processes connected to an engine: their names, connections, and whether they have exited."""

from __future__ import annotations

import os
import select
import selectors
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class WatchedProcess:
    """A process whose exit is detected however it ends. With a pidfd, this holds even if its process id is
    reused."""

    pid: int
    pidfd: int | None  # readable once the process has exited; None if the system has no pidfd

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
    """The connections of live API processes, one for each name."""

    def __init__(self) -> None:
        self._by_connection: dict[bytes, _Client] = {}
        self._without_pidfd: set[bytes] = set()
        self._exits = selectors.DefaultSelector()  # one descriptor to poll for all processes
        self._fileno: int = self._exits.fileno()  # descriptor of epoll or kqueue

    def __contains__(self, connection: bytes) -> bool:
        return connection in self._by_connection

    def __len__(self) -> int:
        return len(self._by_connection)

    def fileno(self) -> int:
        """A descriptor that is readable while `exited` would return a connection."""
        return self._fileno

    @property
    def must_ask(self) -> bool:
        """Whether only a call of `exited` detects the exit of some process, because it has no pidfd."""
        return bool(self._without_pidfd)

    def add(self, connection: bytes, name: str, pid: int) -> None:
        """Add a connection, unless its process has exited."""
        process = WatchedProcess.open(pid)
        if process is None:
            return
        self._by_connection[connection] = _Client(name, process)
        if process.pidfd is None:
            self._without_pidfd.add(connection)
        else:
            self._exits.register(process.pidfd, selectors.EVENT_READ, connection)

    def connections_of(self, name: str) -> list[bytes]:
        return [connection for connection, client in self._by_connection.items() if client.name == name]

    def exited(self) -> list[bytes]:
        """The connections of processes that have exited; the caller removes them."""
        gone = [key.data for key, _ in self._exits.select(0)]
        for connection in self._without_pidfd:
            if self._by_connection[connection].process.has_exited:
                gone.append(connection)
        return gone

    def remove(self, connection: bytes) -> None:
        client = self._by_connection.pop(connection)
        self._without_pidfd.discard(connection)
        if client.process.pidfd is not None:
            self._exits.unregister(client.process.pidfd)
        client.process.close()

    def close(self) -> None:
        for connection in list(self._by_connection):
            self.remove(connection)
        self._exits.close()
