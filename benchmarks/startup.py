"""Seconds from `penstock serve` until it is ready, and the memory of its processes.

python benchmarks/startup.py [--runs 5] [serve flags…]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path


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
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            "--port",
            str(port),
            "--log-level",
            "warning",
            *flags,
        ]
        began = time.perf_counter()
        process = subprocess.Popen(command)
        while not is_ready(port):
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.01)
        seconds.append(time.perf_counter() - began)
        memory = resident_mb(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        process.wait()
    print(
        f"ready after {statistics.median(seconds):.2f} s (median of {options.runs}, worst {max(seconds):.2f})"
    )
    for module, mb in memory.items():
        print(f"{module}: {mb:.0f} MB resident")


if __name__ == "__main__":
    main()
