"""The engine replicas that this process can reach. The router writes the table, the engine handle reads it.

A module of its own: Ray copies the module of a router by value, and both must see the same table.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Replicas:
    """The replicas of one deployment, as its router sees them. Written on the router's thread."""

    wanted: str = ""  # the fingerprint of the model that this process sends requests for; "": any
    running: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each has told about itself
    routed: set[str] = field(default_factory=set)  # requests that a replica has accepted

    def serves(self, metadata: dict[str, Any]) -> bool:
        """Whether a replica has the model that requests are made for."""
        return not self.wanted or metadata.get("fingerprint", self.wanted) == self.wanted

    @property
    def serving(self) -> list[dict[str, Any]]:
        return [each for each in self.running.values() if self.serves(each)]


_tables: dict[tuple[str, str], Replicas] = {}
_lock = threading.Lock()


def replicas_of(app: str, deployment: str) -> Replicas:
    with _lock:
        return _tables.setdefault((app, deployment), Replicas())
