"""The engine process: reads its configuration, loads the model and serves.

The process reads its configuration from standard input, which keeps secrets off the command line. It serves
until it receives SIGTERM or its parent exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec

from penstock.checkpoint.revision import loaded_revision
from penstock.checkpoint.spec import with_max_model_len
from penstock.engine.build import build_core
from penstock.errors import DeviceFailed, PenstockError
from penstock.logs import configure
from penstock.runner.load import settle
from penstock.runner.profile import ProfiledRunner
from penstock.serving.child import STANDBY
from penstock.serving.control import EngineControl, EngineOrder
from penstock.serving.engine_adapters import EngineAdapters
from penstock.serving.launch import (
    EXIT_BAD_MODEL,
    EXIT_DEVICE_FAILED,
    EngineLaunch,
    follow_parent,
    setup_child_process,
)
from penstock.serving.room import Room, one_name, start_bytes
from penstock.wire.messages import Ready
from penstock.wire.server import EngineServer
from penstock.wire.status import StatusWriter

log = logging.getLogger("penstock.engine")
# A thread that returns from waiting for the device gets the GIL from the engine loop within this time.
SWITCH_INTERVAL_S = 0.0005


def preload(device: str) -> None:
    """Do the slow part of start-up that does not depend on the model: import torch, create a CUDA context."""
    if device == "null":
        return
    if device not in ("cpu", STANDBY):
        Thread(target=_create_cuda_context, args=(device,), daemon=True).start()
    import torch  # noqa: F401


def _create_cuda_context(device: str) -> None:
    """Create the primary context of a GPU while torch is being imported. Torch uses the same context."""
    with contextlib.suppress(OSError, ValueError):
        index = int(device.partition(":")[2] or 0)
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index)


def pin(cpus: tuple[int, ...]) -> None:
    """Restrict all threads of this process to these cores. Later threads inherit the restriction."""
    if cpus and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has ended or the cores are offline
                os.sched_setaffinity(int(thread.name), cpus)


def main() -> None:
    setup_child_process()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    preload(*sys.argv[1:2] or ("null",))
    config = sys.stdin.buffer.read()
    if not config:  # the parent exited before it sent a configuration
        return
    launch = msgspec.json.decode(config, type=EngineLaunch)
    follow_parent(launch.parent)
    pin(launch.cpus)
    if launch.metrics_folder is not None:
        # Must be set before prometheus_client is imported.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = launch.metrics_folder
    configure(level=launch.log_level, format=launch.log_format, process="engine", model=launch.spec.name)
    status = None if launch.status_file is None else StatusWriter(Path(launch.status_file))
    server = EngineServer(launch.address, launch.shared_memory_mb << 20, status)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    control = None if launch.control is None else EngineControl(launch.control, launch.model, launch.index)
    try:
        settings = settle(launch.engine_on_device, launch.spec)
        if launch.kv_share is not None:
            settings = msgspec.structs.replace(settings, kv_share=launch.kv_share)
        if settings.tensor_parallel_size > 1:
            settings = msgspec.structs.replace(settings, devices=launch.devices)
        published = msgspec.to_builtins(settings)
        revision = loaded_revision(launch.spec, published)
        if control is not None and launch.control is not None:
            control.attach(os.getpid(), one_name(settings.device))
            room = Room(settings.device, Path(launch.control).parent, control.make_room)
            server.make_room, server.leave_room = room.make, room.leave
            room.make(start_bytes(launch.spec, settings))
            if not settings.device.startswith("cuda"):
                room.leave()  # on other devices engines start concurrently
        from penstock.serving.engine_metrics import EngineMetrics

        metrics = EngineMetrics(launch.spec.name, server.memory, launch.index)
        core = build_core(
            with_max_model_len(launch.spec, settings.max_model_len), settings, server.wake, metrics.step
        )
        adapters = EngineAdapters(server, control)
        adapters.load_all(core, launch.adapters)
    except DeviceFailed as error:  # a restart may help
        log.error("%s", error.message)
        sys.exit(EXIT_DEVICE_FAILED)
    except PenstockError as error:
        log.error("%s", error.message)
        if control is not None:
            control.failed(error.message)
        sys.exit(EXIT_BAD_MODEL)
    if isinstance(profiled := core.runner, ProfiledRunner):
        signal.signal(signal.SIGUSR2, lambda *_: profiled.profile_again())
    if control is not None:
        control.on_order = partial(follow_order, server, control)
        control.on_adapter = adapters.follow
    if loaded_revision(launch.spec, published) != revision:
        revision = ""  # files changed while they were read: the loaded revision is unknown
    gc.collect()
    gc.freeze()  # later collections skip these objects, which live as long as the process
    server.wake_timeout_s, server.observe_sleep = launch.wake_timeout_s, metrics.slept_or_woke
    server.serve(core, Ready(os.getpid(), published, revision=revision), metrics.publish)
    if core.device_failure is not None:
        log.error("%s", core.device_failure.message)
        logging.shutdown()
        os._exit(EXIT_DEVICE_FAILED)  # a normal shutdown could wait forever for the lost device


def follow_order(server: EngineServer, control: EngineControl, order: EngineOrder) -> None:
    """Start to sleep or wake. The supervisor gets a message when that is done."""
    done = partial(control.done, order)
    if order.action == "sleep":
        server.sleep(order.level, done)
    else:
        server.wake_up(done)


if __name__ == "__main__":
    main()
