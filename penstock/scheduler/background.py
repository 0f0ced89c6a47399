"""When background work runs, and how long its steps may take. Pure policy, without a clock."""

from __future__ import annotations

QUIET_S = 1.0  # without interactive work for so long, background steps may be as large as any
MAX_PASSED = 128  # interactive steps after which a background step runs: less than one in a hundred
MAX_PASSED_HELD = 4  # after which a background step that they have interrupted does a part of its work
STEP_SHARE = 0.2  # of an interactive step, that a background step may take
DELAYED_SHARE = 0.003  # of interactive requests, that may wait for longer than that
DELAYED_PER_S = 0.05  # that may in any case, so that rows too long for a short step run beside rare requests
MAX_CREDIT = 1.0  # of requests that may be delayed
_LATEST_WEIGHT = 0.05  # of the latest interactive step in the moving average
_MIN_CHANGE, _MAX_CHANGE = 0.5, 1.25  # of the size of steps, from one to the next
_FIRST_SHARE = 1 / 16  # of a full step, before anything is measured


class BackgroundLane:
    """Keeps background steps short while interactive requests come, so that one that arrives waits little.

    The number of tokens of a short step follows the time for which steps keep others waiting: all their time,
    or that from one yield point to the next in a step that others may interrupt. Its target is `step_s`, or a
    share of the mean interactive step where that is longer: a slow model has slow requests.

    A row that does not fit into a short step may delay whoever arrives meanwhile. Such rows run as long as
    very few interactive requests have been delayed by them, so that the 99th percentile stays where it is.
    """

    def __init__(self, max_tokens: int, step_s: float) -> None:
        """`max_tokens` is the size of a full step."""
        self._max_tokens = max_tokens
        self._step_s = step_s
        self._short_tokens = max(1.0, max_tokens * _FIRST_SHARE)
        self._interactive_step_s = 0.0
        self._seen_s = -1e9  # when interactive work last arrived or ran
        self._num_passed = 0  # interactive steps since the last background step
        self._last_step_s = (0.0, 0.0)  # when the last background step began and ended
        self._credit = 0.0  # requests that may be delayed, at `_credit_at_s`
        self._credit_at_s = 0.0

    @property
    def target_s(self) -> float:
        """How long a short step should take."""
        return max(self._step_s, STEP_SHARE * self._interactive_step_s)

    @property
    def is_starving(self) -> bool:
        """Whether background work has waited for so many interactive steps that it is its turn."""
        return self._num_passed >= MAX_PASSED

    @property
    def is_held_back(self) -> bool:
        """The same of a background step that interactive steps interrupt: some of it may run now."""
        return self._num_passed >= MAX_PASSED_HELD

    def is_quiet(self, now_s: float) -> bool:
        return now_s - self._seen_s >= QUIET_S

    def max_tokens(self, now_s: float) -> int:
        """The size of a background step that is launched now."""
        return self._max_tokens if self.is_quiet(now_s) else int(self._short_tokens)

    def may_run_long(self, now_s: float) -> bool:
        """Whether a row may run now that does not fit into a short step."""
        return self.is_quiet(now_s) or self._credit_now(now_s) > 0

    def next_chance_s(self) -> float:
        """When a row of any length may run, unless interactive work comes."""
        return min(self._seen_s + QUIET_S, self._credit_at_s - self._credit / DELAYED_PER_S + 0.001)

    def _credit_now(self, now_s: float) -> float:
        return min(MAX_CREDIT, self._credit + DELAYED_PER_S * (now_s - self._credit_at_s))

    def saw_interactive(self, now_s: float) -> None:
        """Interactive work has arrived or run."""
        self._seen_s = now_s

    def launched(self, *, is_background: bool) -> None:
        """A step is launched while background work waits."""
        self._num_passed = 0 if is_background else self._num_passed + 1

    def waited_s(self, arrival_s: float, launched_s: float) -> float:
        """For how long an interactive request waited for the last background step, which it did not
        interrupt; not above 0 if it did not wait."""
        began_s, ended_s = self._last_step_s
        return min(launched_s, ended_s) - max(arrival_s, began_s)

    def answered_interactive(self, waited_s: float, now_s: float) -> None:
        """Learn from an interactive request for how long it waited for a background step."""
        change = DELAYED_SHARE - (1.0 if waited_s > 1.5 * self.target_s else 0.0)
        self._credit, self._credit_at_s = min(MAX_CREDIT, self._credit_now(now_s) + change), now_s

    def ran_interactive(self, device_s: float) -> None:
        """Learn how long an interactive step took."""
        before_s = self._interactive_step_s
        self._interactive_step_s = before_s + _LATEST_WEIGHT * (device_s - before_s) if before_s else device_s

    def ran_background(self, num_tokens: int, kept_s: float, began_s: float, now_s: float) -> None:
        """Adapt the size of short steps to one that kept others waiting for up to `kept_s`."""
        self._last_step_s = began_s, now_s
        if kept_s <= 0:
            return
        fits = self.target_s / kept_s * num_tokens  # tokens, if time grows with them
        change = fits / self._short_tokens
        if change > 1 and 2 * num_tokens < self._short_tokens:
            return  # rows left much of the step unused, which tells nothing about larger ones
        change = min(_MAX_CHANGE, max(_MIN_CHANGE, change))
        self._short_tokens = min(float(self._max_tokens), max(1.0, self._short_tokens * change))
