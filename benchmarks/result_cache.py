"""The result cache: requests per second and latency when none, half or all of the texts were sent before.

python benchmarks/result_cache.py [--model FOLDER] [--requests 600] [--clients 8] [--save FILE.md] [--faults]

Each row of the table has its own server, on the CPU: without the cache, with results in memory, or with
results only in Redis. Each request has one natural English text. The rows about Redis need `redis-server`.
"""

from __future__ import annotations

import argparse
import platform
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from urllib.request import urlopen

from http_load import run_load, start
from texts import natural_texts

COMMON_FLAGS = ("--device", "cpu", "--max-queue-seconds", "0")
SOCKET = "s"
MAX_PAUSE_S = 6.0  # longer than the pause after which a server tries Redis again
SHARES = (0.0, 0.5, 1.0)
PAUSE_S = 2.0  # time for rows to be written to Redis


def start_redis(folder: Path) -> subprocess.Popen[bytes]:
    """Start Redis on a socket file in a folder, and wait for the file."""
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.01)
    return process


@contextmanager
def redis_server() -> Iterator[str]:
    """Run Redis on a socket file; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        process = start_redis(Path(folder))
        try:
            yield f"unix://{folder}/{SOCKET}"
        finally:
            process.terminate()
            process.wait()


def faults(common: list[str], texts: list[str], clients: int) -> Iterator[str]:
    """Yield rows of a table: the same texts while Redis answers, hangs, is gone and comes back."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        process = start_redis(Path(folder))
        address = f"unix://{folder}/{SOCKET}"
        server = stack.enter_context(start([*common, "--result-cache-redis", address]))
        stack.callback(lambda: process.kill())
        run_load(server.port, texts[:20], clients)
        time.sleep(PAUSE_S)

        def phase(name: str) -> str:
            hits = metric(server.port, "penstock_result_cache_hits_total")
            latencies: list[float] = []
            run_load(server.port, texts, clients, latencies)  # ends the program if a request fails
            time.sleep(0.2)
            share = (metric(server.port, "penstock_result_cache_hits_total") - hits) / len(texts)
            middle, high = statistics.median(latencies), statistics.quantiles(latencies, n=100)[98]
            times = f"{middle * 1000:.1f} / {high * 1000:.1f} / {max(latencies) * 1000:.0f}"
            return f"| {name} | {share:.0%} | {times} |"

        yield phase("first")
        yield phase("answers")
        process.send_signal(signal.SIGSTOP)
        yield phase("hangs")
        process.send_signal(signal.SIGCONT)
        time.sleep(MAX_PAUSE_S)
        yield phase("answers again")
        process.kill()
        process.wait()
        yield phase("is killed")
        process = start_redis(Path(folder))
        time.sleep(MAX_PAUSE_S)
        yield phase("is empty")
        yield phase("is filled again")


def metric(port: int, name: str) -> float:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def measure(port: int, share: float, known: list[str], fresh: list[str], clients: int) -> str:
    """A row of the table: `share` of the requests repeat known texts."""
    count = len(fresh)
    repeated = random.Random(0).choices(known, k=round(count * share))
    texts = repeated + fresh[: count - len(repeated)]
    random.Random(1).shuffle(texts)
    hits, errors = (metric(port, f"penstock_result_cache_{name}_total") for name in ("hits", "errors"))
    latencies: list[float] = []
    seconds = run_load(port, texts, clients, latencies)
    time.sleep(0.2)  # metrics are published with a delay
    found = metric(port, "penstock_result_cache_hits_total") - hits
    failed = metric(port, "penstock_result_cache_errors_total") - errors
    low, high = statistics.median(latencies), statistics.quantiles(latencies, n=100)[98]
    rate = f"{count / seconds:,.0f} | {low * 1000:.1f} / {high * 1000:.1f}"
    return f"{share:.0%} | {found / count:.0%} | {rate} | {failed:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, help="model folder; by default the bundled model")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--faults", action="store_true", help="stop and kill Redis instead, without a model")
    parser.add_argument("--save", type=Path, help="write the table to this file")
    options = parser.parse_args()
    texts = natural_texts(options.requests * 4)
    known, rest = texts[: options.requests], texts[options.requests :]
    if options.faults:
        print("| Redis | rows from the cache | p50 / p99 / max ms |\n|---|---|---|")
        for row in faults(["--device", "null"], known, options.clients):
            print(row, flush=True)
        return
    common = [*([] if options.model is None else [options.model]), *COMMON_FLAGS]
    lines = ["| cache | repeated | rows from the cache | requests/s | p50 / p99 ms | errors |"]
    lines.append("|---|---|---|---|---|---|")
    stores: dict[str, list[str]] = {"off": [], "memory": ["--result-cache-mb", "64"]}
    with ExitStack() as stack:
        if shutil.which("redis-server") is not None:
            stores["Redis"] = ["--result-cache-redis", stack.enter_context(redis_server())]
        for store, flags in stores.items():
            with start([*common, *flags]) as server:
                run_load(server.port, known[:20], options.clients)
                time.sleep(PAUSE_S)  # the model's revision is computed on the first request
                run_load(server.port, known, options.clients)
                time.sleep(PAUSE_S)
                for number, share in enumerate(SHARES):
                    fresh = rest[number * options.requests : (number + 1) * options.requests]
                    row = measure(server.port, share, known, fresh, options.clients)
                    lines.append(f"| {store} | {row} |")
                    print(lines[-1], flush=True)
    if options.save is not None:
        load = f"{options.requests} requests for each row, {options.clients} clients"
        head = f"{datetime.now():%Y-%m-%d} · {platform.machine()} · {load}"
        options.save.write_text("\n".join([head, "", *lines, ""]))


if __name__ == "__main__":
    main()
