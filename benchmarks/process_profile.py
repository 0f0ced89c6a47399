"""Profile the processes of a server: CPU time of each, and sampled stacks of some.

py-spy (`pip install py-spy`) samples the stacks without stopping a process. `gpu_loads.py --profile DIR`
uses this.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from urllib.request import urlopen

RATE = 200  # samples per second
LONGEST = 25  # functions in the report


class Profile:
    """Samples processes for some seconds while a load runs."""

    def __init__(
        self, processes: Iterable[tuple[int, str]], folder: Path, seconds: float, port: int | None = None
    ) -> None:
        """`processes`: (pid, module). One process of each module is sampled; CPU time is counted for all.
        `port`: of the server; its metrics are read too."""
        self._port = port
        self._processes = list(processes)
        self._folder, self._seconds = folder, seconds
        self._sampled: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self._began = time.perf_counter()
        self._before = {pid: _cpu_seconds(pid) for pid, _ in self._processes}
        self._machine_before = _machine_seconds()
        self._metrics_before = self._metrics()
        if shutil.which("py-spy") is None:
            return
        for pid, module in self._processes:
            if not module.startswith("penstock.") or module in self._sampled:
                continue
            file = self._folder / f"{module}.txt"
            command = ["py-spy", "record", "--pid", str(pid), "--format", "raw", "--output", str(file)]
            command += ["--duration", str(round(self._seconds)), "--rate", str(RATE), "--nonblocking"]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self._sampled[module] = file, process

    def finish(self) -> list[str]:
        """Stop, and return a report as lines of Markdown."""
        spent = time.perf_counter() - self._began
        lines = ["| process | cores in use |", "|---|---|"]
        for pid, module in self._processes:
            used = (_cpu_seconds(pid) - self._before[pid]) / spent
            lines.append(f"| {module} | {used:.2f} |")
        whole = (_machine_seconds() - self._machine_before) / spent
        lines.append(f"| the whole machine, of {os.cpu_count()} | {whole:.2f} |")
        lines += ["", *self._changes(spent)]
        for module, (file, process) in self._sampled.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if file.exists():
                lines += ["", f"{module}, by thread and function:", "", *_report(file.read_text())]
        return lines

    def _metrics(self) -> dict[str, float]:
        """The server's counters, with their labels."""
        if self._port is None:
            return {}
        with (
            contextlib.suppress(OSError),
            urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as got,
        ):
            found = re.findall(r"^(penstock_\S+?(?:\{.*?\})?) (\S+)$", got.read().decode(), re.MULTILINE)
            return {name: float(value) for name, value in found}
        return {}

    def _changes(self, spent: float) -> list[str]:
        """The changes since the start: means of histograms, and rates of counters."""
        before, now = self._metrics_before, self._metrics()
        new = {name: value - before.get(name, 0.0) for name, value in now.items()}
        lines = ["| metric | mean, or a second |", "|---|---|"]
        for name, change in sorted(new.items()):
            base, brace, labels = name.partition("{")
            if change and base.endswith("_sum"):
                histogram, rest = base.removesuffix("_sum"), brace + labels
                count = new.get(f"{histogram}_count{rest}", 0.0)
                lines.append(f"| `{histogram}{rest}` | {change / max(count, 1):.6g} |")
            elif change and base.endswith("_total"):
                lines.append(f"| `{name}` | {change / spent:,.1f} / s |")
        return lines


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _machine_seconds() -> float:
    """CPU time of all processes on the machine so far."""
    with contextlib.suppress(OSError):
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait
    return 0.0


def _report(stacks: str) -> list[str]:
    """Each function's share of the samples: by itself, and with its callees. Idle threads are not sampled."""
    own: Counter[str] = Counter()
    under: Counter[str] = Counter()
    samples = 0
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if not count.isdigit():
            continue
        frames = [_short(frame) for frame in stack.split(";")]
        samples += int(count)
        own[frames[-1]] += int(count)
        for frame in set(frames):
            under[frame] += int(count)
    if not samples:
        return ["no samples"]
    lines = ["| function | itself | with its callees |", "|---|---|---|"]
    ranked = sorted(under, key=lambda name: max(own[name] * 2, under[name]), reverse=True)
    for name in ranked[: 2 * LONGEST]:
        lines.append(f"| `{name}` | {own[name] / samples:.1%} | {under[name] / samples:.1%} |")
    return lines


def _short(frame: str) -> str:
    """`name (path/to/file.py:12)` → `name (to/file.py)`"""
    name, _, place = frame.partition(" (")
    path = place.rstrip(")").rsplit(":", 1)[0]
    return f"{name} ({'/'.join(Path(path).parts[-2:])})" if path else name
