"""Processes that `penstock serve` keeps running.

Light to import: the engine's is begun before anything else, since what its start takes longest for needs no
order.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Child:
    """A process that is to be running, and how often it had to be started again."""

    module: str
    order: bytes = b""
    arguments: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    restart_at_s: float | None = None
    restarts: int = 0
    quick_deaths: int = field(default=0)

    FIRST_DELAY_S = 0.2
    LONGEST_DELAY_S = 30.0
    HEALTHY_AFTER_S = 60.0

    def begin(self) -> None:
        """Start it; it waits for its order."""
        self.restart_at_s = None
        self.started_s = time.monotonic()
        command = [sys.executable, "-m", self.module, *self.arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self.pass_fds)

    def start(self) -> None:
        """Give it its order, and start it if that has not been done."""
        if self.process is None:
            self.begin()
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which will be seen
            self.process.stdin.write(self.order)
            self.process.stdin.close()

    def died(self) -> int | None:
        """The exit code if it has just ended, which also sets the time of the next start."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.process = None
        lived = time.monotonic() - self.started_s
        self.quick_deaths = 0 if lived > self.HEALTHY_AFTER_S else self.quick_deaths + 1
        delay = min(self.LONGEST_DELAY_S, self.FIRST_DELAY_S * 2 ** max(0, self.quick_deaths - 1))
        self.restart_at_s = time.monotonic() + delay
        self.restarts += 1
        return code

    def end(self, patience_s: float) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def engine_child(device: str) -> Child:
    """The engine's, which is to run on such a device."""
    return Child("penstock.serving.engine_process", arguments=(device,))


@contextlib.contextmanager
def spawned_engine(device: str) -> Iterator[Child]:
    """The engine's process, begun. Whatever goes wrong in here ends it."""
    child = engine_child(device)
    child.begin()
    try:
        yield child
    except BaseException:
        child.end(0.0)
        raise
