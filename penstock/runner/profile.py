"""A runner that writes traces of its steps in Chrome's format, for `--profile`.

The first window opens after some steps, when lazy set-up is over; `profile_again` opens another. An engine
that does not profile does not use this module.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.runner.base import Runner
from penstock.types import Array, Comparison, StepPlan, StepResult

if TYPE_CHECKING:
    import torch

log = logging.getLogger("penstock.profile")
WARM_UP_STEPS = 20  # before the first window


class ProfiledRunner:
    def __init__(self, runner: Runner, folder: Path, steps: int) -> None:
        self.runner, self.folder, self.steps = runner, folder, steps
        self.steps_to_skip = WARM_UP_STEPS
        self.written: list[Path] = []
        self._is_wanted = True
        self._window: torch.profiler.profile | None = None
        self._futures: list[Future[StepResult]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = (
                f"--profile: cannot create {folder}: {error.strerror}; give a folder that can be written"
            )
            raise ConfigError(message, param="profile") from None
        log.info("profiling %d steps into %s", steps, folder)
        log.info("send SIGUSR2 to process %d to profile again", os.getpid())

    def profile_again(self) -> None:
        """Open a window at the next step; callable from a signal handler."""
        self._is_wanted, self.steps_to_skip = True, 0

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self._is_wanted and self._window is None:
            if self.steps_to_skip:
                self.steps_to_skip -= 1
                return self.runner.launch(plan)
            self._window = self._open_window()
        if self._window is None:
            return self.runner.launch(plan)
        import torch

        with torch.profiler.record_function(f"step: {plan.num_rows} rows, {plan.num_tokens} tokens"):
            future = self.runner.launch(plan)
        self._futures.append(future)
        if len(self._futures) >= self.steps:
            self._close_window(self._window)
        return future

    def compare(self, comparison: Comparison) -> Future[Array]:
        return self.runner.compare(comparison)

    def close(self) -> None:
        if self._window is not None:
            self._close_window(self._window)
        self.runner.close()

    def _open_window(self) -> torch.profiler.profile:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        activities, threads = [torch.profiler.ProfilerActivity.CPU], None
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        else:  # steps run on the runner's thread
            threads = _ExperimentalConfig(profile_all_threads=True)
        self._is_wanted, self._futures = False, []
        window = torch.profiler.profile(activities=activities, experimental_config=threads)
        window.start()
        return window

    def _close_window(self, window: torch.profiler.profile) -> None:
        wait(self._futures)
        window.stop()
        path = self.folder / f"penstock-{os.getpid()}-{len(self.written)}.json"
        try:
            window.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk must not end a server
            log.error("cannot write the profile: %s", error)
        else:
            self.written.append(path)
            log.info("wrote %d steps to %s: open it in https://ui.perfetto.dev", len(self._futures), path)
        self._window, self._futures = None, []
