"""What the supervisor and its child processes agree on: configurations, exit codes, the engine's state.

Imports neither the engine nor the API, so that each kind of process loads only its own code.
"""

from __future__ import annotations

import ctypes
import signal
import sys

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ServerConfig

EXIT_BAD_MODEL = 3  # a restart would fail in the same way
EXIT_DEVICE_FAILED = 4  # only a new process can use the device again
PR_SET_PDEATHSIG = 1


class EngineLaunch(msgspec.Struct, frozen=True):
    """The configuration of an engine process."""

    engine: EngineConfig
    spec: ModelSpec
    address: str
    log_level: str = "info"
    shared_memory_mb: int = 0
    metrics_folder: str | None = None  # where processes share their metrics; None: they do not
    status_file: str | None = None  # the page of `wire.status`; None: nobody reads it


class EngineState(msgspec.Struct, frozen=True):
    """Why the engine can or cannot serve, in words for the operator."""

    state: str  # starting | running | restarting
    detail: str
    num_restarts: int = 0


class ApiLaunch(msgspec.Struct, frozen=True):
    """The configuration of an API process."""

    server: ServerConfig
    engine: EngineConfig
    spec: ModelSpec
    address: str
    listen_fd: int
    state_file: str
    status_file: str | None = None  # the page of `wire.status`; None: the engine writes none


def setup_child_process() -> None:
    """Exit with the supervisor, unblock the signals that it has blocked, and leave ctrl-C to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2}
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
