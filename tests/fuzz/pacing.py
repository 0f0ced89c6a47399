"""Paces hostile requests: a steady rate, with quiet phases in between.

The quiet phases measure the idle server throughout the run, so that a slow machine affects both figures. They
follow from the clock alone, since the probe is another process that reads the same clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tests.fuzz.probe import ProbeResult

FUZZ_S, SETTLE_S, QUIET_S = 6.0, 1.0, 3.0
_CYCLE_S = FUZZ_S + SETTLE_S + QUIET_S


@dataclass(slots=True)
class Pacer:
    rate: float  # cases per second outside quiet phases
    began_s: float = field(default_factory=time.monotonic)
    _due_s: float = 0.0

    def wait_s(self) -> float:
        """Seconds until the next case may be sent. Call once for each case."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s + 1 / self.rate, now_s)
        phase_s = (self._due_s - self.began_s) % _CYCLE_S
        if phase_s >= FUZZ_S:
            self._due_s += _CYCLE_S - phase_s
        return self._due_s - now_s

    def split(self, probe: ProbeResult) -> tuple[ProbeResult, ProbeResult]:
        """Split the probe's requests into those in quiet phases and all others, which keep the wrong
        answers."""
        quiet = ProbeResult()
        busy = ProbeResult(num_wrong=probe.num_wrong, wrong=probe.wrong)
        for due_s, latency_ms in zip(probe.due_s, probe.latencies_ms, strict=True):
            is_quiet = (due_s - self.began_s) % _CYCLE_S >= FUZZ_S + SETTLE_S
            (quiet if is_quiet else busy).latencies_ms.append(latency_ms)
        return quiet, busy
