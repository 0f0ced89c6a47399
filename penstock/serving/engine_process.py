"""The engine's own process: reads its launch order, loads the model and serves.

The order comes over standard input, which keeps secrets off the command line. The process serves until it is
told to stop or its parent exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from threading import Thread

import msgspec

from penstock.checkpoint.spec import with_limit
from penstock.engine.build import build_core
from penstock.errors import PenstockError
from penstock.runner.load import settle
from penstock.runner.profile import ProfiledRunner
from penstock.serving.launch import EXIT_BAD_MODEL, EXIT_DEVICE_FAILED, EngineLaunch, setup_child_process
from penstock.wire.messages import Ready
from penstock.wire.server import EngineServer

log = logging.getLogger("penstock.engine")


def begin(device: str) -> None:
    """What a start takes longest for, and needs to know no model for."""
    if device == "null":
        return
    if device != "cpu":
        Thread(target=_wake_driver, args=(device,), daemon=True).start()
    import torch  # noqa: F401


def _wake_driver(device: str) -> None:
    """The context of a GPU, made while torch is imported, which then finds it there."""
    with contextlib.suppress(OSError, ValueError):
        number = int(device.partition(":")[2] or 0)
        driver, made = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), number)


def main() -> None:
    setup_child_process()
    begin(*sys.argv[1:2] or ("null",))
    order = sys.stdin.buffer.read()
    if not order:  # whoever began it has thought better of it
        return
    launch = msgspec.json.decode(order, type=EngineLaunch)
    if launch.metrics_folder is not None:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = launch.metrics_folder  # read by the library's import
    logging.basicConfig(level=launch.log_level.upper(), format="%(levelname)s engine: %(message)s")
    server = EngineServer(launch.address, launch.shared_memory_mb << 20)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    try:
        settings = settle(launch.engine, launch.spec)
        from penstock.serving.engine_metrics import EngineMetrics

        metrics = EngineMetrics(launch.spec.name, server.arena)
        core = build_core(
            with_limit(launch.spec, settings.max_model_len), settings, server.wake, metrics.step
        )
    except PenstockError as error:
        print(f"error: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(EXIT_BAD_MODEL)
    if isinstance(profiled := core.runner, ProfiledRunner):
        signal.signal(signal.SIGUSR2, lambda *_: profiled.again())
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection has to look at it
    server.serve(core, Ready(os.getpid(), msgspec.to_builtins(settings)), metrics.turn)
    if core.broken is not None:
        log.error("%s", core.broken.message)
        logging.shutdown()
        os._exit(EXIT_DEVICE_FAILED)  # a lost device must not be tidied up


if __name__ == "__main__":
    main()
