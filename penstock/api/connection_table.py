"""The open connections of an API process: limits on their number, timeouts, and shutdown.

One timer serves all connections. At each pass, every connection checks its timeouts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import select
from typing import TYPE_CHECKING

from penstock.api.hosts import HostCheck, is_loopback
from penstock.api.metrics import BUFFERED_BYTES, CONNECTION_LIMITS, CONNECTIONS
from penstock.api.state import BufferedBytes
from penstock.config import ServerConfig
from penstock.errors import EngineUnavailable, ServerFull

if TYPE_CHECKING:
    from penstock.api.connections import Connection

MAX_REFUSED = 128  # refused connections that stay open until their client has read the reason
POLL_INTERVAL_S = 0.05  # between checks of half-closed connections
DRAIN_GRACE_S = 0.5  # for requests in transit when the drain begins
LAST_ANSWERS_S = 1.0  # to send errors to requests that the end of the drain cuts short


class ConnectionTable:
    """Counts connections, enforces their timeouts, and ends them when the server stops."""

    def __init__(self, limits: ServerConfig, buffered: BufferedBytes, hosts: HostCheck | None = None) -> None:
        self.limits = limits
        self.buffered = buffered
        self.hosts = hosts
        self.is_draining = False
        self._connections: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._half_closed: set[Connection] = set()
        self._num_from: dict[str, int] = {}  # by address; loopback is not counted
        self._sweeping = False
        self._polling = False
        timeouts = (limits.header_timeout_s, limits.body_timeout_s, limits.write_timeout_s)
        self.sweep_interval_s = min(1.0, min(*timeouts, limits.idle_timeout_s) / 4)

    def add(self, connection: Connection) -> ServerFull | None:
        """Count a new connection. Returns an error with the reason if it must be refused."""
        self._begin_sweeping()
        num_open = len(self._connections)
        connection.address = address = _counted_address(connection.client)
        num_here = self._num_from.get(address, 0)
        if num_open >= self.limits.max_connections:
            return self._refuse(connection, "connections", f"{num_open} connections are open")
        if address and 0 < self.limits.max_connections_per_address <= num_here:
            why = f"{num_here} connections from {address} are open"
            return self._refuse(connection, "connections_per_address", why)
        self._connections.add(connection)
        if address:
            self._num_from[address] = num_here + 1
        return None

    def remove(self, connection: Connection) -> None:
        self._half_closed.discard(connection)
        self._refused.discard(connection)
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if address := connection.address:
            self._num_from[address] -= 1
            if not self._num_from[address]:
                del self._num_from[address]

    def may_explain(self) -> bool:
        """Whether one more refused connection may be kept until its client has read the reason."""
        return len(self._refused) <= MAX_REFUSED

    def count(self, limit: str) -> None:
        CONNECTION_LIMITS.labels(limit).inc()

    def watch_half_closed(self, connection: Connection) -> None:
        """Watch whether a client that has stopped sending still reads."""
        self._half_closed.add(connection)
        if not self._polling:
            self._polling = True
            asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._poll)

    def begin_drain(self) -> None:
        """Give running requests time to finish, then end them with 503, then disconnect remaining clients."""
        if self.is_draining:
            return
        self.is_draining = True
        loop, drain_s = asyncio.get_running_loop(), self.limits.drain_s
        loop.call_later(min(DRAIN_GRACE_S, drain_s), self._close_idle)
        loop.call_later(drain_s, self._end_requests)
        loop.call_later(drain_s + LAST_ANSWERS_S, self._abort_all)

    def _refuse(self, connection: Connection, limit: str, why: str) -> ServerFull:
        self.count(limit)
        self._refused.add(connection)
        return ServerFull(f"{why}, which is the limit (--max-{limit.replace('_', '-')}); try again shortly")

    def _begin_sweeping(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            asyncio.get_running_loop().call_later(self.sweep_interval_s, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in (*self._connections, *self._refused):
            connection.check_time(now_s)
        CONNECTIONS.set(len(self._connections))
        BUFFERED_BYTES.set(self.buffered.held)
        self._sweeping = bool(self._connections or self._refused)
        if self._sweeping:
            loop.call_later(self.sweep_interval_s, self._sweep)

    def _poll(self) -> None:
        """Disconnect clients that have closed both directions: their machine has rejected what was sent."""
        poll = select.poll()
        by_number: dict[int, Connection] = {}
        for connection in self._half_closed:
            if (number := connection.file_number()) >= 0:
                by_number[number] = connection
                poll.register(number, 0)  # errors and hang-ups are always reported
        for number, _ in poll.poll(0):
            by_number[number].transport.abort()
            self._half_closed.discard(by_number[number])
        self._polling = bool(self._half_closed)
        if self._polling:
            asyncio.get_running_loop().call_later(POLL_INTERVAL_S, self._poll)

    def _close_idle(self) -> None:
        for connection in list(self._connections):
            if connection.is_idle:
                connection.transport.close()

    def _end_requests(self) -> None:
        for connection in list(self._connections):
            connection.end_requests(EngineUnavailable("the server is shutting down"))

    def _abort_all(self) -> None:
        for connection in (*self._connections, *self._refused):
            connection.transport.abort()


def _counted_address(client: tuple[str, int] | None) -> str:
    """The address under which a connection is counted: for IPv6 the /64 network; empty for loopback."""
    if client is None or is_loopback(client[0]):
        return ""
    if ":" not in client[0]:
        return client[0]
    address = ipaddress.IPv6Address(client[0].partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
