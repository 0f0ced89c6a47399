"""Chaos test: random faults during a load whose answers are all checked. `make chaos` runs it.

    python -m tests.chaos.run --minutes 10
    python -m tests.chaos.run --minutes 2 --seed 7 --save benchmarks/results

It starts a server on loopback: two API processes, and one engine that embeds, scores and generates. Eight
clients send requests while faults are injected. The promises: each answer is right or a typed error, answers
are never swapped, no process exceeds its memory bound, and the server answers again within 5 s of a kill. If
a promise is broken, the exit code is 1 and each violation is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import httpx

from penstock import __version__
from tests.chaos.faults import HANG_TIMEOUT_S, Faults
from tests.chaos.load import Load, Tally, corpus, learn
from tests.chaos.model import write_poisoned_llama
from tests.e2e.server import API, ENGINE, Server, serving

NUM_CLIENTS = 8
MAX_MIB = {"engine": 1200, "api": 700, "supervisor": 250, "other": 700}  # resident memory at any moment


@dataclass
class Memory:
    """The peak resident memory of each kind of process, in MiB, sampled until the run ends."""

    server: Server
    peaks: dict[str, float] = field(default_factory=dict)

    async def watch(self) -> None:
        while True:
            for kind, pid in _processes(self.server):
                if (size := _peak_mib(pid)) is not None:
                    self.peaks[kind] = max(self.peaks.get(kind, 0.0), size)
            await asyncio.sleep(0.2)


def _processes(server: Server) -> list[tuple[str, int]]:
    engines, apis = server.children(ENGINE), server.children(API)
    children = [("engine", pid) for pid in engines] + [("api", pid) for pid in apis]
    others = [("other", pid) for parent in engines for pid in _children(parent)]
    return [("supervisor", server.process.pid), *children, *others]


def _children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def _peak_mib(pid: int) -> float | None:
    """The peak resident memory of a process, including the shared memory that it has mapped."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


async def chaos(server: Server, seconds: float, seed: int) -> tuple[Tally, Faults, Memory]:
    tally, memory = Tally(), Memory(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        reference = await learn(http, corpus(seed, 256))
    load = Load(server.url, reference, tally)
    faults = Faults(server, load, tally, seed)
    watcher = asyncio.create_task(memory.watch())
    clients = [asyncio.create_task(load.client(seed * 1000 + number)) for number in range(NUM_CLIENTS)]
    await faults.run(time.monotonic() + seconds)
    load.stopping = True
    await asyncio.gather(*clients)
    watcher.cancel()
    for kind, peak in memory.peaks.items():
        if peak > MAX_MIB[kind]:
            tally.violated("memory", f"the {kind} process took {peak:.0f} MiB; its bound is {MAX_MIB[kind]}")
    return tally, faults, memory


def check_rest(server: Server, tally: Tally) -> None:
    """Check that the server becomes idle, has all its processes, and stops cleanly after the faults."""
    server.wait_ready()
    for name in ("penstock_queue_rows", "penstock_running_rows", "penstock_comparisons"):
        server.wait_for_metric(name, 0)
    if len(server.children(API)) != 2 or len(server.engines()) != 1:
        tally.violated("rest", f"processes: {server.children(API)} and {server.engines()}")
    if any("Traceback" in line for line in server.log):
        tally.violated("rest", "the log has a traceback:\n" + "".join(server.log[-40:]))
    if (code := server.terminate()) != 0:
        tally.violated("rest", f"the server exited with code {code}")


def report(tally: Tally, faults: Faults, memory: Memory, minutes: float, seed: int) -> str:
    right = sum(count for name, count in tally.outcomes.items() if name.endswith(": right"))
    latencies = sorted(tally.latencies_s)
    lines = [
        f"{minutes:g} minutes, seed {seed}, {date.today()}, {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, Penstock {__version__}",
        "",
        f"{right} right answers (p50 {statistics.median(latencies) * 1000:.0f} ms, "
        f"p99 {latencies[int(len(latencies) * 0.99)] * 1000:.0f} ms), {len(tally.violations)} violations",
        "",
        "| fault | times |",
        "|---|---:|",
        *(f"| {name.replace('_', ' ')} | {count} |" for name, count in sorted(faults.injected.items())),
        "",
        "| recovery after | times | median s | largest s | allowed s |",
        "|---|---:|---:|---:|---:|",
    ]
    by_fault: dict[str, list[float]] = {}
    for each in faults.recoveries:
        by_fault.setdefault(f"{each.fault}|{each.allowed_s:g}", []).append(each.seconds)
    for key, seconds in sorted(by_fault.items()):
        name, allowed = key.rsplit("|", 1)
        lines.append(
            f"| {name} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {allowed} |"
        )
    lines += ["", "| process | peak MiB | bound MiB |", "|---|---:|---:|"]
    lines += [f"| {kind} | {peak:.0f} | {MAX_MIB[kind]} |" for kind, peak in sorted(memory.peaks.items())]
    kinds: Counter[str] = tally.outcomes
    lines += ["", "| answers | count |", "|---|---:|"]
    lines += [f"| {name} | {count} |" for name, count in sorted(kinds.items())]
    lines += ["", *tally.violations]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="folder to write chaos.md into")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = write_poisoned_llama(Path(work) / "model")
        flags = ["--device", "cpu", "--served-model-name", "chaos", "--api-server-count", "2"]
        flags += [
            "--enable-generation",
            "--standby-engine",
            "--engine-hang-timeout",
            f"{HANG_TIMEOUT_S:g}",
            "--shared-memory-mb",
            "64",
        ]
        with serving(str(folder), *flags) as server:
            tally, faults, memory = asyncio.run(chaos(server, options.minutes * 60, options.seed))
            check_rest(server, tally)
    text = report(tally, faults, memory, options.minutes, options.seed)
    print(text)
    if options.save:
        title = "# Chaos\n\n`python -m tests.chaos.run --minutes N --seed N --save benchmarks/results`\n\n"
        (options.save / "chaos.md").write_text(title + text + "\n")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
