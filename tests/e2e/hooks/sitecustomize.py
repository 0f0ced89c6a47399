"""Hooks by which a test holds the engine process of a server on the null device.

Python imports this module at start-up when its folder is on PYTHONPATH. It wraps the null runner, in the
engine process only. `tests.e2e.gates.Gates` creates and removes the files that the hooks poll.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

POLL_S = 0.005


def install(folder: Path) -> None:
    from penstock.errors import DeviceFailed
    from penstock.runner.null import NullRunner
    from penstock.types import StepPlan, StepResult

    init, launch = NullRunner.__init__, NullRunner.launch
    start, steps, permit, failure = (folder / name for name in ("start", "steps", "permit", "device-failure"))
    launches, crash = folder / "launches", folder / "crash-at-start"

    def gated_init(self: NullRunner, *arguments: object, **options: object) -> None:
        if crash.exists():
            raise RuntimeError("crashed at the start, as the test wants")
        while start.exists():
            time.sleep(POLL_S)
        init(self, *arguments, **options)  # type: ignore[arg-type]

    def may_finish() -> bool:
        try:
            permit.unlink()
        except FileNotFoundError:
            return not steps.exists()
        return True

    def finish(self: NullRunner, plan: StepPlan, held: Future[StepResult]) -> None:
        while not may_finish():
            time.sleep(POLL_S)
        held.set_result(launch(self, plan).result())

    def gated_launch(self: NullRunner, plan: StepPlan) -> Future[StepResult]:
        if failure.exists():
            message = failure.read_text()
            failure.unlink()
            raise DeviceFailed(message)
        while launches.exists():
            time.sleep(POLL_S)
        if not steps.exists():
            return launch(self, plan)
        held: Future[StepResult] = Future()
        Thread(target=finish, args=(self, plan, held), daemon=True).start()
        return held

    NullRunner.__init__ = gated_init  # type: ignore[method-assign]
    NullRunner.launch = gated_launch  # type: ignore[method-assign]


if "penstock.serving.engine_process" in sys.orig_argv and "PENSTOCK_TEST_GATES" in os.environ:
    install(Path(os.environ["PENSTOCK_TEST_GATES"]))
