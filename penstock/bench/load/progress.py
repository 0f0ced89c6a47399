"""Running totals of a load run, for the live view."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from penstock.bench.load.samples import COLUMNS, OK, Block

_RECENT = 4096  # requests in the live percentiles


class Progress:
    def __init__(self, planned: int | None) -> None:
        self.planned = planned
        self.began_s = time.monotonic()
        self.completed = 0
        self.failed = 0
        self.tokens = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def elapsed_s(self) -> float:
        return max(1e-9, time.monotonic() - self.began_s)

    def add(self, block: Block) -> None:
        values = {
            name: np.frombuffer(block.columns[name], COLUMNS[name])
            for name in ("error", "start", "end", "input_tokens", "output_tokens")
        }
        ok = values["error"] == OK
        self.completed += int(ok.sum())
        self.failed += int((values["error"] >= 0).sum())
        self.tokens += int(values["input_tokens"][ok].clip(min=0).sum() + values["output_tokens"][ok].sum())
        self._recent.extend((values["end"] - values["start"])[ok].tolist())

    def percentiles_ms(self) -> tuple[float, float]:
        """p50 and p99 of the latest requests."""
        if not self._recent:
            return 0.0, 0.0
        p50, p99 = np.percentile(np.array(self._recent), (50, 99)) * 1000
        return float(p50), float(p99)
