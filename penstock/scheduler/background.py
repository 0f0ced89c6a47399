"""When background work runs, and how long its steps may take. Pure policy, without a clock."""

from __future__ import annotations

QUIET_S = 1.0  # without interactive work for so long, background steps may be as large as any
MAX_PASSED = (
    128  # interactive steps after which a background step runs in any case: less than one in a hundred
)
_SHARE_OF_STEP = 0.25  # of an interactive step, that a background step may take
_LATEST_WEIGHT = 0.1  # of the latest interactive step in the moving average
_MIN_CHANGE, _MAX_CHANGE = 0.5, 1.25  # of the size of steps, from one to the next
_FIRST_SHARE = 1 / 16  # of a full step, before anything is measured


class BackgroundLane:
    """Keeps background steps short while interactive requests come, so that one that arrives waits little.

    The number of tokens of a short step follows the time that steps take. Its target is `step_s`, or a share
    of the mean interactive step where that is longer: a slow model has slow requests.
    """

    def __init__(self, max_tokens: int, step_s: float) -> None:
        """`max_tokens` is the size of a full step."""
        self._max_tokens = max_tokens
        self._step_s = step_s
        self._short_tokens = max(1.0, max_tokens * _FIRST_SHARE)
        self._interactive_step_s = 0.0
        self._seen_s = float("-inf")  # when interactive work last arrived or ran
        self._num_passed = 0  # interactive steps since the last background step

    @property
    def target_s(self) -> float:
        """How long a short step should take."""
        return max(self._step_s, _SHARE_OF_STEP * self._interactive_step_s)

    @property
    def is_starving(self) -> bool:
        """Whether background work has waited for so many interactive steps that it is its turn."""
        return self._num_passed >= MAX_PASSED

    def is_quiet(self, now_s: float) -> bool:
        return now_s - self._seen_s >= QUIET_S

    def max_tokens(self, now_s: float) -> int:
        """The size of a background step that is launched now."""
        return self._max_tokens if self.is_quiet(now_s) else int(self._short_tokens)

    def saw_interactive(self, now_s: float) -> None:
        """Interactive work has arrived or run."""
        self._seen_s = now_s

    def launched(self, *, is_background: bool) -> None:
        """A step is launched while background work waits."""
        self._num_passed = 0 if is_background else self._num_passed + 1

    def ran_interactive(self, device_s: float) -> None:
        before_s = self._interactive_step_s
        self._interactive_step_s = before_s + _LATEST_WEIGHT * (device_s - before_s) if before_s else device_s

    def ran_background(self, num_tokens: int, device_s: float) -> None:
        """Adapt the size of short steps to one that took so long."""
        if device_s <= 0:
            return
        fits = self.target_s / device_s * num_tokens  # tokens, if time grows with them
        change = fits / self._short_tokens
        if change > 1 and 2 * num_tokens < self._short_tokens:
            return  # rows left much of the step unused, which tells nothing about larger ones
        change = min(_MAX_CHANGE, max(_MIN_CHANGE, change))
        self._short_tokens = min(float(self._max_tokens), max(1.0, self._short_tokens * change))
