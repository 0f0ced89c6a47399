"""How fast tokens leave a queue while there is a backlog."""

from __future__ import annotations

import math

_WINDOW_S = 5.0  # measurements fade with this time constant
# A pause before a step counts up to this long. In a longer pause, the waiting work has left in another way.
_MAX_PAUSE_S = 1.0


class Throughput:
    """A moving average of tokens per second over the time in which work waited.

    Idle time does not count, and neither do small steps that left nothing waiting: they show how long a step
    takes, not how much the device can do.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._last_s = 0.0
        self.had_backlog = False  # work waited behind the last tokens that were recorded

    @property
    def tokens_per_s(self) -> float:
        """0 until work has waited for the first time."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def record(self, tokens: int, *, began_s: float, now_s: float, has_backlog: bool) -> None:
        """Count tokens that left the queue since `began_s`, or since the last call if work waited then.
        `has_backlog`: whether more work waited behind these tokens."""
        had_backlog, self.had_backlog = self.had_backlog, has_backlog
        earliest_s = began_s - _MAX_PAUSE_S if had_backlog else began_s
        since_s, self._last_s = max(self._last_s, earliest_s), now_s
        if not (had_backlog or has_backlog) or now_s <= since_s:
            return
        fade = math.exp(-(now_s - since_s) / _WINDOW_S)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + (now_s - since_s)
