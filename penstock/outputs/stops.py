"""Stop strings in a text that comes in pieces: found across their borders, and not shown before it is sure
that none begins."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The first to be complete ends the text, however the text was cut into pieces."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self.is_active = bool(self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """(what may be shown, the stop string that was found). Text that is not searched never matches."""
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
        sure = len(text) - self._begun(text)
        self._held = text[sure:]
        return text[:sure], None

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
