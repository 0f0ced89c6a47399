"""How long decode steps take with and without speculation, and which of the two is faster.

Times are those from the plan of one decode step to the plan of the next: what a token really takes, with what
the host adds. Steps of another kind in between are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

_LATEST_WEIGHT = 0.1  # of the latest step in the means
_MAX_TIMES_MEAN = 4.0  # longer steps are counted as that many times the mean: something else happened
MIN_STEPS = 8  # of each kind, before their times are compared
TRIAL_STEPS = 8  # of the kind that is not preferred, to measure it again
FIRST_TRIAL_AFTER = 256  # steps; each trial that changes nothing doubles it
LAST_TRIAL_AFTER = 4096
_UNKNOWN_ROW_COST = 0.1  # tokens that a proposed token costs, before it was measured
_MIN_ROW_COST = 0.02


@dataclass(slots=True)
class _Mean:
    """Seconds and proposed tokens of a kind of step, the latest ones weighing most."""

    num_steps: int = 0
    seconds: float = 0.0
    num_proposed: float = 0.0

    def add(self, seconds: float, num_proposed: int) -> None:
        if self.num_steps >= MIN_STEPS:
            seconds = min(seconds, _MAX_TIMES_MEAN * self.seconds)
        self.num_steps += 1
        weight = max(_LATEST_WEIGHT, 1 / self.num_steps)
        self.seconds += weight * (seconds - self.seconds)
        self.num_proposed += weight * (num_proposed - self.num_proposed)

    @property
    def is_measured(self) -> bool:
        return self.num_steps >= MIN_STEPS and self.seconds > 0


class _Latest:
    """The step that was planned last."""

    __slots__ = ("began_s", "is_speculative", "num_proposed", "num_sequences")

    def __init__(self, began_s: float, num_sequences: int, num_proposed: int, is_speculative: bool) -> None:
        self.began_s = began_s
        self.num_sequences = num_sequences
        self.num_proposed = num_proposed
        self.is_speculative = is_speculative


class DecodeTimes:
    """Measured by the number of sequences, in powers of two: a larger step costs more, so it gains less."""

    def __init__(self) -> None:
        self._means: dict[tuple[int, bool], _Mean] = {}
        self._latest: _Latest | None = None
        self._bucket = 0  # of the latest step
        self._trial_left = 0  # steps left of the current trial
        self._trial_is_speculative = False
        self._since_trial = 0
        self._trial_after = FIRST_TRIAL_AFTER

    def begin(self, now_s: float, num_sequences: int, num_proposed: int, *, is_speculative: bool) -> None:
        """A decode step is planned now; the one before took until now."""
        if (last := self._latest) is not None:
            mean = self._mean(last.num_sequences.bit_length(), last.is_speculative)
            mean.add(now_s - last.began_s, last.num_proposed)
        self._latest = _Latest(now_s, num_sequences, num_proposed, is_speculative)
        self._bucket = num_sequences.bit_length()
        self._since_trial += 1
        self._trial_left -= self._trial_left > 0

    def interrupt(self) -> None:
        self._latest = None

    def row_cost(self, num_sequences: int) -> float:
        """How many tokens could be decoded in the time that one proposed token takes."""
        bucket = num_sequences.bit_length()
        plain, speculative = self._mean(bucket, False), self._mean(bucket, True)
        if not (plain.is_measured and speculative.is_measured and speculative.num_proposed > 0):
            return _UNKNOWN_ROW_COST
        extra = speculative.seconds / plain.seconds - 1
        return max(_MIN_ROW_COST, extra * num_sequences / speculative.num_proposed)

    def speedup(self, mean_gain: float) -> float:
        plain, speculative = self._mean(self._bucket, False), self._mean(self._bucket, True)
        if not (plain.is_measured and speculative.is_measured):
            return 1.0
        return (1 + mean_gain) * plain.seconds / speculative.seconds

    def prefers_speculation(self, tokens_per_step: float, *, is_on: bool, margin: float) -> bool:
        """Whether steps that give this many tokens for a sequence beat plain ones. Now and then the other
        kind runs for a few steps, so that its time is known."""
        if self._trial_left:
            return self._trial_is_speculative
        plain, speculative = self._mean(self._bucket, False), self._mean(self._bucket, True)
        if not plain.is_measured:
            return False
        if not speculative.is_measured:
            return tokens_per_step > margin
        faster = tokens_per_step * plain.seconds / speculative.seconds
        preferred = faster > (1.0 if is_on else margin)
        if preferred != is_on:
            self._trial_after, self._since_trial = FIRST_TRIAL_AFTER, 0
        elif self._since_trial >= self._trial_after and (preferred or tokens_per_step > margin):
            self._since_trial, self._trial_left = 0, TRIAL_STEPS
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL_AFTER)
            self._trial_is_speculative = not preferred
            return not preferred
        return preferred

    def _mean(self, bucket: int, is_speculative: bool) -> _Mean:
        return self._means.setdefault((bucket, is_speculative), _Mean())
