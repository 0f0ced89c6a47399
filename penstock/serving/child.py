"""Child processes of `penstock serve`: started, watched and restarted with exponential backoff.

Light to import: the command spawns the engine process before it imports anything else, because the slow part
of the engine's start needs no configuration.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, cast


@dataclass(slots=True)
class Child:
    """A process that should be running. It reads its configuration from standard input."""

    module: str
    config: bytes = b""
    arguments: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    spawned_s: float = 0.0
    restart_at_s: float | None = None
    num_restarts: int = 0
    num_early_exits: int = 0  # in a row

    MIN_RESTART_DELAY_S = 0.2
    MAX_RESTART_DELAY_S = 30.0
    HEALTHY_AFTER_S = 60.0  # an exit before this is an early one, and doubles the delay

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process, which waits for its configuration."""
        self.restart_at_s = None
        self.spawned_s = time.monotonic()
        command = [sys.executable, "-m", self.module, *self.arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=self.pass_fds)
        return self.process

    def start(self) -> None:
        """Send the configuration to the process, which is spawned first if there is none."""
        process = self.process or self.spawn()
        stdin = cast(IO[bytes], process.stdin)  # a pipe, see `spawn`
        with contextlib.suppress(BrokenPipeError):  # the process has exited, which `poll_exit` will report
            stdin.write(self.config)
            stdin.close()

    def poll_exit(self) -> int | None:
        """The exit code if the process has exited since the last call. Schedules the restart."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.process = None
        lifetime_s = time.monotonic() - self.spawned_s
        self.num_early_exits = 0 if lifetime_s > self.HEALTHY_AFTER_S else self.num_early_exits + 1
        backoff_s = self.MIN_RESTART_DELAY_S * 2 ** max(0, self.num_early_exits - 1)
        self.restart_at_s = time.monotonic() + min(self.MAX_RESTART_DELAY_S, backoff_s)
        self.num_restarts += 1
        return code

    def stop(self, timeout_s: float) -> None:
        """Terminate the process; kill it if it has not exited in time."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def engine_child(device: str) -> Child:
    """The engine process, not yet spawned."""
    return Child("penstock.serving.engine_process", arguments=(device,))


@contextlib.contextmanager
def spawned_engine(device: str) -> Iterator[Child]:
    """The engine process, spawned. An exception in the body stops it."""
    child = engine_child(device)
    child.spawn()
    try:
        yield child
    except BaseException:
        child.stop(0.0)
        raise
