"""What the supervisor and its child processes agree on: configurations, exit codes, the engine's state.

Imports neither the engine nor the API, so that each kind of process loads only its own code.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Literal

import msgspec

from penstock.checkpoint.spec import ModelSpec
from penstock.config import EngineConfig, ModelConfig, ServerConfig
from penstock.serving.runtime_folder import hold_lock

EXIT_BAD_MODEL = 3  # a restart would fail in the same way
EXIT_DEVICE_FAILED = 4  # only a new process can use the device again
PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0
ORPHAN_GRACE_S = 10.0  # for requests that run when the supervisor is killed


class Parent(msgspec.Struct, frozen=True):
    """The supervisor, as its children know it."""

    pid: int
    folder: str  # the runtime folder


class AdapterLaunch(msgspec.Struct, frozen=True):
    """A LoRA adapter of a model, as engines and API processes learn of it.

    The id is never used again while the server runs: weights that are loaded later under the same name have
    another. The digest covers the content of the files.
    """

    id: int
    name: str
    folder: str
    digest: str
    path: str = ""  # as the operator gave it


class EngineLaunch(msgspec.Struct, frozen=True):
    """The configuration of an engine process."""

    engine: EngineConfig
    spec: ModelSpec
    address: str
    log_level: str = "info"
    log_format: str = "auto"
    shared_memory_mb: int = 0
    metrics_folder: str | None = None  # where processes share their metrics; None: they do not
    status_file: str | None = None  # the page of `wire.status`; None: no page
    parent: Parent | None = None  # None: no supervisor
    control: str | None = None  # the socket of `serving.control`; None: the engine takes no orders
    model: int = 0  # the model's number
    kv_share: float | None = None  # of the free memory, for a KV cache of no given size; None: most of it
    wake_timeout_s: float = 30.0  # of a request for a model that sleeps; 0: it does not wait
    index: int = 0  # of this engine among those of its model
    devices: tuple[str, ...] = ()  # one per tensor-parallel rank; empty: as `engine.device` says
    cpus: tuple[int, ...] = ()  # the cores that this engine may use; empty: all
    adapters: tuple[AdapterLaunch, ...] = ()  # that it loads before it serves

    @property
    def engine_on_device(self) -> EngineConfig:
        """The engine's settings, with the device of its first rank."""
        return msgspec.structs.replace(self.engine, device=self.devices[0]) if self.devices else self.engine


class EngineState(msgspec.Struct, frozen=True):
    """Why the engine can or cannot serve, in words for the operator."""

    state: Literal["starting", "running", "restarting"]
    detail: str
    num_restarts: int = 0


class EngineAddress(msgspec.Struct, frozen=True):
    """Where API processes find an engine."""

    socket: str
    state_file: str  # of an `EngineState`
    status_file: str | None = None  # the page of `wire.status`; None: the engine writes none


class ModelLaunch(msgspec.Struct, frozen=True):
    """A model, as API processes learn of it."""

    number: int  # that no other model of this server has, also not one that was unloaded
    config: ModelConfig
    spec: ModelSpec
    engines: tuple[EngineAddress, ...]  # at least one; they hold the same weights
    adapters: tuple[AdapterLaunch, ...] = ()  # that every engine has

    @property
    def aliases(self) -> tuple[str, ...]:
        """Its names besides the first, which is the spec's."""
        return tuple(dict.fromkeys((*self.config.engine.model_names[1:], *self.config.aliases)))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.spec.name, *(alias for alias in self.aliases if alias != self.spec.name))


class ApiLaunch(msgspec.Struct, frozen=True):
    """The configuration of an API process."""

    server: ServerConfig
    models: tuple[ModelLaunch, ...]
    listen_fd: int
    parent: Parent | None = None  # None: no supervisor
    control: str | None = None  # the socket of `serving.control`; None: the models never change
    index: int = 0  # among the API processes
    admin_fd: int | None = None  # of the socket of --admin-port


def setup_child_process() -> None:
    """Exit with the supervisor, unblock the signals that it has blocked, and leave ctrl-C to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2}
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow_parent(parent: Parent | None) -> None:
    """Exit soon after the supervisor, however it ends, and remove the runtime folder if it could not."""
    if parent is None:
        return

    def end(number: int, frame: object) -> None:
        _remove_orphaned_folder(parent)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    hold_lock(Path(parent.folder))
    signal.signal(signal.SIGTERM, end)
    atexit.register(_remove_orphaned_folder, parent)
    Thread(target=_exit_when_orphaned, args=(parent,), name="parent", daemon=True).start()


def _exit_when_orphaned(parent: Parent) -> None:
    while os.getppid() == parent.pid:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)  # the process has usually exited by then
    _remove_orphaned_folder(parent)
    os._exit(1)


def _remove_orphaned_folder(parent: Parent) -> None:
    if os.getppid() != parent.pid:
        shutil.rmtree(parent.folder, ignore_errors=True)
