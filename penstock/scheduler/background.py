"""When background work runs, and how long its steps may take. Pure policy, without a clock."""

from __future__ import annotations

QUIET_S = 1.0  # after this time without interactive work, background steps are full-sized
MAX_PASSED = 128  # interactive steps until a background step runs in any case: fewer than one step in 100
MAX_PASSED_HELD = 4  # interactive steps until a paused background step runs one stretch in any case
STEP_SHARE = 0.2  # target time of a background step, as a fraction of the mean interactive step
DELAYED_SHARE = 0.003  # fraction of interactive requests that background steps may delay
DELAYED_PER_S = 0.05  # further requests per second that may be delayed: long rows run beside rare requests
MAX_CREDIT = 1.0  # upper limit of the requests that may be delayed
_LATEST_WEIGHT = 0.05  # weight of the latest interactive step in the moving average
_MIN_CHANGE, _MAX_CHANGE = 0.5, 1.25  # limits of the factor between the sizes of successive short steps
_FIRST_SHARE = 1 / 16  # size of the first short step, as a fraction of a full step


class BackgroundLane:
    """Keeps background steps short while interactive requests arrive, so that new requests wait only briefly.

    The number of tokens of a short step follows the measured time for which a background step blocks other
    steps. This is its full time, or, if it can be interrupted, the time between two yield points. The target
    is `step_s`, or a fraction of the mean interactive step if that is longer: a slow model has slow requests.

    A row that does not fit into a short step may delay requests that arrive while it runs. Such rows run only
    while they have delayed very few interactive requests, so that the 99th percentile of latency does not
    change.
    """

    def __init__(self, max_tokens: int, step_s: float) -> None:
        """`max_tokens` is the size of a full step."""
        self._max_tokens = max_tokens
        self._step_s = step_s
        self._short_tokens = max(1.0, max_tokens * _FIRST_SHARE)
        self._interactive_step_s = 0.0
        self._seen_s = -1e9  # when interactive work last arrived or ran
        self._num_passed = 0  # interactive steps since the last background step
        self._last_step_s = (0.0, 0.0)  # begin and end of the last background step
        self._credit = 0.0  # requests that may be delayed, as of `_credit_at_s`
        self._credit_at_s = 0.0

    @property
    def target_s(self) -> float:
        """Target time of a short step."""
        return max(self._step_s, STEP_SHARE * self._interactive_step_s)

    @property
    def is_starving(self) -> bool:
        """Whether background work has waited for so many interactive steps that it has to run next."""
        return self._num_passed >= MAX_PASSED

    @property
    def is_held_back(self) -> bool:
        """Whether a paused background step has waited so long that it has to run one stretch."""
        return self._num_passed >= MAX_PASSED_HELD

    def is_quiet(self, now_s: float) -> bool:
        return now_s - self._seen_s >= QUIET_S

    def max_tokens(self, now_s: float) -> int:
        """The maximum size of a background step that is launched now."""
        return self._max_tokens if self.is_quiet(now_s) else int(self._short_tokens)

    def may_run_long(self, now_s: float) -> bool:
        """Whether a row that does not fit into a short step may run now."""
        return self.is_quiet(now_s) or self._credit_now(now_s) > 0

    def next_chance_s(self) -> float:
        """When a row of any length may run, if no interactive work arrives before."""
        return min(self._seen_s + QUIET_S, self._credit_at_s - self._credit / DELAYED_PER_S + 0.001)

    def _credit_now(self, now_s: float) -> float:
        return min(MAX_CREDIT, self._credit + DELAYED_PER_S * (now_s - self._credit_at_s))

    def saw_interactive(self, now_s: float) -> None:
        """Record that interactive work has arrived or run."""
        self._seen_s = now_s

    def launched(self, *, is_background: bool) -> None:
        """Record the launch of a step while background work waits."""
        self._num_passed = 0 if is_background else self._num_passed + 1

    def waited_s(self, arrival_s: float, launched_s: float) -> float:
        """How long an interactive request waited for the last background step, which it did not interrupt.
        Zero or negative if it did not wait."""
        began_s, ended_s = self._last_step_s
        return min(launched_s, ended_s) - max(arrival_s, began_s)

    def answered_interactive(self, waited_s: float, now_s: float) -> None:
        """Record how long an interactive request waited for a background step."""
        change = DELAYED_SHARE - (1.0 if waited_s > 1.5 * self.target_s else 0.0)
        self._credit, self._credit_at_s = min(MAX_CREDIT, self._credit_now(now_s) + change), now_s

    def ran_interactive(self, device_s: float) -> None:
        """Record how long an interactive step took."""
        before_s = self._interactive_step_s
        self._interactive_step_s = before_s + _LATEST_WEIGHT * (device_s - before_s) if before_s else device_s

    def ran_background(self, num_tokens: int, kept_s: float, began_s: float, now_s: float) -> None:
        """Adapt the size of short steps to a step that kept other steps waiting for up to `kept_s`."""
        self._last_step_s = began_s, now_s
        if kept_s <= 0:
            return
        fits = self.target_s / kept_s * num_tokens  # tokens, if time is proportional to them
        change = fits / self._short_tokens
        if change > 1 and 2 * num_tokens < self._short_tokens:
            return  # most of the step was unused, so its time says nothing about larger steps
        change = min(_MAX_CHANGE, max(_MIN_CHANGE, change))
        self._short_tokens = min(float(self._max_tokens), max(1.0, self._short_tokens * change))
