"""How much work waits for the device, and how long a request that arrives now would wait to start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import QueueTooSlow

MAX_RETRY_AFTER_S = 60
ADMITTED_SHARE = 0.8  # of the longest wait: estimates err, and a request that expires has waited for nothing


@dataclass(frozen=True, slots=True)
class Backlog:
    """Tokens that wait to run, and the rate at which they run.

    Small requests fit into one step, large ones run over several. While both wait, each kind has half of
    every step.
    """

    small_tokens: int
    large_tokens: int
    tokens_per_s: float  # 0: not known yet

    @property
    def num_tokens(self) -> int:
        return self.small_tokens + self.large_tokens

    def wait_s(self, *, is_large: bool) -> float:
        """Seconds until a request that arrives now starts; 0 while the rate is not known."""
        if not self.tokens_per_s:
            return 0.0
        ahead = self.num_tokens if is_large else min(self.num_tokens, 2 * self.small_tokens)
        return ahead / self.tokens_per_s


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
