"""Run a mixed load for minutes; fail if the memory of a server process or of the device keeps growing.

    python benchmarks/soak.py --seconds 300 --model FOLDER --serve-flags "--load-format dummy"
    python benchmarks/soak.py --seconds 300 --base-url http://127.0.0.1:8000 --pid PID

The first form starts a server on loopback and stops it. The second measures a running server, given the id of
its `penstock serve` process. The load mixes all that the model supports: embeddings, token vectors, classes,
rankings and completions, streamed or not; short and long texts, one and many, both encodings, invalid bodies
and clients that disconnect. Exit code 1: memory grew by more than the bound after the warm-up, a request
failed, or a process was lost.
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
from typing import Any
from urllib.parse import urlsplit

WORDS = ("water", "river", "pipe", "valve", "pump", "gate", "flow", "turbine", "basin", "weir", "sluice")
DEVICE = "device"
GRAPHS = "graphs"
GRAPH_MIB = 2.0  # per captured graph, on the host and on the device


Request = tuple[str, str, dict[str, Any]]  # kind, path, fields


def texts(draw: random.Random, count: int, most: int) -> list[str]:
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for _ in range(count)]


def request_of(draw: random.Random, kind: str, longest: int) -> Request:
    """A random request of a kind: short or long texts, one or many."""
    most = longest if draw.random() < 0.2 else min(longest, 40)
    many = draw.choice((1, 1, 1, 2, 8, 64))
    encoding = {"encoding_format": draw.choice(("float", "base64")), "truncate_prompt_tokens": -1}
    if kind == "embed":
        return kind, "/v1/embeddings", {"input": texts(draw, many, most)} | encoding
    if kind == "tokens":
        return kind, "/pooling", {"task": "token_embed", "input": texts(draw, min(many, 8), most)} | encoding
    if kind == "classify":
        return kind, "/classify", {"input": texts(draw, min(many, 8), most)}
    if kind == "rerank":
        query, *documents = texts(draw, 1 + min(many, 16), min(most, longest // 2))
        return kind, "/rerank", {"query": query, "documents": documents}
    asked = {"prompt": texts(draw, 1, most)[0], "max_tokens": draw.randint(1, 48)}
    asked |= {"temperature": draw.choice((0, 0.8)), "stream": draw.random() < 0.5}
    return kind, "/v1/completions", asked


KINDS = ("embed", "tokens", "classify", "rerank", "generate")


def offered(url: str, model: str) -> list[str]:
    """The kinds of requests that the server supports, found by trying them."""
    draw, found = random.Random(0), []
    for kind in KINDS:
        _, path, fields = request_of(draw, kind, 16)
        if ask(url, "POST", path, json.dumps({"model": model} | fields).encode())[0] == 200:
            found.append(kind)
    return found


def client(
    url: str, model: str, kinds: list[str], longest: int, seed: int, stop: Event, counts: Counter[str]
) -> None:
    """Send requests one after another; sometimes disconnect early, or send an invalid request."""
    draw, address = random.Random(seed), urlsplit(url)
    connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=120)
    headers = {"Content-Type": "application/json"}
    weights = [2 if kind == "embed" else 1 for kind in kinds]
    while not stop.is_set():
        kind, path, fields = request_of(draw, draw.choices(kinds, weights)[0], longest)
        fields = {"model": model, "unknown": True} if draw.random() < 1 / 30 else {"model": model} | fields
        try:
            connection.request("POST", path, json.dumps(fields).encode(), headers)
            if draw.random() < 0.02:
                connection.close()
                counts["left"] += 1
                continue
            response = connection.getresponse()
            content = response.read()
            counts[str(response.status)] += 1
            if response.status == 200:
                counts[kind] += 1
                if draw.random() < 0.02 and not right(kind, content, fields):
                    counts["wrong"] += 1
        except (OSError, HTTPException) as error:
            counts[type(error).__name__] += 1
            connection.close()
            time.sleep(0.1)


def right(kind: str, content: bytes, fields: dict[str, Any]) -> bool:
    """Whether a response is complete and its numbers are finite."""
    if kind == "generate":
        return b"[DONE]" in content if fields["stream"] else len(json.loads(content)["choices"]) == 1
    if kind == "rerank":
        scores = [row["relevance_score"] for row in json.loads(content)["results"]]
        return len(scores) == len(fields["documents"]) and all(map(math.isfinite, scores))
    data = json.loads(content)["data"]
    if len(data) != len(fields["input"]):
        return False
    return kind != "embed" or all(
        len(row) > 0 and all(map(math.isfinite, row)) for row in (numbers(each["embedding"]) for each in data)
    )


def numbers(value: str | list[float]) -> array[float] | list[float]:
    return array("f", base64.b64decode(value)) if isinstance(value, str) else value


def load_process(
    url: str,
    model: str,
    kinds: list[str],
    longest: int,
    threads: int,
    seed: int,
    stop: Event,
    out: multiprocessing.Queue[Counter[str]],
) -> None:
    counts: list[Counter[str]] = [Counter() for _ in range(threads)]
    workers = [
        threading.Thread(target=client, args=(url, model, kinds, longest, seed * 1000 + i, stop, counts[i]))
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    out.put(sum(counts, Counter()))


def processes(pid: int) -> Iterator[tuple[int, str]]:
    """(pid, module) of a process and its descendants."""
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
    """Memory in use on the first device by all processes; None without a device."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used / 2**20
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return float(found[0]) if found else None


