"""A runner that writes down what its steps do: traces in Chrome's format, for `--profile`.

The first window opens after some steps, when lazy set-up is over; `again` opens another. Nothing of this is
in the way of an engine that was not asked to profile.
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
SKIP = 20  # steps before the first window


class ProfiledRunner:
    def __init__(self, runner: Runner, folder: Path, steps: int) -> None:
        self.runner, self.folder, self.steps = runner, folder, steps
        self.skip = SKIP
        self.written: list[Path] = []
        self._wanted = True
        self._open: torch.profiler.profile | None = None
        self._flights: list[Future[StepResult]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--profile {folder} cannot be made: {error.strerror}", param="profile"
            ) from None
        log.info("profiling %d steps into %s; SIGUSR2 to process %d: again", steps, folder, os.getpid())

    def again(self) -> None:
        """Open a window at the next step; callable from a signal handler."""
        self._wanted, self.skip = True, 0

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self._wanted and self._open is None:
            if self.skip:
                self.skip -= 1
                return self.runner.launch(plan)
            self._begin()
        if self._open is None:
            return self.runner.launch(plan)
        import torch

        with torch.profiler.record_function(f"step: {plan.num_rows} rows, {plan.num_tokens} tokens"):
            future = self.runner.launch(plan)
        self._flights.append(future)
        if len(self._flights) >= self.steps:
            self._end()
        return future

    def compare(self, comparison: Comparison) -> Future[Array]:
        return self.runner.compare(comparison)

    def close(self) -> None:
        if self._open is not None:
            self._end()
        self.runner.close()

    def _begin(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        activities, threads = [torch.profiler.ProfilerActivity.CPU], None
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        else:  # steps run on a thread of their own
            threads = _ExperimentalConfig(profile_all_threads=True)
        self._wanted, self._flights = False, []
        self._open = torch.profiler.profile(activities=activities, experimental_config=threads)
        self._open.start()

    def _end(self) -> None:
        assert self._open is not None
        wait(self._flights)
        self._open.stop()
        path = self.folder / f"penstock-{os.getpid()}-{len(self.written)}.json"
        try:
            self._open.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk must not end a server
            log.error("the profile could not be written: %s", error)
        else:
            self.written.append(path)
            log.info("%d steps are in %s: open it in https://ui.perfetto.dev", len(self._flights), path)
        self._open, self._flights = None, []
