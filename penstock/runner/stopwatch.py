"""The time that each part of loading takes, for the log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.seconds.items())
        return f"loaded in {sum(self.seconds.values()):.1f} s: {parts}"
