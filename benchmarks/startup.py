"""Seconds until `penstock serve` is ready, and the memory of its processes.

python benchmarks/startup.py [--runs 5] [serve flags…]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from http_load import start


def resident_mb(parent: int) -> dict[str, float]:
    """Resident memory of a server's processes, by module."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            status = (folder / "status").read_text()
        except OSError:
            continue
        values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if int(values.get("PPid", "0")) == parent and b"-m" in words:
            module = words[words.index(b"-m") + 1].decode()
            found[module] = int(values["VmRSS"].split()[0]) / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    options, flags = parser.parse_known_args()
    seconds, memory = [], {}
    for _ in range(options.runs):
        began = time.perf_counter()
        with start(flags) as server:
            seconds.append(time.perf_counter() - began)
            memory = resident_mb(server.pid)
    middle, worst = statistics.median(seconds), max(seconds)
    print(f"ready after {middle:.2f} s (median of {options.runs}, worst {worst:.2f})")
    for module, mb in memory.items():
        print(f"{module}: {mb:.0f} MB resident")


if __name__ == "__main__":
    main()
