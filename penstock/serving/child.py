"""Child processes of `penstock serve`: started, watched and restarted.

A process that has served and then dies is restarted within a second, however often it dies: other clients
must not wait longer because one client crashes it. A process that dies before it can serve is restarted with
exponential backoff. Its failed starts are counted, so that the supervisor can give up.

This module must stay light to import: the command spawns the engine process before it imports anything else,
because the slow part of the engine's start needs no configuration.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, cast

from penstock.isolation import isolated_environment, isolated_python


@dataclass(slots=True)
class Standby:
    """A process that has done the slow part of its start, and waits to replace any child that runs the same
    module."""

    module: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the process, unless one is already waiting."""
        if self.process is None or self.process.poll() is not None:
            self.process = _popen(self.module, self.arguments)

    def take(self) -> subprocess.Popen[bytes] | None:
        """Hand the waiting process over to the caller; None if there is none."""
        process, self.process = self.process, None
        return process if process is not None and process.poll() is None else None

    def stop(self) -> None:
        if (process := self.take()) is not None:
            process.kill()
            process.wait()


def _popen(
    module: str, arguments: tuple[str, ...], pass_fds: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    command = isolated_python("-m", module, *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pass_fds, env=isolated_environment())


@dataclass(slots=True)
class Child:
    """A process that is kept running. It reads its configuration from standard input."""

    module: str
    config: bytes = b""
    arguments: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()
    max_restart_delay_s: float = 30.0  # longest delay for a process that has not served
    standby: Standby | None = None  # replaces the process faster than a new process could
    process: subprocess.Popen[bytes] | None = None
    spawned_s: float = 0.0
    restart_at_s: float | None = None
    num_restarts: int = 0
    num_early_exits: int = 0  # consecutive
    num_failed_starts: int = 0  # consecutive
    has_served: bool = False  # the current process
    has_ever_served: bool = False
    stopped_s: float = 0.0  # how long a signal has kept the process stopped
    kill_reason: str = ""  # why the supervisor killed the process

    MIN_RESTART_DELAY_S = 0.2
    MAX_RESTART_DELAY_AFTER_SERVING_S = 1.0
    HEALTHY_AFTER_S = 10.0  # an exit before this time is early, and doubles the delay

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start the process, or take the standby process if there is one. It waits for its configuration."""
        self.restart_at_s = None
        self.spawned_s = time.monotonic()
        self.has_served, self.stopped_s, self.kill_reason = False, 0.0, ""
        process = None if self.standby is None else self.standby.take()
        self.process = process or _popen(self.module, self.arguments, self.pass_fds)
        return self.process

    def start(self) -> None:
        """Send the configuration to the process. Spawns it first if there is none."""
        process = self.process or self.spawn()
        stdin = cast(IO[bytes], process.stdin)  # a pipe, see `_popen`
        with contextlib.suppress(BrokenPipeError):  # the process has exited; `poll_exit` will report it
            stdin.write(self.config)
            stdin.close()

    def mark_served(self) -> None:
        """Record that the current process can serve, or could before it exited."""
        self.has_served = self.has_ever_served = True

    def poll_exit(self) -> int | None:
        """Return the exit code if the process has exited since the last call, and schedule its restart."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.process = None
        lifetime_s = time.monotonic() - self.spawned_s
        self.num_early_exits = 0 if lifetime_s > self.HEALTHY_AFTER_S else self.num_early_exits + 1
        self.num_failed_starts = 0 if self.has_served else self.num_failed_starts + 1
        num_failures = self.num_early_exits if self.has_served else self.num_failed_starts
        limit_s = self.MAX_RESTART_DELAY_AFTER_SERVING_S if self.has_served else self.max_restart_delay_s
        delay_s = self.MIN_RESTART_DELAY_S * 2 ** min(30, max(0, num_failures - 1))
        self.restart_at_s = time.monotonic() + min(limit_s, delay_s)
        self.num_restarts += 1
        return code

    def kill(self, reason: str) -> None:
        """Kill a process that hangs. Its exit is reported like any other."""
        if self.process is not None:
            self.kill_reason = reason
            self.process.kill()

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


ENGINE_MODULE = "penstock.serving.engine_process"
STANDBY = "standby"  # the argument of an engine process that imports torch but uses no device yet


def engine_child(device: str, standby: Standby | None = None) -> Child:
    """Create the child for an engine process, without spawning it."""
    return Child(ENGINE_MODULE, arguments=(device,), standby=standby)


def engine_standby() -> Standby:
    return Standby(ENGINE_MODULE, (STANDBY,))


@contextlib.contextmanager
def spawned_engine(device: str) -> Iterator[Child]:
    """Spawn the engine process. An exception in the body stops it."""
    child = engine_child(device)
    child.spawn()
    try:
        yield child
    except BaseException:
        child.stop(0.0)
        raise
