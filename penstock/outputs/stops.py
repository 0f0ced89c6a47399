"""Stop strings in streamed text.

A stop string is found even if it spans several pieces. Text that may be the beginning of one is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that completes first, however the text is split into pieces."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self.is_active = bool(self._stops)
        self._max_length = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Return (text that may be shown, stop string found). Without `search`, stop strings are ignored."""
        if not self._stops:
            return text, None
        text, self._held = self._held + text, ""
        if not search:
            return text, None
        ends = [
            (at + len(stop), order) for order, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0
        ]
        if ends:
            end, order = min(ends)
            stop = self._stops[order]
            return text[: end if self._include else end - len(stop)], stop
        end = len(text) - self._num_held(text)
        self._held = text[end:]
        return text[:end], None

    def finish(self) -> str:
        """Return the text that was held back for an incomplete stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        for size in range(min(self._max_length - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
