"""Whose step is next where some requests pool and others generate: each kind gets half of the device's time.

Steps take turns by the time they take, not by their number: one of large texts takes as long as dozens that
continue rows by a token, and whoever generates would wait for such a step at every token.
"""

from __future__ import annotations

_NEW = 0.2  # weight of the latest step in what steps are thought to take


class FairShare:
    """Seconds that each kind has had, index 0 for steps that pool and 1 for those that generate. What is in
    flight counts by what the last ones took."""

    def __init__(self) -> None:
        self._spent = [0.0, 0.0]
        self._cost = [0.0, 0.0]  # of a token, or of a step that generates, whose rows hardly count
        self._last = False  # whether the last step generated

    @property
    def generates(self) -> bool:
        """Whether the next step should generate, if there is one of either kind."""
        pooled, generated = self._spent
        return generated < pooled or (generated == pooled and not self._last)

    def launched(self, generates: bool, tokens: int, *, others: bool) -> float:
        """A step is on its way: what it is thought to take. `others` says whether the other kind has work: if
        not it has nothing to make up for later."""
        estimate = self._cost[generates] * _size(generates, tokens)
        self._last = generates
        self._spent[generates] += estimate
        if not others:
            self._spent[not generates] = max(self._spent)
        return estimate

    def ended(self, generates: bool, tokens: int, estimate: float, took: float) -> None:
        cost = took / _size(generates, tokens)
        before = self._cost[generates]
        self._cost[generates] = before + _NEW * (cost - before) if before else cost
        self._spent[generates] += took - estimate

    def failed(self, generates: bool, estimate: float) -> None:
        """A step gave nothing: what it was thought to take is not held against its kind."""
        self._spent[generates] -= estimate


def _size(generates: bool, tokens: int) -> int:
    return 1 if generates else max(1, tokens)
