"""How many prompt tokens run beside decodes in one step.

A prompt in a step holds up every sequence that decodes in it. In turn, prompts are cheap there: the weights
are read for the decodes anyway. So each step takes a piece of the waiting prompts. It is as large as the time
between tokens allows, by what recent steps took, and no larger than it takes to prefill what waits in some
steps.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

# Tokens of a step with prompts and decodes. Such steps are padded to one of these sizes to replay a graph, so
# a piece is cut to end at one of them. Products work in tiles of 64 or 128 tokens, so odd sizes gain nothing.
STEP_SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
STEPS_TO_PREFILL = 16  # in which the prompts that wait run, if the target allows
MIN_PIECE = 192  # tokens that cost little more than none, because a step reads all weights anyway
MIN_PROGRESS = 16  # tokens that run whatever the target is
MAX_OVERSHOOT = 1.25  # times the tokens that fit, of one step: the mean keeps the target
MAX_SLOWDOWN = 1.5  # times the time of its decodes alone: what a step may take, whatever the target is
_MEMORY = 0.97  # weight of a measured step after each further one
_MAX_GROWTH = 2  # times the largest step measured so far: beyond, the estimate is not trusted
_MAX_SURPRISE = 4.0  # times the estimate: a step that compiled a kernel or captured a graph counts as no more


class PrefillDemand(NamedTuple):
    """What a step could run."""

    num_decoding: int  # sequences that run one token each
    num_prompts: int  # prompts that have begun or could begin now
    num_prompt_tokens: int  # of these prompts, with the tokens that have run already
    max_tokens: int  # prompt tokens for which the step has room


class StepTimes:
    """Seconds of a step as a line over its tokens: least squares over recent steps, older ones counting less.

    A step of twice the tokens takes at most twice the time, and one of more tokens takes no less. Between
    measured sizes the line is above the true cost, which grows faster where products stop waiting for memory.
    """

    def __init__(self) -> None:
        self.max_measured = 0.0  # tokens of the largest recent step
        self._weight = 0.0
        self._tokens = 0.0  # weighted sums from here on
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
        """Seconds of a step without tokens, and of each token."""
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens * mean_tokens
        steepest = mean_seconds / mean_tokens  # as if a step without tokens took no time
        if variance < 1.0 + 1e-3 * mean_tokens * mean_tokens:
            return 0.0, steepest  # all steps were alike
        covariance = self._products / self._weight - mean_tokens * mean_seconds
        slope = min(max(covariance / variance, 1e-3 * steepest), steepest)
        return mean_seconds - slope * mean_tokens, slope

    def seconds_of(self, num_tokens: int) -> float:
        """0 while nothing is known."""
        if not self.is_known:
            return 0.0
        fixed, each = self._line()
        return fixed + each * num_tokens

    def tokens_within(self, seconds: float) -> int:
        """The size of a step that takes so long."""
        if not self.is_known:
            return 0
        fixed, each = self._line()
        return max(0, int(min((seconds - fixed) / each, _MAX_GROWTH * self.max_measured)))


class PrefillBudget:
    """The size of the piece of prompts in the next step."""

    def __init__(self, target_itl_s: float) -> None:
        """`target_itl_s`: the time between two tokens of a sequence that prompts may cause; 0: any."""
        self.target_itl_s = target_itl_s
        self.times = StepTimes()
        self._unused = 0  # tokens that the target allowed in the last steps and that they did not take

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
        """The size of a step that keeps the target. Where more prompts wait than sequences decode, they hold
        up fewer sequences than wait for them, so the step may take as many times longer."""
        decoding, times = demand.num_decoding, self.times
        pressure = max(1.0, demand.num_prompts / decoding)
        allowed_s = max(self.target_itl_s, MAX_SLOWDOWN * times.seconds_of(decoding)) * pressure
        tokens = times.tokens_within(allowed_s)
        if times.max_measured < MIN_PIECE:  # too little is known to go by it
            return max(tokens, decoding + MIN_PIECE)
        return tokens

    def _size_on_average(self, fitting: int) -> int:
        """A size around what fits. Smaller steps save up for larger ones: the mean keeps the target."""
        lower, upper = _size_below(fitting), _size_above(fitting)
        if upper <= min(fitting + self._unused, MAX_OVERSHOOT * fitting):
            self._unused -= upper - fitting
            return upper
        self._unused = min(self._unused + fitting - lower, upper - lower)
        return lower


def _size_below(num_tokens: int) -> int:
    """The largest size of steps up to this one; beyond all of them, this one."""
    if not STEP_SIZES[0] <= num_tokens <= STEP_SIZES[-1]:
        return num_tokens
    return STEP_SIZES[bisect_right(STEP_SIZES, num_tokens) - 1]


def _size_above(num_tokens: int) -> int:
    """The smallest size of steps from this one on; beyond all of them, this one."""
    return next((size for size in STEP_SIZES if size >= num_tokens), num_tokens)
