"""Which engines are considered hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from penstock.wire.liveness import LAUNCH_FACTOR, HangLimits, LivenessWatch, process_is_stopped
from penstock.wire.status import EngineStatus
from tests.waiting import wait_until

LIMITS = HangLimits(silence_s=10.0, launch_s=120.0, step_s=600.0)
PID = 4711


class Watched:
    """A watch that checks an engine every half second of a fake clock."""

    def __init__(self, limits: HangLimits = LIMITS, *, is_stopped: bool = False) -> None:
        self.now_s = 1000.0
        self.watch = LivenessWatch(limits, lambda pid: is_stopped)
        self.status = EngineStatus(PID, heartbeat_s=self.now_s)

    def run(self, seconds: float, *, beats: bool = False, **fields: float) -> str:
        """Advance the clock while the engine publishes `fields`, and return the reason of the last check."""
        reason, until_s = "", self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.5
            heartbeat_s = self.now_s if beats else self.status.heartbeat_s
            self.status = EngineStatus(PID, heartbeat_s=heartbeat_s, **fields)  # type: ignore[arg-type]
            reason = self.watch.check(self.status, self.now_s)
        return reason


def test_a_silent_loop_hangs_after_its_limit_and_no_longer_once_it_beats() -> None:
    engine = Watched()
    assert engine.run(5, beats=True) == ""
    assert engine.run(9) == ""
    assert "no sign of life for 10 s" in engine.run(1)
    assert engine.run(0.5, beats=True) == ""
    assert engine.run(9) == ""


def test_a_long_step_is_no_hang_while_the_loop_beats() -> None:
    engine = Watched()
    assert engine.run(599, beats=True, step_began_s=1000.0) == ""
    assert "a step of the engine has not finished for 600 s" in engine.run(2, beats=True, step_began_s=1000.0)


def test_the_time_of_a_step_counts_from_its_own_launch() -> None:
    engine = Watched()
    assert engine.run(590, beats=True, step_began_s=1000.0) == ""
    assert engine.run(590, beats=True, step_began_s=1590.0) == ""
    assert engine.run(590, beats=True) == ""


def test_a_launch_has_a_longer_limit_unless_the_process_is_stopped() -> None:
    engine = Watched()
    assert engine.run(119, launch_began_s=999.0) == ""
    assert "while it launches" in engine.run(2, launch_began_s=999.0)
    stopped = Watched(is_stopped=True)
    assert stopped.run(9, launch_began_s=999.0) == ""
    assert "its process is stopped" in stopped.run(2, launch_began_s=999.0)


def test_an_engine_that_does_not_serve_yet_does_not_hang() -> None:
    watch = LivenessWatch(LIMITS)
    assert all(watch.check(EngineStatus(), now_s) == "" for now_s in range(1000))


def test_the_time_in_which_the_watching_process_itself_stood_still_does_not_count() -> None:
    """All processes may stop together, for example on ctrl-Z, and the watching one may continue first."""
    engine = Watched()
    engine.run(5, beats=True)
    engine.now_s += 3600
    assert engine.run(5) == ""
    assert engine.run(0.5, beats=True) == ""


def test_a_new_engine_starts_with_no_silence() -> None:
    engine = Watched()
    assert engine.run(12) != ""
    assert (
        engine.watch.check(EngineStatus(PID + 1, heartbeat_s=engine.status.heartbeat_s), engine.now_s) == ""
    )


@pytest.mark.parametrize("timeout_s", [1.0, 10.0, 60.0])
def test_api_processes_refuse_before_the_supervisor_replaces(timeout_s: float) -> None:
    refusing, replacing = HangLimits.for_refusing(timeout_s, 600), HangLimits.for_replacing(timeout_s, 600)
    assert 1.0 <= refusing.silence_s <= replacing.silence_s == timeout_s
    assert refusing.launch_s == replacing.launch_s == LAUNCH_FACTOR * timeout_s


def test_no_limit_never_replaces_but_still_refuses() -> None:
    assert Watched(HangLimits.for_replacing(0, 0)).run(5000, step_began_s=1.0) == ""
    assert Watched(HangLimits.for_refusing(0, 0)).run(5) != ""


def test_a_stopped_process_is_told_from_one_that_runs() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not process_is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: process_is_stopped(process.pid))
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not process_is_stopped(process.pid))
    finally:
        process.kill()
        process.communicate()
    assert not process_is_stopped(process.pid)
