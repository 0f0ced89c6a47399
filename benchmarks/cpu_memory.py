"""Memory of a CPU server under batches of random shapes; fails if the engine keeps growing.

    python benchmarks/cpu_memory.py --minutes 30 [--bound-mib 64] [--save NAME]

Starts `penstock serve --device cpu` on loopback and sends rows of random token ids: 1 to 256 rows of 1 to 512
tokens, both drawn by powers of two. Step shapes hardly ever repeat, which is the worst case for caches keyed
by shape. Growth is counted after a quarter of the time, when the caches are full. `--save` writes the curve
to benchmarks/results/NAME.json, and `--table A.json B.json` compares such files. To measure another version,
set PYTHONPATH to its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections import Counter
from datetime import date
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cpu_embed import cpu_name
from soak import ask, await_ready, processes, resident_mib, start_server

RESULTS = Path(__file__).parent / "results"


def random_rows(draw: random.Random, max_rows: int, max_length: int) -> list[list[int]]:
    """Row counts and lengths by powers of two, so that a small batch is as likely as a large one."""
    rows = round(max_rows ** draw.random())
    longest = round(max_length ** draw.random())
    return [[draw.randrange(1000, 20_000) for _ in range(draw.randint(1, longest))] for _ in range(rows)]


def client(
    options: argparse.Namespace, url: str, seed: int, stop: threading.Event, counts: Counter[str]
) -> None:
    draw, address = random.Random(seed), urlsplit(url)
    connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=300)
    while not stop.is_set():
        rows = random_rows(draw, options.max_rows, options.max_length)
        body = json.dumps({"input": rows, "encoding_format": "base64"}).encode()
        try:
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            counts[str(response.status)] += 1
            counts["tokens"] += sum(map(len, rows)) if response.status == 200 else 0
        except (OSError, HTTPException) as error:
            counts[type(error).__name__] += 1
            connection.close()


def engine_pid(server: int) -> int:
    return next(pid for pid, name in processes(server) if "engine" in name)


def measure(options: argparse.Namespace, url: str, server: int) -> dict[str, Any]:
    engine, stop, counts = engine_pid(server), threading.Event(), Counter[str]()
    samples = [(0.0, resident_mib(engine))]
    clients = [
        threading.Thread(target=client, args=(options, url, seed, stop, counts))
        for seed in range(options.clients)
    ]
    for each in clients:
        each.start()
    began = time.monotonic()
    try:
        while (at := time.monotonic() - began) < options.minutes * 60:
            time.sleep(options.every)
            with contextlib.suppress(OSError):
                samples.append((at, resident_mib(engine)))
            if options.verbose:
                print(f"{at:6.0f} s {samples[-1][1]:8,.0f} MiB {counts['tokens']:12,} tokens", flush=True)
    finally:
        stop.set()
        for each in clients:
            each.join()
    return {
        "date": str(date.today()),
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: version(name) for name in ("torch", "numpy")}
        | {"python": platform.python_version()},
        "minutes": options.minutes,
        "requests": dict(counts),
        "was_lost": engine_pid(server) != engine,
        "samples": [[round(at, 1), round(mib, 1)] for at, mib in samples],
    }


def growth_mib(result: dict[str, Any]) -> float:
    """Median of the last quarter of the time minus the median of the second quarter."""
    end = result["minutes"] * 60
    second, last = (
        [mib for at, mib in result["samples"] if low * end <= at < high * end]
        for low, high in ((0.25, 0.5), (0.75, 2.0))
    )
    return statistics.median(last) - statistics.median(second)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Memory over time in MiB: each column has the peak since the previous column."""
    marks = [0.5, 1, 2, 4, 8, 15, 20, 25, 30]
    longest = max(result["minutes"] for result in results.values())
    marks = [mark for mark in marks if mark <= longest] or [longest]
    lines = [
        "| | start | "
        + " | ".join(f"{mark:g} min" for mark in marks)
        + " | last quarter over second | tokens/s |",
        "|---" * (len(marks) + 4) + "|",
    ]
    for name, result in results.items():
        samples, cells, before = result["samples"], [], 0.0
        for mark in marks:
            part = [mib for at, mib in samples if before < at <= mark * 60]
            cells.append(f"{max(part):,.0f}" if part and mark <= result["minutes"] else "")
            before = mark * 60
        rate = result["requests"]["tokens"] / (result["minutes"] * 60)
        lines.append(
            f"| {name} | {samples[0][1]:,.0f} | {' | '.join(cells)} "
            f"| {growth_mib(result):+,.0f} | {rate:,.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=4, help="number of connections")
    parser.add_argument("--max-rows", type=int, default=256, help="rows per request")
    parser.add_argument("--max-length", type=int, default=512, help="tokens per row")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--bound-mib", type=float, default=64.0, help="allowed growth in MiB")
    parser.add_argument("--model", help="model folder; by default the default model")
    parser.add_argument("--serve-flags", default="--device cpu --max-model-len 512")
    parser.add_argument("--save", help="name of the file in benchmarks/results")
    parser.add_argument("--table", nargs="+", type=Path, help="compare these files instead of a run")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table({file.stem: json.loads(file.read_text()) for file in options.table}))
        return 0
    server = start_server(options)
    try:
        await_ready(options.base_url, server, 300)
        assert ask(options.base_url, "GET", "/ready")[0] == 200
        result = measure(options, options.base_url, server.pid)
    finally:
        server.terminate()
        server.wait(60)
    if options.save:
        (RESULTS / f"{options.save}.json").write_text(json.dumps(result))
    print(table({"engine": result}))
    print(f"requests: {result['requests']}")
    failed = growth_mib(result) > options.bound_mib or result["was_lost"] or not result["requests"].get("200")
    print("FAILED" if failed else "passed: no growth")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
