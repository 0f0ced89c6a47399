"""Mixed load for minutes; fails if a process of the server, or its device, keeps more and more memory.

    python benchmarks/soak.py --minutes 5 --model FOLDER --serve-flags "--load-format dummy"
    python benchmarks/soak.py --minutes 5 --base-url http://127.0.0.1:8000 --pid PID

The first form starts a server and ends it; the second takes one that runs, by its `penstock serve` process.
Short and long texts, one and many in a request, both encodings, refused bodies and clients that leave are
mixed.
Exit code 1: memory grew by more than the bound after the warm-up, or a process was lost.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import multiprocessing
import random
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

WORDS = ("water", "river", "pipe", "valve", "pump", "gate", "flow", "turbine", "basin", "weir", "sluice")
DEVICE = "device"


def body(draw: random.Random, model: str, longest: int) -> bytes:
    """One request of the mix; one in thirty is refused by the server."""
    if draw.random() < 1 / 30:
        return json.dumps({"model": model, "input": 7, "unknown": True}).encode()
    many = draw.choice((1, 1, 1, 2, 8, 64))
    most = longest if draw.random() < 0.2 else min(longest, 40)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(many)]
    fields = {"model": model, "input": texts, "truncate_prompt_tokens": -1}
    return json.dumps(fields | {"encoding_format": draw.choice(("float", "base64"))}).encode()


def client(url: str, model: str, longest: int, seed: int, stop: Event, counts: Counter[str]) -> None:
    """Requests one after another; now and then it leaves before the answer, or opens a new connection."""
    draw, address = random.Random(seed), urlsplit(url)
    connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    while not stop.is_set():
        sent = body(draw, model, longest)
        try:
            connection.request("POST", "/v1/embeddings", sent, headers)
            if draw.random() < 0.02:
                connection.close()
                counts["left"] += 1
                continue
            response = connection.getresponse()
            content = response.read()
            counts[str(response.status)] += 1
            if response.status == 200 and draw.random() < 0.01 and not right(content, sent):
                counts["wrong"] += 1
        except (OSError, HTTPException) as error:
            counts[type(error).__name__] += 1
            connection.close()
            time.sleep(0.1)


def right(content: bytes, sent: bytes) -> bool:
    """Whether an answer has a finite vector for each text."""
    vectors = [row["embedding"] for row in json.loads(content)["data"]]
    values = [array("f", base64.b64decode(v)) if isinstance(v, str) else v for v in vectors]
    return len(values) == len(json.loads(sent)["input"]) and all(
        len(v) > 0 and all(map(math.isfinite, v)) for v in values
    )


def load_process(
    url: str,
    model: str,
    longest: int,
    threads: int,
    seed: int,
    stop: Event,
    out: multiprocessing.Queue[Counter[str]],
) -> None:
    counts: list[Counter[str]] = [Counter() for _ in range(threads)]
    workers = [
        threading.Thread(target=client, args=(url, model, longest, seed * 1000 + i, stop, counts[i]))
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    out.put(sum(counts, Counter()))


def processes(pid: int) -> Iterator[tuple[int, str]]:
    """(pid, module) of a process and all that it started."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        yield pid, words[words.index("-m") + 1] if "-m" in words else Path(words[0]).name
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from processes(int(child))


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def device_mib() -> float | None:
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return float(found[0]) if found else None


def sample(pid: int) -> dict[str, float]:
    found = {}
    for child, name in processes(pid):
        with contextlib.suppress(OSError):
            found[f"{name} {child}"] = resident_mib(child)
    if (device := device_mib()) is not None:
        found[DEVICE] = device
    return found


