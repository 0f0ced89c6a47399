"""The first seconds after `/ready`: requests per second and p99 of every second, beside the steady state.

    python benchmarks/gpu_ramp.py FOLDER [--starts 2] [--seconds 20] [--connections 64] [--tree DIR]

A server with random weights is started several times on one cache folder: the first start has no recorded
shapes, later starts do. Client processes start before the server, and send texts of natural lengths (median
64 tokens, mean about 105, p99 about 560) as soon as it is ready. `--tree` runs the server of another
checkout, for a comparison on the same machine; `--serve-flags "--device null"` needs no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from http_load import free_port, is_ready
from texts import natural_texts

CLIENT_PROCESSES = 6
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 64, 1.0, 900  # a log-normal distribution of lengths
WORDS_PER_TOKEN = 0.68  # measured on the documentation that the words come from
STEADY_SHARE = 0.3  # the last part of a run counts as steady


def texts_of_natural_length(count: int, seed: int) -> list[str]:
    """Texts whose lengths in tokens follow a log-normal distribution."""
    draw = random.Random(seed)
    words = " ".join(natural_texts(1500, seed)).split()
    found, at = [], 0
    for _ in range(count):
        tokens = min(MAX_TOKENS, math.exp(draw.gauss(math.log(MEDIAN_TOKENS), SPREAD)))
        size = max(1, round(tokens * WORDS_PER_TOKEN))
        found.append(" ".join(words[at : at + size]))
        at = (at + size) % (len(words) - MAX_TOKENS)
    return found


class Client(multiprocessing.Process):
    """A process with some of the connections. It sends from `begin` on."""

    def __init__(self, number: int, port: int, options: argparse.Namespace, begin: Event) -> None:
        super().__init__(daemon=True)
        self.number, self.port, self.seconds, self.begin = number, port, options.seconds, begin
        share, rest = divmod(options.connections, CLIENT_PROCESSES)
        self.connections = share + (number < rest)
        self.receiver, self.sender = multiprocessing.Pipe(duplex=False)
        self.is_prepared = multiprocessing.Event()

    def run(self) -> None:
        texts = texts_of_natural_length(4000, self.number)
        bodies = [json.dumps({"input": text, "truncate_prompt_tokens": -1}).encode() for text in texts]
        self.requests = [
            f"POST /v1/embeddings HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
            for body in bodies
        ]
        self.is_prepared.set()
        self.begin.wait()
        self.sender.send(asyncio.run(self._load()))

    async def _load(self) -> tuple[list[tuple[float, float]], list[float]]:
        """(end, seconds) of each answer, and when requests were refused."""
        until, turn = time.monotonic() + self.seconds, 0
        done: list[tuple[float, float]] = []
        refused: list[float] = []

        async def connection() -> None:
            nonlocal turn
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            while (sent := time.monotonic()) < until:
                turn += 1
                writer.write(self.requests[turn % len(self.requests)])
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().split(b"content-length:")[1].split(b"\r\n")[0]
                await reader.readexactly(int(size))
                ended = time.monotonic()
                if head.startswith(b"HTTP/1.1 200"):
                    done.append((ended, ended - sent))
                elif head.startswith(b"HTTP/1.1 503"):  # this API process is not connected to the engine yet
                    refused.append(ended)
                    await asyncio.sleep(0.005)
                else:
                    raise SystemExit(f"the server answered {head[:60]!r}")
            writer.close()

        await asyncio.gather(*(connection() for _ in range(self.connections)))
        return done, refused


@contextmanager
def server(options: argparse.Namespace, port: int, cache: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server without waiting until it is ready."""
    tree = options.tree or str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-m", "penstock", "serve", options.folder, "--port", str(port)]
    command += ["--load-format", "dummy", "--runner", "pooling", "--drain", "2"]
    command += ["--api-server-count", str(options.apis), *shlex.split(options.serve_flags)]
    environment = {**os.environ, "PYTHONPATH": tree, "XDG_CACHE_HOME": cache}
    with Path(cache, "log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, cwd=tree, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def measure(options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """One start: seconds until ready, then (req/s, p99 ms) of every second."""
    port, begin = free_port(), multiprocessing.Event()
    clients = [Client(number, port, options, begin) for number in range(CLIENT_PROCESSES)]
    for client in clients:
        client.start()
    for client in clients:
        client.is_prepared.wait()
    started = time.monotonic()
    with server(options, port, cache) as process:
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() - started > 300:
                raise SystemExit("the server did not start:\n" + Path(cache, "log").read_text()[-3000:])
            time.sleep(0.01)
        ready = time.monotonic()
        begin.set()
        answers = [client.receiver.recv() for client in clients]
        done = [each for accepted, _ in answers for each in accepted]
        refused = [each - ready for _, late in answers for each in late]
    seconds: list[list[float]] = [[] for _ in range(int(options.seconds))]
    for ended, latency in done:
        if (at := int(ended - ready)) < len(seconds):
            seconds[at].append(latency)
    steady = list(chain.from_iterable(seconds[-max(1, int(STEADY_SHARE * len(seconds))) :]))
    return {
        "ready_s": ready - started,
        "num_refused": len(refused),
        "last_refused_s": max(refused, default=0.0),
        "rates": [len(each) for each in seconds],
        "p99_ms": [p99(each) for each in seconds],
        "steady_rate": len(steady) / max(1, int(STEADY_SHARE * len(seconds))),
        "steady_p99_ms": p99(steady),
    }


def p99(latencies: list[float]) -> float:
    return sorted(latencies)[int(0.99 * len(latencies))] * 1000 if latencies else float("nan")


def show(name: str, found: dict[str, Any]) -> None:
    steady = found["steady_rate"]
    share = next((i for i, rate in enumerate(found["rates"]) if rate >= 0.9 * steady), None)
    print(f"{name}: ready after {found['ready_s']:.2f} s; steady {steady:,.0f} req/s, p99 ", end="")
    print(f"{found['steady_p99_ms']:.1f} ms; 90 % from second {'–' if share is None else share + 1} on")
    if found["num_refused"]:
        print(f"  503 {found['num_refused']} times, until {found['last_refused_s']:.3f} s after ready")
    print("  req/s  " + " ".join(f"{rate:6,}" for rate in found["rates"]))
    print("  p99 ms " + " ".join(f"{value:6.1f}" for value in found["p99_ms"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--tree", help="run the server of this checkout; by default that of the script")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--apis", type=int, default=8, help="API processes")
    parser.add_argument("--serve-flags", default="")
    parser.add_argument("--show-log", action="store_true", help="show the engine's start-up log")
    options = parser.parse_args()
    options.folder = str(Path(options.folder).resolve())
    with tempfile.TemporaryDirectory() as cache:
        for start in range(options.starts):
            found = measure(options, cache)
            show(f"{Path(options.folder).name}, start {start + 1}", found)
        if options.show_log:
            lines = Path(cache, "log").read_text(errors="replace").splitlines()
            print("\n".join(line[-220:] for line in lines if "loaded in" in line or "captured" in line))


if __name__ == "__main__":
    main()
