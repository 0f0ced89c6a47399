"""How much work waits for the device, and how long a request that arrives now would wait to start."""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.errors import QueueTooSlow

MAX_RETRY_AFTER_S = 60
ADMITTED_SHARE = 0.8  # of the longest wait: estimates err, and a request that expires has waited for nothing


MIN_SHARE = 0.125  # of a step, for a kind of requests beside the other
EXTRA_ROOM = 8  # one part in so many of a full queue is left for clients that hold less than their share


def small_share(small_weight: float, large_weight: float) -> float:
    """The share of a step that small requests have while both kinds wait: that of their clients."""
    total = small_weight + large_weight
    return max(MIN_SHARE, min(small_weight / total, 1 - MIN_SHARE)) if total else 0.5


def max_queued_of(limit: int, waiting: int, held: int, num_clients: int) -> int:
    """How much may wait when a client adds to what it holds of the queue. A client with less than its share
    has room in a queue that others have filled."""
    has_less = held < waiting and held * (num_clients + 1) < limit
    return limit + limit // EXTRA_ROOM if has_less else limit


class Backlog(NamedTuple):  # made in every turn of the engine's loop
    """Tokens that wait to run, and the rate at which they run.

    Small requests fit into one step, large ones run over several. While both wait, each kind has a share of
    every step by the weights of the clients that wait.
    """

    small_tokens: int
    large_tokens: int
    tokens_per_s: float  # 0: not known yet
    small_weight: float = 0.0  # of all clients that wait; both 0: each kind has half
    large_weight: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.small_tokens + self.large_tokens

    def wait_s(self, *, is_large: bool) -> float:
        """Seconds until a request that arrives now starts; 0 while the rate is not known."""
        if not self.tokens_per_s:
            return 0.0
        share = small_share(self.small_weight, self.large_weight)
        ahead = self.num_tokens if is_large else min(self.num_tokens, self.small_tokens / share)
        return ahead / self.tokens_per_s

    def client_wait_s(self, own_tokens: int, weight: float, *, is_large: bool) -> float:
        """Seconds until a request of a client starts, of which `own_tokens` wait, those of a first step of
        the request among them: other clients run as much in that time, by their weights."""
        if not self.tokens_per_s:
            return 0.0
        if not (self.small_weight or self.large_weight):  # it is not known who waits
            return self.wait_s(is_large=is_large)
        others, kind = (
            (self.large_weight, self.large_tokens) if is_large else (self.small_weight, self.small_tokens)
        )
        share = 1.0
        if kind < self.num_tokens:
            share = small_share(self.small_weight, self.large_weight)
            share = 1 - share if is_large else share
        ahead = own_tokens * (1 + others / weight) / share
        return min(self.wait_s(is_large=is_large), ahead / self.tokens_per_s)


def check_wait(wait_s: float, max_wait_s: float) -> None:
    """`QueueTooSlow` if a request would wait about as long as it may, or longer; 0 sets no limit."""
    if max_wait_s and wait_s > ADMITTED_SHARE * max_wait_s:
        error = QueueTooSlow(
            f"the request would wait about {wait_s:.1f} s to start, and {max_wait_s:g} s is the limit; "
            "try again later"
        )
        error.retry_after_s = retry_after_s(wait_s, max_wait_s)
        raise error


def retry_after_s(wait_s: float, max_wait_s: float) -> int:
    """Whole seconds until requests will be admitted again, if none is before."""
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s - ADMITTED_SHARE * max_wait_s)))