def start_server(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options.base_url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "penstock", "serve", *([options.model] if options.model else [])]
    command += ["--port", str(port), *shlex.split(options.serve_flags)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def get(url: str, path: str) -> tuple[int, bytes]:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def await_ready(url: str, server: subprocess.Popen[bytes] | None, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while get(url, "/ready")[0] != 200:
        if server is not None and server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        if time.monotonic() > until:
            raise SystemExit(f"{url} is not ready after {patience_s:g} s")
        time.sleep(0.1)


def report(samples: list[tuple[float, dict[str, float]]], warm_up_s: float, bound_mib: float) -> list[str]:
    """A line for each process, and the complaints. Memory is a median over a tenth of the time."""
    complaints: list[str] = []
    after = [found for at, found in samples if at >= warm_up_s]
    size = max(3, len(after) // 10)
    print(f"\n| {'process':<34} | at first | warm MiB | end MiB | peak MiB | growth MiB |")
    print("|---|---|---|---|---|---|")
    for name in after[0]:
        if any(name not in found for found in after):
            complaints.append(f"{name} was lost")
            continue
        values = [found[name] for found in after]
        warm, end = statistics.median(values[:size]), statistics.median(values[-size:])
        first = f"{samples[0][1].get(name, 0.0):,.0f}"
        grown = f"{end - warm:+,.1f}"
        print(f"| {name:<34} | {first} | {warm:,.0f} | {end:,.0f} | {max(values):,.0f} | {grown} |")
        if end - warm > bound_mib:
            complaints.append(f"{name} grew by {end - warm:,.1f} MiB; {bound_mib:g} are allowed")
    new = {name for found in after for name in found} - set(after[0])
    return complaints + [f"{name} is new: something was restarted" for name in sorted(new)]


def soak(options: argparse.Namespace, pid: int) -> list[str]:
    model = json.loads(get(options.base_url, "/v1/models")[1])["data"][0]["id"]
    context = multiprocessing.get_context("spawn")
    stop, out = context.Event(), context.Queue()
    fixed = (options.base_url, model, options.longest, options.threads)
    clients = [
        context.Process(target=load_process, args=(*fixed, seed, stop, out), daemon=True)
        for seed in range(options.clients)
    ]
    began = time.monotonic()
    samples = [(0.0, sample(pid))]
    for one in clients:
        one.start()
    try:
        while (at := time.monotonic() - began) < options.minutes * 60:
            time.sleep(options.every)
            samples.append((at, sample(pid)))
            if options.verbose:
                print(f"{at:6.0f} s  " + "  ".join(f"{v:,.0f}" for v in samples[-1][1].values()), flush=True)
    finally:
        stop.set()
    counts = sum((out.get(timeout=90) for _ in clients), Counter[str]())
    for one in clients:
        one.join(10)
    answers = ", ".join(f"{name}: {count:,}" for name, count in sorted(counts.items()))
    print(f"{counts['200'] / (time.monotonic() - began):,.0f} answered requests/s ({answers})")
    complaints = report(samples, options.warm_up * options.minutes * 60, options.bound_mib)
    failed = sum(count for name, count in counts.items() if name not in ("200", "400", "422", "left"))
    if failed or not counts["200"]:
        complaints.append(f"{failed} requests failed, {counts['200']} were answered")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=0.3, help="share of the time that does not count")
    parser.add_argument("--bound-mib", type=float, default=48.0, help="growth allowed to each process")
    parser.add_argument("--model", help="start a server for this folder")
    parser.add_argument("--serve-flags", default="", help="flags of a server that is started here")
    parser.add_argument("--base-url", help="a server that runs")
    parser.add_argument("--pid", type=int, help="its `penstock serve` process")
    parser.add_argument("--clients", type=int, default=2, help="load processes")
    parser.add_argument("--threads", type=int, default=8, help="connections of each")
    parser.add_argument("--longest", type=int, default=400, help="words of the longest text")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if (options.base_url is None) != (options.pid is None):
        parser.error("--base-url and --pid go together")
    server = start_server(options) if options.base_url is None else None
    try:
        await_ready(options.base_url, server, 120)
        complaints = soak(options, server.pid if server is not None else options.pid)
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    for line in complaints:
        print(f"FAILED: {line}")
    print("no growth" if not complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