def graphs_of(url: str) -> float:
    """The number of CUDA graphs that the engine has captured. They use memory."""
    lines = ask(url, "GET", "/metrics")[1].decode(errors="replace").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("penstock_graphs{"))


def sample(pid: int, url: str) -> dict[str, float]:
    found = {GRAPHS: graphs_of(url)}
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


def ask(url: str, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def await_ready(url: str, server: subprocess.Popen[bytes] | None, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while ask(url, "GET", "/ready")[0] != 200:
        if server is not None and server.poll() is not None:
            raise SystemExit(f"the server ended with status {server.returncode}")
        if time.monotonic() > until:
            raise SystemExit(f"{url} is not ready after {patience_s:g} s")
        time.sleep(0.1)


def report(samples: list[tuple[float, dict[str, float]]], options: argparse.Namespace) -> list[str]:
    """Print a line for each process; return the problems. Memory is a median over a tenth of the time."""
    complaints: list[str] = []
    after = [found for at, found in samples if at >= options.warm_up]
    size = max(3, len(after) // 10)
    graphs = after[-1][GRAPHS] - after[0][GRAPHS]
    if graphs:
        print(f"\n{graphs:.0f} graphs came after the warm-up: {GRAPH_MIB:g} MiB more allowed for each")
    _curve(samples)
    print(f"\n| {'process':<34} | at first | warm MiB | end MiB | peak MiB | growth MiB | allowed |")
    print("|---|---|---|---|---|---|---|")
    for name in after[0]:
        if name == GRAPHS:
            continue
        if any(name not in found for found in after):
            complaints.append(f"{name} was lost")
            continue
        bound = options.device_bound_mib if name == DEVICE else options.bound_mib
        if name == DEVICE or "engine" in name:
            bound += graphs * GRAPH_MIB
        values = [found[name] for found in after]
        warm, end = statistics.median(values[:size]), statistics.median(values[-size:])
        first = f"{samples[0][1].get(name, 0.0):,.0f}"
        grown = f"{end - warm:+,.1f} | {bound:g}"
        print(f"| {name:<34} | {first} | {warm:,.0f} | {end:,.0f} | {max(values):,.0f} | {grown} |")
        if end - warm > bound:
            complaints.append(f"{name} grew by {end - warm:,.1f} MiB; {bound:g} are allowed")
    new = {name for found in after for name in found} - set(after[0])
    return complaints + [f"{name} is new: something was restarted" for name in sorted(new)]


def _curve(samples: list[tuple[float, dict[str, float]]]) -> None:
    """Print the memory of engine and device over time, one point per half minute."""
    names = [name for name in samples[0][1] if name in (GRAPHS, DEVICE) or "engine" in name]
    points = [found for number, (_, found) in enumerate(samples) if number % max(1, len(samples) // 10) == 0]
    print()
    for name in names:
        print(f"{name}: " + " ".join(f"{found.get(name, 0):,.0f}" for found in points))


def soak(options: argparse.Namespace, pid: int) -> list[str]:
    model = json.loads(ask(options.base_url, "GET", "/v1/models")[1])["data"][0]["id"]
    answers = offered(options.base_url, model)
    kinds = [kind for kind in answers if kind in options.only.split(",")]
    if not kinds:
        return [f"nothing to ask: the server answers {', '.join(answers) or 'nothing'}"]
    context = multiprocessing.get_context("spawn")
    stop, out = context.Event(), context.Queue()
    fixed = (options.base_url, model, kinds, options.longest, options.threads)
    clients = [
        context.Process(target=load_process, args=(*fixed, seed, stop, out), daemon=True)
        for seed in range(options.clients)
    ]
    began = time.monotonic()
    samples = [(0.0, sample(pid, options.base_url))]
    for one in clients:
        one.start()
    try:
        while (at := time.monotonic() - began) < options.seconds:
            time.sleep(options.every)
            samples.append((at, sample(pid, options.base_url)))
            if options.verbose:
                print(f"{at:6.0f} s  " + "  ".join(f"{v:,.0f}" for v in samples[-1][1].values()), flush=True)
    finally:
        stop.set()
    counts = sum((out.get(timeout=150) for _ in clients), Counter[str]())
    for one in clients:
        one.join(10)
    took = time.monotonic() - began
    answered = ", ".join(f"{kind} {counts.pop(kind, 0):,}" for kind in kinds)
    others = ", ".join(f"{name}: {count:,}" for name, count in sorted(counts.items()))
    complaints = report(samples, options)
    failed = sum(count for name, count in counts.items() if name not in ("200", "400", "422", "left"))
    if failed or not counts["200"]:
        complaints.append(f"{failed} requests failed or were wrong, {counts['200']} were answered")
    print(
        f"\n{took:.0f} s, {counts['200']:,} requests answered ({counts['200'] / took:,.0f}/s: {answered}), "
        f"{failed} errors ({others}); growth is counted from {options.warm_up:g} s on"
    )
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--minutes", type=float, help="duration in minutes")
    parser.add_argument(
        "--warm-up", type=float, help="seconds before memory counts; default 60, or 0.4 of a run under 150 s"
    )
    parser.add_argument("--bound-mib", type=float, default=48.0, help="allowed growth of each process")
    parser.add_argument(
        "--device-bound-mib",
        type=float,
        default=256.0,
        help="allowed growth of device memory; graphs add to it",
    )
    parser.add_argument("--model", help="start a server for this model folder")
    parser.add_argument("--serve-flags", default="", help="more flags for a server started with --model")
    parser.add_argument("--base-url", help="address of a running server")
    parser.add_argument("--pid", type=int, help="process id of its `penstock serve`")
    parser.add_argument("--clients", type=int, default=2, help="load processes")
    parser.add_argument("--threads", type=int, default=8, help="connections per load process")
    parser.add_argument("--longest", type=int, default=400, help="words in the longest text")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of requests, separated by commas")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    if options.minutes is not None:
        options.seconds = options.minutes * 60
    if options.warm_up is None:
        options.warm_up = 60.0 if options.seconds >= 150 else 0.4 * options.seconds
    if (options.base_url is None) != (options.pid is None):
        parser.error("--base-url and --pid go together")
    server = start_server(options) if options.base_url is None else None
    try:
        await_ready(options.base_url, server, 300)
        complaints = soak(options, server.pid if server is not None else options.pid)
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    for line in complaints:
        print(f"FAILED: {line}")
    print("FAILED" if complaints else "passed: no growth, no errors")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
