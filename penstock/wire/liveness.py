"""Distinguishes a hung engine from a busy one, by the engine's status page.

The engine's loop writes a heartbeat several times a second, also while a step runs on another thread. Three
things can hang, each with its own limit:

- the loop: there is no heartbeat
- a launch on the loop's thread: no heartbeat either, but capturing a graph or compiling a kernel takes long
- a step on the device: heartbeats go on, but the step never finishes
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.wire.status import EngineStatus

LAUNCH_FACTOR = 12  # a launch may take this many times as long as any other iteration of the loop
MIN_SILENCE_S = 1.0  # several heartbeat intervals
MAX_COUNTED_GAP_S = 1.0
DEFAULT_HANG_TIMEOUT_S = 10.0  # used by API processes if the supervisor never replaces a hung engine


@dataclass(frozen=True, slots=True)
class HangLimits:
    """How long the engine may show no progress; 0: no limit."""

    silence_s: float  # without a heartbeat
    launch_s: float  # without a heartbeat while the loop launches a step
    step_s: float  # while the same step is in flight

    @classmethod
    def for_replacing(cls, hang_timeout_s: float, step_timeout_s: float) -> HangLimits:
        """Limits after which the supervisor replaces the engine."""
        return cls(hang_timeout_s, LAUNCH_FACTOR * hang_timeout_s, step_timeout_s)

    @classmethod
    def for_refusing(cls, hang_timeout_s: float, step_timeout_s: float) -> HangLimits:
        """Limits after which API processes refuse requests. They are shorter, because refusing costs nothing
        if the engine recovers."""
        silence_s = max(MIN_SILENCE_S, (hang_timeout_s or DEFAULT_HANG_TIMEOUT_S) / 4)
        return cls(silence_s, LAUNCH_FACTOR * hang_timeout_s, step_timeout_s)


class LivenessWatch:
    """Watches one engine process, from a process that checks it several times a second.

    Time counts only while the watching process itself runs: a late check counts as one second. Otherwise the
    engine would count as hung after all processes were stopped (ctrl-Z, a paused virtual machine), or while
    the machine is too busy to run either process.
    """

    def __init__(self, limits: HangLimits, is_stopped: Callable[[int], bool] | None = None) -> None:
        self._limits = limits
        self._is_stopped = is_stopped or process_is_stopped
        self._last = EngineStatus()
        self._checked_s: float | None = None
        self._silent_s = 0.0
        self._step_s = 0.0

    def check(self, status: EngineStatus, now_s: float) -> str:
        """Return why the engine counts as hung; empty if it does not, or does not serve yet."""
        gap_s = 0.0 if self._checked_s is None else min(now_s - self._checked_s, MAX_COUNTED_GAP_S)
        last, self._last, self._checked_s = self._last, status, now_s
        is_same = status.pid == last.pid and status.pid != 0
        self._silent_s = self._silent_s + gap_s if is_same and status.heartbeat_s == last.heartbeat_s else 0.0
        same_step = is_same and status.step_began_s == last.step_began_s != 0.0
        self._step_s = self._step_s + gap_s if same_step else 0.0
        return self._reason(status)

    def _reason(self, status: EngineStatus) -> str:
        limits = self._limits
        if limits.silence_s and self._silent_s >= limits.silence_s:
            silent = f"the engine has given no sign of life for {self._silent_s:.0f} s"
            if status.launch_began_s == 0.0:
                return silent
            if self._is_stopped(status.pid):
                return f"{silent}; its process is stopped"
            if limits.launch_s and self._silent_s >= limits.launch_s:
                return f"{silent} while it launches a step"
        if limits.step_s and self._step_s >= limits.step_s:
            return f"a step of the engine has not finished for {self._step_s:.0f} s"
        return ""


def process_is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process. False if the system does not report it."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    return False
