"""Compare two checkouts on one machine: offline embedding, the API's request path, and start-up.

    python benchmarks/before_after.py BEFORE [AFTER] [--rounds 15] [--starts 5] [--texts 600]

BEFORE and AFTER are checkouts; AFTER is this one by default. A worker process of each tree stays alive and
measures the same work on request. The trees alternate, so that a slow moment of the machine affects both.
Figures are each tree's best round, because other load can only add time. Ratios are above 1 where AFTER is
faster.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from urllib.request import urlopen

WORKER = """
import asyncio, gc, json, sys, time
sys.path.insert(0, "benchmarks")
import numpy as np, uvloop
import request_path
from penstock import Engine
from texts import natural_texts

engine = None  # opened for the last stage: its threads would share the cores with the others
texts = natural_texts(int(sys.argv[1]))
app = request_path.make_app(request_path.NullClient(64, 768))
rng = np.random.default_rng(0)
bodies = {
    "ids": {"input": rng.integers(1000, 20000, 32).tolist(), "encoding_format": "base64"},
    "text": {"input": " ".join(["water"] * 28), "encoding_format": "base64"},
}

async def burst(body, count, concurrent):
    async def client():
        for _ in range(count // concurrent):
            await request_path.post(app, "/v1/embeddings", body)
    await asyncio.gather(*(client() for _ in range(concurrent)))

def measure(name):
    global engine
    if name == "embed":
        if engine is None:
            engine = Engine(device="cpu", threads=2)
            engine.embed(texts, truncate_prompt_tokens=-1)
        began = time.perf_counter()
        engine.embed(texts, truncate_prompt_tokens=-1)
        return (time.perf_counter() - began) / len(texts)
    kind, concurrent = name.split()
    body = json.dumps(bodies[kind]).encode()
    began = time.process_time()
    uvloop.run(burst(body, 640, int(concurrent)))
    return (time.process_time() - began) / 640

for name in ("ids 1", "text 64"):
    measure(name)
gc.collect()
gc.freeze()  # as an API process does before it serves
print("ready", flush=True)
for line in sys.stdin:
    print(measure(line.strip()), flush=True)
"""
STAGES = {
    "ids 1": "API process, token ids, 1 at a time, requests/s of CPU time",
    "ids 64": "API process, token ids, 64 at a time",
    "text 1": "API process, text, 1 at a time",
    "text 64": "API process, text, 64 at a time",
    "embed": "`Engine.embed` on 2 CPU threads, texts/s",
}


class Worker:
    def __init__(self, tree: Path, texts: int) -> None:
        command = [sys.executable, "-c", WORKER, str(texts)]
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, name: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(self.read())


def environment(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree)}


def start_seconds(tree: Path) -> float:
    """Seconds from the command `penstock serve` with the default model until it is ready."""
    with socket.socket() as probe:  # a new port each time: an earlier server may still answer at its own
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "serve", "--device", "cpu", "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level", "error"], cwd=tree, env=environment(tree))
    try:
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return time.perf_counter() - began
            except OSError:
                time.sleep(0.01)
    finally:
        server.terminate()
        server.wait(30)


def row(title: str, before: list[float], after: list[float], *, is_rate: bool) -> str:
    best = min(before), min(after)
    shown = [1 / each if is_rate else each for each in best]
    digits = 0 if is_rate else 2
    return f"| {title} | {shown[0]:,.{digits}f} | {shown[1]:,.{digits}f} | {best[0] / best[1]:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--texts", type=int, default=600)
    options = parser.parse_args()
    trees = [options.before.resolve(), options.after.resolve()]
    print(f"{datetime.now():%Y-%m-%d}, {os.cpu_count()} cores, {options.rounds} rounds in turn\n")
    print("| | before | after | ratio |\n|---|---|---|---|")
    workers = [Worker(tree, options.texts) for tree in trees]
    for worker in workers:
        if worker.read() != "ready":
            raise SystemExit("a worker did not start")
    for name, title in STAGES.items():
        spent: tuple[list[float], list[float]] = ([], [])
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                spent[which].append(workers[which].measure(name))
        print(row(title, *spent, is_rate=True), flush=True)
    for worker in workers:
        worker.process.kill()
    starts: tuple[list[float], list[float]] = ([], [])
    for number in range(options.starts):
        for which in (0, 1) if number % 2 else (1, 0):
            starts[which].append(start_seconds(trees[which]))
    print(row("start until ready, s", *starts, is_rate=False))


if __name__ == "__main__":
    main()
