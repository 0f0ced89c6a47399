"""The engine replicas that this process can reach. The router writes the table, the engine handle reads it.

It is a separate module because Ray copies the router's module by value, and both must see the same table.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.balance import UNAVAILABLE, Affinity, Balancer


@dataclass(slots=True)
class Replicas:
    """The replicas of one deployment, as seen by its router. Written on the router's thread."""

    wanted: str = ""  # fingerprint of this process's model; "": any
    running: dict[str, dict[str, Any]] = field(default_factory=dict)  # metadata of each replica
    routed: set[str] = field(default_factory=set)  # requests that a replica has accepted
    affinities: dict[str, Affinity] = field(default_factory=dict)  # affinities of requests in flight, by name
    slack_tokens: int = 0  # extra load accepted at a replica that has cached a request's prefix or query
    _balancer: Balancer = field(default_factory=Balancer)
    _places: list[str] = field(default_factory=list)  # replica names by the balancer's numbers

    def update(self, running: dict[str, dict[str, Any]]) -> None:
        """Replace the replicas. Remaining ones keep their numbers; new ones take numbers that became free."""
        new = [name for name in running if name not in self._places]
        self._places = [place if place in running or not new else new.pop(0) for place in self._places] + new
        self.running = running

    def order(self, tokens: Mapping[str, int], request: str = "") -> list[str]:
        """Order the replicas that serve the model, best first. `tokens` are in flight at each."""
        usable = {name for name, metadata in self.running.items() if self.serves(metadata)}
        loads = [tokens.get(name, 0) if name in usable else UNAVAILABLE for name in self._places]
        if not usable:
            return []
        best = self._balancer.choose(loads, self.affinities.get(request), slack_tokens=self.slack_tokens)
        first = [] if best is None else [self._places[best]]
        return first + sorted(usable.difference(first), key=lambda name: tokens.get(name, 0))

    def serves(self, metadata: dict[str, Any]) -> bool:
        """Whether a replica has the model of this process."""
        return not self.wanted or metadata.get("fingerprint", self.wanted) == self.wanted

    @property
    def serving(self) -> list[dict[str, Any]]:
        return [each for each in self.running.values() if self.serves(each)]


_tables: dict[tuple[str, str], Replicas] = {}
_lock = threading.Lock()


def replicas_of(app: str, deployment: str) -> Replicas:
    with _lock:
        return _tables.setdefault((app, deployment), Replicas())
