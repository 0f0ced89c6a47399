"""Run every test that needs a CUDA device, and end with one summary line.

python -m tests.gpu.run [--jobs N] [--files FILE...] [pytest options]

`make gpu-test` calls this. The status is 0 if all tests passed, 3 if there is no CUDA device, 1 otherwise. It
needs torch, Triton and pytest, but no pytest plugin.

With `--jobs`, every file runs in a process of its own, and N of them share the device. An illegal memory
access then ends only one file. Tests of memory run after the others, one file at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
NO_DEVICE = 3
TIMEOUT_S = 600  # per test, if pytest-timeout is installed
ALONE = ("gpu/test_memory.py", "gpu/test_sleep.py", "gpu/test_graphs.py")  # they measure or limit memory
SHARERS = "PENSTOCK_TEST_SHARERS"  # environment variable: number of processes on the device
ENGINES_SHARE = 0.5  # share of a shared device that engines see; the rest is for weights and activations
OUTCOMES = ("passed", "failed", "skipped")


class Summary:
    """A pytest plugin that counts outcomes and prints failures at once. Errors in fixtures are failures."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:  # printed now, because a later test may end the process
            print(f"\nfailed: {report.nodeid}\n{report.longreprtext}", flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["failed"] += 1


def gpu_test_files() -> list[Path]:
    """Files with tests marked `gpu`. With a device, all tests in `tests/kernels` are marked."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [file for file in files if file.parent.name == "kernels" or "mark.gpu" in file.read_text()]


def run(files: Sequence[Path], options: Sequence[str], device: str) -> int:
    """Run the tests marked `gpu` in these files and print the summary line. Returns 0 if some passed and none
    failed."""
    summary = Summary()
    settings = ["-o", "addopts=", "-q", "-rs", "--strict-markers", "-m", "gpu", "-p", "no:cacheprovider"]
    if find_spec("pytest_timeout") is not None:
        settings.append(f"--timeout={TIMEOUT_S}")
    began = time.monotonic()
    status = pytest.main([*settings, *options, *map(str, files)], plugins=[summary])
    _print_summary(summary.counts, began, device)
    passed = status == pytest.ExitCode.OK and summary.counts["passed"] > 0 and not summary.counts["failed"]
    return 0 if passed else 1


def run_apart(files: Sequence[Path], options: Sequence[str], device: str, jobs: int) -> int:
    """Do the same as `run` with a process for each file, `jobs` of them at a time."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    alone = [file for file in files if file.as_posix().endswith(ALONE)]
    shared = sorted((file for file in files if file not in alone), key=_size, reverse=True)
    for part, together in ((shared, jobs), (alone, 1)):
        with ThreadPoolExecutor(together) as pool:
            for done in as_completed(pool.submit(_run_file, file, options, together) for file in part):
                counts += done.result()
    _print_summary(counts, began, device)
    return 0 if counts["passed"] and not counts["failed"] else 1


def _run_file(file: Path, options: Sequence[str], sharers: int) -> Counter[str]:
    """Run one file and count its outcomes. A process that ends early counts as one more failure."""
    command = [sys.executable, "-m", "tests.gpu.run", "--files", str(file), "--", "-vv", *options]
    threads = max(1, (os.cpu_count() or 1) // sharers)  # for references on the CPU
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        SHARERS: str(sharers),
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    ran = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    found = re.findall(r"^gpu-test: (\d+) passed, (\d+) failed, (\d+) skipped", ran.stdout, re.MULTILINE)
    if found:
        counts = Counter(dict(zip(OUTCOMES, map(int, found[-1]), strict=True)))
    else:
        words = re.findall(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b", ran.stdout, re.MULTILINE)
        counts = Counter({"ERROR": "failed"}.get(word, word.lower()) for word in words)
        counts["failed"] += 1
    told = f"{file.relative_to(TESTS) if file.is_relative_to(TESTS) else file}: " + _tell(counts)
    print(f"{told} in {time.monotonic() - began:.0f} s, status {ran.returncode}", flush=True)
    if counts["failed"]:
        print(ran.stdout, flush=True)
    elif skips := re.findall(r"^SKIPPED \[\d+\] .*", ran.stdout, re.MULTILINE):
        print("\n".join(f"  {skip}" for skip in skips), flush=True)
    return counts


def share_memory() -> None:
    """Report only this process's share of the free memory: engines give most of it to the KV cache."""
    sharers = int(os.environ.get(SHARERS, "1"))
    if sharers == 1:
        return
    of_device = torch.cuda.mem_get_info

    def of_process(device: torch.device | int | None = None) -> tuple[int, int]:
        free, total = of_device(device)
        return min(free, int(total * ENGINES_SHARE / sharers)), total

    torch.cuda.mem_get_info = of_process


def _size(file: Path) -> int:
    return file.stat().st_size


def _tell(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in OUTCOMES)


def _print_summary(counts: Counter[str], began: float, device: str) -> None:
    print(f"gpu-test: {_tell(counts)} in {time.monotonic() - began:.0f} s on {device}", flush=True)


def main(arguments: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"gpu-test: no CUDA device found; torch {torch.__version__} is {built}. Nothing was run.")
        return NO_DEVICE
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--files", type=Path, nargs="+")
    own, options = parser.parse_known_args(arguments)
    options = [option for option in options if option != "--"]
    files, device = own.files or gpu_test_files(), torch.cuda.get_device_name()
    if own.jobs > 1:
        return run_apart(files, options, device, own.jobs)
    share_memory()
    return run(files, options, device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
