"""Weighted fair queueing: each client gets a share of the device in proportion to its weight.

Every client has a virtual time: the tokens that have run for it, divided by its weight. The client with the
lowest virtual time runs next. The queue's own virtual time advances by the tokens of all clients, divided by
the total weight of waiting clients. A client that begins to wait starts at that time, so it has neither debt
nor credit from before.

A client's own requests are ordered by rank. With one client, the queue is a plain sorted list.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from penstock.types import Request

Rank = tuple[float, ...]  # arrival plus head start, then order of arrival
_Position = tuple[float, bool, int]  # virtual time with head start; whether the client has run; serial number
_MIN_REMEMBERED = 64  # clients to remember although they have nothing waiting
STEPS_IN_HEAD_START = 20  # head start of one priority level, in steps, until the step rate is measured
MAX_LEVELS = 10  # largest priority level that counts against other clients


class _Waiting(Protocol):
    request: Request


T = TypeVar("T", bound=_Waiting)


class ClientQueue(Generic[T]):
    """The waiting requests of one client."""

    __slots__ = ("entries", "name", "num_tokens", "num_visited", "position", "virtual_time", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.virtual_time = 0.0
        self.entries: list[tuple[Rank, T, int]] = []  # rank, request, tokens; sorted by rank
        self.num_tokens = 0  # waiting tokens; updated by the owner of the requests
        self.num_visited = 0  # entries that the last walk visited
        self.position: _Position = (0.0, False, 0)  # in the order of clients


class FairQueue(Generic[T]):
    """Waiting requests by client. `walk` yields them in the order in which they should run. `charge` counts
    the tokens that run. `settle` removes finished requests and reorders the clients."""

    def __init__(self) -> None:
        self.weight = 0.0  # total weight of waiting clients
        self.virtual_time = 0.0
        self.head_start_tokens = 0.0  # head start of one priority level over other clients
        self._clients: dict[str, ClientQueue[T]] = {}  # waiting clients, and some that have waited before
        self._order: list[tuple[_Position, ClientQueue[T]]] = []  # waiting clients, sorted
        self._visited: list[ClientQueue[T]] = []  # clients visited by the last walk over several clients
        self._max_remembered = _MIN_REMEMBERED
        self._numbers = itertools.count()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def num_clients(self) -> int:
        """Number of waiting clients."""
        return len(self._order)

    def first(self) -> T:
        return self._order[0][1].entries[0][1]

    def num_tokens_of(self, client: str) -> int:
        """Waiting tokens of a client."""
        return found.num_tokens if (found := self._clients.get(client)) is not None else 0

    def add(self, rank: Rank, item: T, num_tokens: int) -> ClientQueue[T]:
        """Queue a request of a client, sorted by rank among the client's requests."""
        request = item.request
        client = self._clients.get(request.client)
        if client is None:
            client = self._new_client(request.client)
        entries, entry = client.entries, (rank, item, num_tokens)
        self._len += 1
        if not entries:
            entries.append(entry)
            client.weight = request.weight
            self.weight += request.weight
            if client.virtual_time < self.virtual_time:
                client.virtual_time = self.virtual_time
            self._insert(client, has_run=False)
        elif rank > entries[-1][0]:
            entries.append(entry)
        else:
            index = bisect.bisect(entries, (rank,))  # ranks are unique, so only they are compared
            entries.insert(index, entry)
            if index == 0 and request.priority != entries[1][1].request.priority:
                self._delete(client)
                self._insert(client, has_run=client.position[1])
        return client

    def remove(self, client: ClientQueue[T], rank: Rank) -> None:
        """Remove a waiting request of a client."""
        entries = client.entries
        del entries[bisect.bisect_left(entries, (rank,))]
        self._len -= 1
        self._delete(client)
        if entries:
            self._insert(client, has_run=True)
        else:
            self.weight = self.weight - client.weight if self._order else 0.0

    def charge(self, client: ClientQueue[T], num_tokens: float) -> None:
        """Count tokens that run for a client. Its position changes only with `settle` or `remove`."""
        client.virtual_time += num_tokens / client.weight
        if self.weight:
            self.virtual_time += num_tokens / self.weight

    def walk(self) -> Iterator[T]:
        """The requests in the order in which they should run. The queue must not change until `settle`."""
        if len(self._order) == 1:
            return (entry[1] for entry in self._order[0][1].entries)
        visited: list[ClientQueue[T]] = []
        self._visited = visited
        return self._walk_clients(visited)

    def _walk_clients(self, visited: list[ClientQueue[T]]) -> Iterator[T]:
        order = self._order
        later: list[tuple[float, int, int, ClientQueue[T]]] = []  # heap: next requests of visited clients
        at, num_clients = 0, len(order)
        while at < num_clients or later:
            if at == num_clients or (later and later[0][0] < order[at][0][0]):
                when, _, index, client = heapq.heappop(later)
            else:
                (when, _, _), client = order[at]
                at, index = at + 1, 0
                visited.append(client)
            _, item, num_tokens = client.entries[index]
            client.num_visited = index = index + 1
            if index < len(client.entries):
                when += num_tokens / client.weight
                heapq.heappush(later, (when, next(self._numbers), index, client))
            yield item

    def settle(self, num_visited: int, waits: Callable[[T], object]) -> list[T]:
        """Among the requests that the last walk visited, remove and return those that no longer wait."""
        order, clients = self._order, self._visited
        if len(order) == 1:
            clients = [order[0][1]]
            clients[0].num_visited = num_visited
        del order[: len(clients)]  # a walk visits clients in the order of this list
        finished: list[T] = []
        for client in clients:
            entries = client.entries
            if len(entries) == 1:
                if not waits(entries[0][1]):
                    finished.append(entries.pop()[1])
                    self.weight -= client.weight
                    continue
            else:
                stay: list[tuple[Rank, T, int]] = []
                for entry in entries[: client.num_visited]:
                    if waits(entry[1]):
                        stay.append(entry)
                    else:
                        finished.append(entry[1])
                entries[: client.num_visited] = stay
                if not entries:
                    self.weight -= client.weight
                    continue
            self._insert(client, has_run=True)
        self._len -= len(finished)
        if not order:
            self.weight = 0.0  # removes rounding errors
        return finished

    # The order of clients.

    def _insert(self, client: ClientQueue[T], *, has_run: bool) -> None:
        """Insert a client into the order. At equal virtual times, a client that has just begun to wait goes
        before one that has run."""
        when, priority = client.virtual_time, client.entries[0][1].request.priority
        if priority:
            levels = max(-MAX_LEVELS, min(priority, MAX_LEVELS))
            when += levels * self.head_start_tokens / max(self.weight, client.weight)
        client.position = position = (when, has_run, next(self._numbers))
        order = self._order
        if not order or position > order[-1][0]:
            order.append((position, client))
        else:
            bisect.insort(order, (position, client))  # positions are unique

    def _delete(self, client: ClientQueue[T]) -> None:
        del self._order[bisect.bisect_left(self._order, (client.position,))]

    def _new_client(self, name: str) -> ClientQueue[T]:
        if len(self._clients) > self._max_remembered:
            now = self.virtual_time
            kept = {c.name: c for c in self._clients.values() if c.entries or c.virtual_time > now}
            self._clients, self._max_remembered = kept, _MIN_REMEMBERED + 2 * len(kept)
        client: ClientQueue[T] = ClientQueue(name)
        self._clients[name] = client
        return client
