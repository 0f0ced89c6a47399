"""Types shared by the supervisor and its child processes: configurations, exit codes, the engine's state.

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
ORPHAN_GRACE_S = 10.0  # time for requests in flight when the supervisor is killed


class Parent(msgspec.Struct, frozen=True):
    """The supervisor process, described for its children."""

    pid: int
    folder: str  # the runtime folder


class AdapterLaunch(msgspec.Struct, frozen=True):
    """A LoRA adapter of a model, described for engines and API processes.

    An id is never reused while the server runs: weights that are loaded later under the same name get a new
    id. The digest covers the content of the files.
    """

    id: int
    name: str
    folder: str
    digest: str
    path: str = ""  # as given by the operator


class EngineLaunch(msgspec.Struct, frozen=True):
    """The configuration of an engine process."""

    engine: EngineConfig
    spec: ModelSpec
    address: str
    log_level: str = "info"
    log_format: str = "auto"
    shared_memory_mb: int = 0
    metrics_folder: str | None = None  # folder of the shared metrics; None: metrics are not shared
    status_file: str | None = None  # the page of `wire.status`; None: no page
    parent: Parent | None = None  # None: no supervisor
    control: str | None = None  # the socket of `serving.control`; None: the engine takes no orders
    model: int = 0  # the model's number
    kv_share: float | None = None  # share of free memory for a KV cache without a set size; None: most
    wake_timeout_s: float = 30.0  # longest wait of a request for a sleeping model; 0: no wait
    index: int = 0  # the engine's number within its model
    devices: tuple[str, ...] = ()  # one per tensor-parallel rank; empty: `engine.device`
    cpus: tuple[int, ...] = ()  # the cores that this engine may use; empty: all
    adapters: tuple[AdapterLaunch, ...] = ()  # loaded before the engine serves

    @property
    def engine_on_device(self) -> EngineConfig:
        """The engine's settings with `device` set to the device of its first rank."""
        return msgspec.structs.replace(self.engine, device=self.devices[0]) if self.devices else self.engine


class EngineState(msgspec.Struct, frozen=True):
    """The engine's state, with an explanation for the operator."""

    state: Literal["starting", "running", "restarting"]
    detail: str
    num_restarts: int = 0


class EngineAddress(msgspec.Struct, frozen=True):
    """Where API processes reach an engine."""

    socket: str
    state_file: str  # contains an `EngineState`
    status_file: str | None = None  # the page of `wire.status`; None: the engine writes none


class ModelLaunch(msgspec.Struct, frozen=True):
    """A model, described for API processes."""

    number: int  # unique in this server; numbers of unloaded models are not reused
    config: ModelConfig
    spec: ModelSpec
    engines: tuple[EngineAddress, ...]  # at least one; they hold the same weights
    adapters: tuple[AdapterLaunch, ...] = ()  # loaded by every engine

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the model besides `spec.name`."""
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
    index: int = 0  # the number of this API process
    admin_fd: int | None = None  # socket of --admin-port


def setup_child_process() -> None:
    """Exit with the supervisor, unblock the signals that it blocked, and ignore ctrl-C, which it handles."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2}
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def follow_parent(parent: Parent | None) -> None:
    """Exit soon after the supervisor, however it ends. Remove the runtime folder if it did not."""
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
