"""Fair share of the device between pooling and generation: each kind of step gets half of the device time.

Turns are balanced by device time, not by the number of steps. A pooling step of long texts takes as long as
dozens of decode steps. If steps simply alternated, every generated token would wait for such a step.
"""

from __future__ import annotations

_LATEST_WEIGHT = 0.2  # weight of the latest step in the moving average of step costs


class FairShare:
    """Device seconds of each kind of step: index 0 for pooling, 1 for generation. Steps in flight count as
    estimated from earlier steps."""

    def __init__(self) -> None:
        self._spent_s = [0.0, 0.0]
        self._cost_s = [0.0, 0.0]  # per pooled token; per generation step, whatever its rows
        self._last_generated = False

    @property
    def prefers_generation(self) -> bool:
        """Whether the next step should generate, if both kinds have work."""
        pooled, generated = self._spent_s
        return generated < pooled or (generated == pooled and not self._last_generated)

    def launched(self, generates: bool, num_tokens: int, *, other_has_work: bool) -> float:
        """Count a step at its launch, and return its estimated seconds. If the other kind has no work, it
        gets no credit for the time that it leaves unused."""
        estimate_s = self._cost_s[generates] * _units(generates, num_tokens)
        self._last_generated = generates
        self._spent_s[generates] += estimate_s
        if not other_has_work:
            self._spent_s[not generates] = max(self._spent_s)
        return estimate_s

    def succeeded(self, generates: bool, num_tokens: int, estimate_s: float, device_s: float) -> None:
        """Replace a step's estimate by the time that it took."""
        cost_s = device_s / _units(generates, num_tokens)
        before_s = self._cost_s[generates]
        self._cost_s[generates] = before_s + _LATEST_WEIGHT * (cost_s - before_s) if before_s else cost_s
        self._spent_s[generates] += device_s - estimate_s

    def failed(self, generates: bool, estimate_s: float) -> None:
        """Take back the estimate of a failed step, which gave its kind no progress."""
        self._spent_s[generates] -= estimate_s


def _units(generates: bool, num_tokens: int) -> int:
    return 1 if generates else max(1, num_tokens)
