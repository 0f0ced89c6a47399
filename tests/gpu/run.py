"""Run every test that needs a CUDA device, and end with one summary line.

python -m tests.gpu.run [--jobs N] [pytest options]

`make gpu-test` calls this. The status is 0 if all tests passed, 3 if there is no CUDA device, 1 otherwise. It
needs torch, Triton and pytest, but no pytest plugin. With `--jobs` and pytest-xdist, several processes share
the device; tests of its memory run after the others, in one process.
"""

from __future__ import annotations

import argparse
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
ALONE = ("gpu/test_memory.py", "gpu/test_sleep.py", "gpu/test_graphs.py")  # they watch or limit memory


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


def run(files: Sequence[Path], options: Sequence[str], device: str, jobs: int = 1) -> int:
    """Run the tests marked `gpu` in these files and print the summary line. 0: some passed and none
    failed."""
    summary = Summary()
    settings = ["-o", "addopts=", "-q", "--strict-markers", "-m", "gpu", "-p", "no:cacheprovider"]
    if find_spec("pytest_timeout") is not None:
        settings.append(f"--timeout={TIMEOUT_S}")
    began = time.monotonic()
    statuses = []
    for part, more in _parts(files, jobs):
        statuses.append(pytest.main([*settings, *more, *options, *map(str, part)], plugins=[summary]))
    seconds = time.monotonic() - began
    counts = ", ".join(f"{summary.counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    print(f"gpu-test: {counts} in {seconds:.0f} s on {device}", flush=True)
    fine = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    passed = fine.issuperset(statuses) and summary.counts["passed"] > 0 and not summary.counts["failed"]
    return 0 if passed else 1


def _parts(files: Sequence[Path], jobs: int) -> list[tuple[list[Path], list[str]]]:
    """Files that run together, with their options."""
    if jobs == 1:
        return [(list(files), [])]
    alone = [file for file in files if file.as_posix().endswith(ALONE)]
    shared = [file for file in files if file not in alone]
    spread = ["-p", "tests.gpu.shared_device", "-n", str(jobs), "--dist", "worksteal"]
    return [(part, more) for part, more in ((shared, spread), (alone, [])) if part]


def main(options: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"gpu-test: no CUDA device found; torch {torch.__version__} is {built}. Nothing was run.")
        return NO_DEVICE
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=1)
    own, rest = parser.parse_known_args(options)
    return run(gpu_test_files(), rest, torch.cuda.get_device_name(), own.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
