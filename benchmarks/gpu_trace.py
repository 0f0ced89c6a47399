"""Device time under load by kind of work, from the server's traces (`--profile`).

    python benchmarks/gpu_trace.py --models DIR [--only '^s[14]'] [--steps 12] [--save PATH]

The loads are those of gpu_loads.py. A server is started with `--profile` and gets the load twice: to warm up,
and while a window of steps is recorded. The trace shows the device's busy time, its gaps and its kinds of
work. Recording every call makes the host about half as fast, so a trace shows longer gaps between eager
launches; gpu_loads.py shows how busy the device is without a trace.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_loads import WARM_UP_S, Failed, Load, Server, Setup, add_options, complete, run_load, selected

KINDS = (  # kind of work → pattern of kernel names; the first match counts
    ("attention", r"_flash|_short|_paged|_merge|flash_fwd|fmha|cudnn.*sdpa"),
    ("scores", r"maxsim|_max_sim|_pairs|_gather"),
    ("embedding and pooling", r"_embed|_pool|_normalize_rows|_to_int8|_to_binary"),
    ("norms", r"norm"),
    ("activation", r"_bias_act|_gated|_act"),
    ("rotation", r"_rotate|rotary"),
    ("experts", r"_matmul|_route|_experts?"),
    ("quantising", r"quant"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitK|sm90_"),
    ("copies", r"memcpy|memset|copy|cat"),
)


@dataclass(frozen=True)
class Busy:
    """One window of a trace, in ms."""

    window: float
    work: float
    longest_gap: float
    gaps: int  # number of gaps longer than 0.1 ms
    kernels: int
    by_kind: dict[str, float]


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def read(events: Iterable[dict[str, Any]]) -> Busy | None:
    """Read one window; None if the trace has no device events."""
    events = list(events)
    steps = [e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("step:")]
    begin = min(steps, default=0.0)  # skip events from before the first recorded step
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    device = [e for e in events if e.get("cat") in kinds and "dur" in e and e["ts"] >= begin]
    if not device:
        return None
    device.sort(key=lambda e: e["ts"])
    by_kind: Counter[str] = Counter()
    work = longest = 0.0
    gaps, end = 0, device[0]["ts"]
    for event in device:
        begin, stop = event["ts"], event["ts"] + event["dur"]
        by_kind[kind_of(event["name"])] += event["dur"] / 1000
        if begin > end:
            gap = (begin - end) / 1000
            longest, gaps = max(longest, gap), gaps + (gap > 0.1)
        work += max(0.0, stop - max(begin, end)) / 1000
        end = max(end, stop)
    window = (end - device[0]["ts"]) / 1000
    return Busy(window, work, longest, gaps, len(device), dict(by_kind))


def traced(setup: Setup, load: Load, options: argparse.Namespace, folder: Path) -> Busy:
    flags = ("--profile", str(folder), "--profile-steps", str(options.steps))
    server = Server(setup, options, Path(options.work), flags)
    try:
        server.start(options.start_timeout)
        for _ in range(3):  # the first window of a new server comes later
            run_load(load, server, options, WARM_UP_S)
            if _written(folder, 0, 2.0) is not None:
                break
        before = len(list(folder.glob("*.json")))
        engine = next(pid for pid, name in server.processes() if name == "penstock.serving.engine_process")
        later = threading.Timer(options.after, os.kill, (engine, signal.SIGUSR2))
        later.start()
        run_load(load, server, options, options.seconds)
        later.join()
        path = _written(folder, before, options.patience)
    finally:
        server.stop()
    if path is None:
        raise Failed("no trace was written: the load has too few steps")
    found = read(json.loads(path.read_text())["traceEvents"])
    if found is None:
        raise Failed("the trace has nothing of a device")
    return found


def _written(folder: Path, before: int, patience_s: float) -> Path | None:
    """Wait until there is one more trace than before, and it is complete. Returns the newest."""
    until = time.perf_counter() + patience_s
    while time.perf_counter() < until:
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        if len(paths) > before:
            size = -1
            while (now := paths[-1].stat().st_size) != size:
                size = now
                time.sleep(0.5)
            return paths[-1]
        time.sleep(0.1)
    return None


def line(load: Load, found: Busy) -> str:
    total = sum(found.by_kind.values())
    parts = sorted(found.by_kind.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{kind} {ms / total:.1%}" for kind, ms in parts if ms / total >= 0.001)
    return (
        f"| {load.title} | {found.window:,.0f} ms, {found.kernels:,} kernels "
        f"| {found.work / found.window:.1%} | {found.longest_gap:.2f} ms; {found.gaps} | {shares} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="steps per window")
    parser.add_argument("--after", type=float, default=1.0, help="seconds of load before the window starts")
    parser.add_argument("--patience", type=float, default=15.0, help="seconds to wait for the trace file")
    add_options(parser)
    options = parser.parse_args()
    complete(parser, options)
    lines = [
        "| load | window | the device works | longest gap; gaps over 0.1 ms | on what |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as work:
        options.work = work
        for setup, loads in selected(options):
            for load in loads:
                folder = Path(work) / load.name
                try:
                    lines.append(line(load, traced(setup, load, options, folder)))
                except Failed as error:
                    lines.append(f"| {load.title} | {error} | | | |")
                print(lines[-1], flush=True)
    text = "\n".join(lines)
    print(text)
    if options.save:
        head = f"# Traces under load\n\n{date.today()} · {_machine()}\n\n"
        head += "`python benchmarks/gpu_trace.py --models DIR --save PATH`\n\n"
        Path(options.save).write_text(head + text + "\n")


def _machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, {os.cpu_count()} cores · Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
