"""Measures decode steps with and without speculation, and decides which is faster.

A step's time is from its plan to the plan of the next decode step, so it includes the work of the host.
Steps that are followed by a step of another kind are not measured. A draft model reads the known tokens of a
sequence once, to catch up. That time is averaged over many steps, and ignored in the first step after
speculation is switched on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_LATEST_WEIGHT = 0.1  # weight of the latest step in the means
_MAX_TIMES_MEAN = 4.0  # a step counts as at most this multiple of the mean: outliers have other causes
MIN_STEPS = 8  # measured steps of each kind before their times are compared
TRIAL_STEPS = 8  # steps of the kind that is not preferred, to measure it again
FIRST_TRIAL_AFTER = 256  # steps until the first trial; doubled after each trial that changes nothing
LAST_TRIAL_AFTER = 4096
_CATCH_UP_WEIGHT = 0.02  # weight of the latest step in the mean catch-up time of a draft model
_UNKNOWN_ROW_COST = 0.1  # cost of a proposed token, in decoded tokens, until it is measured
_MIN_ROW_COST = 0.02


@dataclass(slots=True)
class _Mean:
    """Moving averages of the seconds and proposed tokens of one kind of step."""

    num_steps: int = 0
    own_s: float = 0.0  # without `catch_up_s`
    catch_up_s: float = 0.0
    num_proposed: float = 0.0

    def add(self, own_s: float, num_proposed: int) -> None:
        if self.num_steps >= MIN_STEPS:
            own_s = min(own_s, _MAX_TIMES_MEAN * self.own_s)
        self.num_steps += 1
        weight = max(_LATEST_WEIGHT, 1 / self.num_steps)
        self.own_s += weight * (own_s - self.own_s)
        self.num_proposed += weight * (num_proposed - self.num_proposed)

    def add_catch_up(self, seconds: float) -> None:
        self.catch_up_s += _CATCH_UP_WEIGHT * (seconds - self.catch_up_s)

    @property
    def seconds(self) -> float:
        return self.own_s + self.catch_up_s

    @property
    def is_measured(self) -> bool:
        return self.num_steps >= MIN_STEPS and self.own_s > 0


class _Latest(NamedTuple):
    """The decode step that was planned last."""

    began_s: float
    num_sequences: int
    num_proposed: int
    is_speculative: bool
    catch_up_s: float


class DecodeTimes:
    """Step times by number of sequences, in power-of-two buckets: proposals cost more in larger steps."""

    def __init__(self) -> None:
        self._means: dict[tuple[int, bool], _Mean] = {}  # by bucket, and whether steps are speculative
        self._latest: _Latest | None = None
        self._was_speculative = False  # whether the last decode step was; kept when other steps follow it
        self._bucket = 0  # bucket of the latest step
        self._trial_left = 0  # steps left in the current trial
        self._trial_is_speculative = False
        self._is_tried = False  # a trial runs, or has ended and is not evaluated yet
        self._since_trial = 0
        self._trial_after = FIRST_TRIAL_AFTER

    def begin(
        self,
        now_s: float,
        num_sequences: int,
        num_proposed: int,
        *,
        is_speculative: bool,
        catch_up_s: float = 0.0,
    ) -> None:
        """Record that a decode step is planned now, which ends the step before. `catch_up_s` is the part of
        this step's time that its draft model spends on catching up."""
        if (last := self._latest) is not None:
            mean = self._mean(last.num_sequences.bit_length(), last.is_speculative)
            mean.add(max(0.0, now_s - last.began_s - last.catch_up_s), last.num_proposed)
        if is_speculative and self._was_speculative:
            self._mean(num_sequences.bit_length(), True).add_catch_up(catch_up_s)
        self._was_speculative = is_speculative
        self._latest = _Latest(now_s, num_sequences, num_proposed, is_speculative, catch_up_s)
        self._bucket = num_sequences.bit_length()
        self._since_trial += 1
        self._trial_left -= self._trial_left > 0

    def interrupt(self) -> None:
        self._latest = None

    def row_cost(self, num_sequences: int) -> float:
        """The time of one proposed token, in tokens that plain decoding generates in that time."""
        bucket = num_sequences.bit_length()
        plain, speculative = self._mean(bucket, False), self._mean(bucket, True)
        if not (plain.is_measured and speculative.is_measured and speculative.num_proposed > 0):
            return _UNKNOWN_ROW_COST
        extra = speculative.own_s / plain.own_s - 1
        return max(_MIN_ROW_COST, extra * num_sequences / speculative.num_proposed)

    def speedup(self, mean_gain: float) -> float:
        plain, speculative = self._mean(self._bucket, False), self._mean(self._bucket, True)
        if not (plain.is_measured and speculative.is_measured):
            return 1.0
        return (1 + mean_gain) * plain.seconds / speculative.seconds

    def prefers_speculation(
        self, tokens_per_step: float, *, is_on: bool, margin: float, is_gain_known: bool = True
    ) -> bool:
        """Whether speculative steps with this many tokens per sequence are faster than plain steps. The kind
        that is not preferred runs in occasional trials of a few steps, so that its time stays known. Without
        `is_gain_known`, `tokens_per_step` may be out of date while speculation is off: trials take place even
        if it promises no gain."""
        if self._trial_left:
            return self._trial_is_speculative
        plain, speculative = self._mean(self._bucket, False), self._mean(self._bucket, True)
        if not plain.is_measured:
            return False
        promises_gain = tokens_per_step > margin
        if self._is_tried:
            is_on = not self._trial_is_speculative  # the mode before the trial
        if speculative.is_measured:
            faster = tokens_per_step * plain.seconds / speculative.seconds
            preferred = faster > (1.0 if is_on else margin)
        elif promises_gain or is_gain_known:
            return promises_gain
        else:
            preferred = False
        self._is_tried = False
        if preferred != is_on:
            self._trial_after, self._since_trial = FIRST_TRIAL_AFTER, 0
        elif self._since_trial >= self._trial_after and (preferred or promises_gain or not is_gain_known):
            self._since_trial, self._trial_left = 0, TRIAL_STEPS
            self._trial_after = min(2 * self._trial_after, LAST_TRIAL_AFTER)
            self._trial_is_speculative, self._is_tried = not preferred, True
            return not preferred
        return preferred

    def _mean(self, bucket: int, is_speculative: bool) -> _Mean:
        return self._means.setdefault((bucket, is_speculative), _Mean())
