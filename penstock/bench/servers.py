"""Servers that a comparison starts and stops."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time

from penstock.bench.probe import is_healthy
from penstock.bench.target import Target
from penstock.errors import BadValue

_POLL_S = 0.25
_STOP_S = 30.0


class Server:
    """A command that runs in its own session, so that its child processes are stopped with it."""

    def __init__(self, name: str, command: str) -> None:
        self.name, self.command = name, command
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — read after an error

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, target: Target, timeout_s: float) -> float:
        """Start the server; return the seconds until it was ready."""
        if is_healthy(target):
            raise BadValue(
                f"{self.name}: a server already answers at {target.base_url}; stop it, or leave out --start",
                param="start",
            )
        began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                shlex.split(self.command),
                stdout=self._log,
                stderr=self._log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise BadValue(
                f"{self.name}: {self.command!r} cannot be started: {error}", param="start"
            ) from None
        while not is_healthy(target):
            if self._process.poll() is not None:
                status = self._process.returncode
                raise BadValue(f"{self.name} ended with status {status} before it was ready: {self._tail()}")
            if time.monotonic() - began > timeout_s:
                raise BadValue(f"{self.name} was not ready within {timeout_s:g} s: {self._tail()}")
            time.sleep(_POLL_S)
        return time.monotonic() - began

    def stop(self) -> None:
        """Send SIGTERM, wait, then kill the processes that are left."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _tail(self) -> str:
        log = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")
        return " / ".join(log.strip().splitlines()[-3:]) or "it printed nothing"
