"""Estimates of the work that waits for the device, and of how long a new request would wait to start."""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.errors import QueueTooSlow

MAX_RETRY_AFTER_S = 60
# Admit a request if its estimated wait is at most this share of the limit. Estimates err, and a request that
# expires in the queue has waited for nothing.
ADMITTED_SHARE = 0.8


MIN_SHARE = 0.125  # minimum share of a step for small or for large requests while both wait
EXTRA_ROOM = 8  # a full queue still takes 1/8 more from clients that hold less than their share


def small_share(small_weight: float, large_weight: float) -> float:
    """Share of a step for small requests while both kinds wait, by the weights of the waiting clients."""
    total = small_weight + large_weight
    return max(MIN_SHARE, min(small_weight / total, 1 - MIN_SHARE)) if total else 0.5


def max_queued_of(limit: int, waiting: int, held: int, num_clients: int) -> int:
    """Queue limit for a client that already holds `held` of `waiting`. A client with less than its share may
    exceed `limit`, so that others cannot lock it out."""
    has_less = held < waiting and held * (num_clients + 1) < limit
    return limit + limit // EXTRA_ROOM if has_less else limit


class Backlog(NamedTuple):  # created in every iteration of the engine's loop
    """Waiting tokens, and the rate at which they run.

    Small requests fit into one step, large ones run over several. While both wait, every step is shared
    between the two kinds by the weights of the waiting clients.
    """

    small_tokens: int
    large_tokens: int
    tokens_per_s: float  # 0: not measured yet
    small_weight: float = 0.0  # total weight of the clients with waiting small requests
    large_weight: float = 0.0  # if both weights are 0, each kind gets half of a step

    @property
    def num_tokens(self) -> int:
        return self.small_tokens + self.large_tokens

    def wait_s(self, *, is_large: bool) -> float:
        """Seconds until a request that arrives now starts; 0 until a rate has been measured."""
        if not self.tokens_per_s:
            return 0.0
        share = small_share(self.small_weight, self.large_weight)
        ahead = self.num_tokens if is_large else min(self.num_tokens, self.small_tokens / share)
        return ahead / self.tokens_per_s

    def client_wait_s(self, own_tokens: int, weight: float, *, is_large: bool) -> float:
        """Seconds until a new request of a client starts, given the client's weight.

        `own_tokens` are the client's waiting tokens, including those of the request's first step. Until they
        have run, other clients run tokens in proportion to their weights.
        """
        if not self.tokens_per_s:
            return 0.0
        if not (self.small_weight or self.large_weight):  # the waiting clients are unknown
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
    """Raise `QueueTooSlow` if a request would wait longer than `ADMITTED_SHARE` of the limit; 0: no limit."""
    if max_wait_s and wait_s > ADMITTED_SHARE * max_wait_s:
        error = QueueTooSlow(
            f"the request would wait about {wait_s:.1f} s to start, and {max_wait_s:g} s is the limit; "
            "try again later"
        )
        error.retry_after_s = retry_after_s(wait_s, max_wait_s)
        raise error


def retry_after_s(wait_s: float, max_wait_s: float) -> int:
    """Whole seconds until requests are admitted again, if no others arrive in the meantime."""
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s - ADMITTED_SHARE * max_wait_s)))
