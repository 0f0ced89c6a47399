"""Chooses the engine of a model that gets a request. Pure: no sockets, no clock.

A request goes to the engine with the fewest queued tokens. If an engine has already computed the request's
query or prefix, that engine is preferred, unless recomputing elsewhere would finish sooner.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

MAX_KNOWN_KEYS = 1 << 15
UNAVAILABLE = math.inf  # the load of an engine that gets no requests


class Affinity(NamedTuple):
    """Cache keys of a request that an engine may have computed for earlier requests."""

    keys: Sequence[bytes]  # keys of prefixes, shortest first, or one key of the queries
    tokens_per_key: int  # tokens saved per key on an engine that has them cached

    def saved_tokens(self, number: int) -> int:
        return (number + 1) * self.tokens_per_key


class Balancer:
    """Chooses engines, and remembers which one last computed each prefix or query."""

    def __init__(self, max_known_keys: int = MAX_KNOWN_KEYS) -> None:
        self._known: OrderedDict[bytes, int] = OrderedDict()  # key → engine, least recently used first
        self._max_known_keys = max_known_keys
        self._next = 0  # breaks ties, so that idle engines take turns

    def choose(
        self, loads: Sequence[float], affinity: Affinity | None = None, *, slack_tokens: int = 0
    ) -> int | None:
        """Index of the engine for a request; None if all are unavailable.

        `loads` are the queued tokens of each engine. An engine with cached keys of the request is chosen even
        if it has more tokens queued than the least loaded one. The difference may be up to the tokens that
        the cache saves, or `slack_tokens` if that is more.
        """
        least = self._least_loaded(loads)
        if least is None or affinity is None:
            return least
        chosen = self._prefer(loads, loads[least], affinity, slack_tokens)
        chosen = least if chosen is None else chosen
        self._remember(affinity.keys, chosen)
        return chosen

    def _least_loaded(self, loads: Sequence[float]) -> int | None:
        """The least loaded engine. Of several, the first one after the last choice."""
        size = len(loads)
        least, index = UNAVAILABLE, self._next
        found = None
        for _ in range(size):
            if loads[index := index % size] < least:
                least, found = loads[index], index
            index += 1
        if found is not None:
            self._next = (found + 1) % size
        return found

    def _prefer(
        self, loads: Sequence[float], least: float, affinity: Affinity, slack_tokens: int
    ) -> int | None:
        """The engine with the longest cached prefix, or the home of a new one; None if it is too busy."""
        for number in range(len(affinity.keys) - 1, -1, -1):
            engine = self._known.get(affinity.keys[number])
            if engine is not None and loads[engine] != UNAVAILABLE:
                slack = max(slack_tokens, affinity.saved_tokens(number))
                return engine if loads[engine] - least <= slack else None
        first = home(affinity.keys[0], loads)
        return first if loads[first] - least <= slack_tokens else None

    def _remember(self, keys: Sequence[bytes], engine: int) -> None:
        known = self._known
        for key in keys:
            known[key] = engine
            known.move_to_end(key)
        while len(known) > self._max_known_keys:
            known.popitem(last=False)


def home(key: bytes, loads: Sequence[float]) -> int:
    """The available engine that a key maps to, by rendezvous hashing.

    All processes agree on it. When an engine becomes unavailable, only its own keys move.
    """
    available = [index for index, load in enumerate(loads) if load != UNAVAILABLE]
    return max(available, key=lambda index: hashlib.blake2b(key, salt=index.to_bytes(2)).digest())


def divide(loads: Sequence[float], num_tokens: int, min_tokens: int) -> list[int]:
    """Divide the tokens of a large request so that all engines finish at about the same time.

    An engine that would get fewer than `min_tokens` gets none.
    """
    taking = sorted((index for index, load in enumerate(loads) if load != UNAVAILABLE), key=loads.__getitem__)
    shares = [0] * len(loads)
    while taking:
        level = (sum(loads[index] for index in taking) + num_tokens) / len(taking)
        if len(taking) == 1 or level - loads[taking[-1]] >= min_tokens:
            break
        taking.pop()
    for index in taking:
        shares[index] = int(level - loads[index])
    return shares
