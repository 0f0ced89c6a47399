"""Run every test that needs a CUDA device in one process, and end with one summary line.

python -m tests.gpu.run [pytest options]

`make gpu-test` calls this. The status is 0 if all tests passed, 3 if there is no CUDA device, 1 otherwise. It
needs torch, Triton and pytest, but no pytest plugin.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
NO_DEVICE = 3
TIMEOUT_S = 600  # of one test, where pytest-timeout is installed


class Summary:
    """A pytest plugin that counts outcomes. An error in a fixture counts as a failure."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["failed"] += 1


def gpu_test_files() -> list[Path]:
    """Files with tests marked `gpu`; with a device, all tests of `tests/kernels` are."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [file for file in files if file.parent.name == "kernels" or "mark.gpu" in file.read_text()]


def run(files: Sequence[Path], options: Sequence[str], device: str) -> int:
    """Run the tests marked `gpu` in these files and print the summary line. 0: some passed and none
    failed."""
    summary = Summary()
    settings = ["-o", "addopts=", "-q", "--strict-markers", "-m", "gpu", "-p", "no:cacheprovider"]
    if find_spec("pytest_timeout") is not None:
        settings.append(f"--timeout={TIMEOUT_S}")
    began = time.monotonic()
    status = pytest.main([*settings, *options, *map(str, files)], plugins=[summary])
    seconds = time.monotonic() - began
    counts = ", ".join(f"{summary.counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    print(f"gpu-test: {counts} in {seconds:.0f} s on {device}", flush=True)
    passed = status == pytest.ExitCode.OK and summary.counts["passed"] > 0 and not summary.counts["failed"]
    return 0 if passed else 1


def main(options: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"gpu-test: no CUDA device found; torch {torch.__version__} is {built}. Nothing was run.")
        return NO_DEVICE
    return run(gpu_test_files(), options, torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
