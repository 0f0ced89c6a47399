"""Decides how many prompt tokens run beside decodes in one step.

Prompt tokens in a step delay every sequence that decodes in it. But prompts are cheap beside decodes, because
the weights are read anyway. So each step takes a piece of the waiting prompts. Its size is limited by the
target inter-token latency, as estimated from recent steps. It is also no larger than needed to prefill all
waiting prompts in `STEPS_TO_PREFILL` steps.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

# Sizes of steps with prompts and decodes, in tokens. Such steps are padded to one of these sizes to replay a
# graph, so a piece is cut to reach one exactly. Matrix products work in tiles of 64 or 128 tokens, so other
# sizes gain nothing.
STEP_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
STEPS_TO_PREFILL = 16  # steps in which all waiting prompts should run, if the target allows
MIN_PIECE = 192  # prompt tokens that cost little more than none, because a step reads all weights anyway
MIN_PROGRESS = 16  # prompt tokens that run whatever the target is
MAX_OVERSHOOT = 1.25  # size limit of one step, relative to the target's size; the mean keeps the target
MAX_SLOWDOWN = 1.5  # time that any step may take, relative to its decodes alone, whatever the target is
_MEMORY = 0.97  # factor on the weight of earlier steps with each new one
_MAX_GROWTH = 2  # estimates are trusted up to this multiple of the largest measured step
# A step counts as at most this multiple of its estimate: it may have compiled a kernel or captured a graph.
_MAX_SURPRISE = 4.0


class PrefillDemand(NamedTuple):
    """What a step could run."""

    num_decoding: int  # decoding tokens, one per sequence plus proposed tokens
    num_prompts: int  # prompts that have begun or could begin now
    num_prompt_tokens: int  # all tokens of these prompts, including those that have already run
    max_tokens: int  # prompt tokens that the step has room for
    num_proposed: int = 0  # decoding tokens that are proposals

    @property
    def pressure(self) -> float:
        """Waiting prompts for each decoding sequence; at least 1."""
        return max(1.0, self.num_prompts / (self.num_decoding - self.num_proposed))


class StepTimes:
    """Step time as a linear function of tokens: least squares over recent steps, older ones weighing less.

    The slope is bounded: a step of twice the tokens takes at most twice the time, and more tokens never take
    less. Between measured sizes the line is above the true cost, which grows faster once matrix products are
    no longer limited by memory bandwidth.
    """

    def __init__(self) -> None:
        self.max_measured = 0.0  # tokens of the largest recent step
        self._weight = 0.0
        self._tokens = 0.0  # this and the following are weighted sums
        self._seconds = 0.0
        self._tokens_squared = 0.0
        self._products = 0.0

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def record(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= 0 or seconds <= 0:
            return
        if self._weight > 1:
            seconds = min(seconds, _MAX_SURPRISE * self.seconds_of(num_tokens))
        keep = _MEMORY
        self._weight = keep * self._weight + 1.0
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_squared = keep * self._tokens_squared + num_tokens * num_tokens
        self._products = keep * self._products + num_tokens * seconds
        self.max_measured = max(num_tokens, keep * self.max_measured)

    def _line(self) -> tuple[float, float]:
        """Seconds of a step without tokens, and seconds per token."""
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens * mean_tokens
        steepest = mean_seconds / mean_tokens  # as if a step without tokens took no time
        if variance < 1.0 + 1e-3 * mean_tokens * mean_tokens:
            return 0.0, steepest  # all steps had about the same size
        covariance = self._products / self._weight - mean_tokens * mean_seconds
        slope = min(max(covariance / variance, 1e-3 * steepest), steepest)
        return mean_seconds - slope * mean_tokens, slope

    def seconds_of(self, num_tokens: int) -> float:
        """Estimated seconds of a step; 0 until a step is measured."""
        if not self.is_known:
            return 0.0
        fixed, each = self._line()
        return fixed + each * num_tokens

    def tokens_within(self, seconds: float) -> int:
        """The size of a step that takes this time; 0 until a step is measured."""
        if not self.is_known:
            return 0
        fixed, each = self._line()
        return max(0, int(min((seconds - fixed) / each, _MAX_GROWTH * self.max_measured)))


class PrefillBudget:
    """The size of the piece of prompts in the next step."""

    def __init__(self, target_itl_s: float) -> None:
        """`target_itl_s`: inter-token latency that steps with prompts should keep; 0: no target."""
        self.target_itl_s = target_itl_s
        self.times = StepTimes()
        self._unused = 0  # tokens that the target allowed in recent steps but that did not run

    def max_tokens(self, demand: PrefillDemand) -> int:
        """Prompt tokens that the next step may run."""
        decoding, room = demand.num_decoding, demand.max_tokens
        if not self.target_itl_s or not decoding or not demand.num_prompts:
            self._unused = 0
            return room
        wanted = max(MIN_PIECE, demand.num_prompt_tokens // STEPS_TO_PREFILL)
        fitting = max(decoding + MIN_PROGRESS, self._tokens_in_time(demand))
        if decoding + wanted <= fitting:
            self._unused, size = 0, _size_below(decoding + wanted)
            fitting = decoding + wanted
        else:
            size = self._size_on_average(fitting)
        cut = size - decoding
        piece = cut if 2 * cut >= fitting - decoding else fitting - decoding
        return min(piece, max(wanted, MIN_PROGRESS), room)

    def _tokens_in_time(self, demand: PrefillDemand) -> int:
        """The size of a step that keeps the target. If more prompts wait than sequences decode, the allowed
        time is longer by that ratio, because the step delays fewer sequences than wait for it."""
        decoding, times = demand.num_decoding, self.times
        allowed_s = max(self.target_itl_s, MAX_SLOWDOWN * times.seconds_of(decoding)) * demand.pressure
        tokens = times.tokens_within(allowed_s)
        if times.max_measured < MIN_PIECE:  # measured steps are too small to rely on
            return max(tokens, decoding + MIN_PIECE)
        return tokens

    def _size_on_average(self, fitting: int) -> int:
        """The graph size just below or above what fits. Tokens that smaller steps leave unused allow larger
        steps later, so that the mean keeps the target."""
        lower, upper = _size_below(fitting), _size_above(fitting)
        if upper <= min(fitting + self._unused, MAX_OVERSHOOT * fitting):
            self._unused -= upper - fitting
            return upper
        self._unused = min(self._unused + fitting - lower, upper - lower)
        return lower


def _size_below(num_tokens: int) -> int:
    """The largest of `STEP_SIZES` up to this size; outside their range, this size itself."""
    if not STEP_SIZES[0] <= num_tokens <= STEP_SIZES[-1]:
        return num_tokens
    return STEP_SIZES[bisect_right(STEP_SIZES, num_tokens) - 1]


def _size_above(num_tokens: int) -> int:
    """The smallest of `STEP_SIZES` from this size on; beyond all of them, this size itself."""
    return next((size for size in STEP_SIZES if size >= num_tokens), num_tokens)
