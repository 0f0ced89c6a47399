"""A batch beside interactive load on one server: its effect on the load, and whether kill -9 loses a line.

    python benchmarks/batch_lane.py [--lines 10000] [--rounds 3] [--seconds 20] [--share 0.4] [--save]

The interactive load is single texts, sent in two ways. In the open loop, requests arrive at random times, at
a share of the server's capacity. In the closed loop, each of four connections sends its next request after
the answer. Each round measures both loops without a batch and beside one. Then a batch of `--lines` lines
runs beside the open loop, and all processes of the server are killed with SIGKILL twice and started again.
Every line is compared with a direct answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from http_load import free_port, is_ready
from texts import natural_texts

RESULTS = Path(__file__).parent / "results" / "batch.md"
MAX_CHARS = 100  # per interactive text: about 25 tokens
PATH = "/v1/embeddings"
CUT = {"truncate_prompt_tokens": -1}  # a few texts exceed the model's limit
NUM_CLOSED = 4  # connections of the closed loop


# --- the server ---------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A server in its own session, so that all its processes can be killed at once."""

    folder: Path
    flags: list[str]
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "serve",
            "--port",
            str(self.port),
            "--log-level",
            "warning",
        ]
        self.process = subprocess.Popen(
            [*command, "--batch-folder", str(self.folder), *self.flags], start_new_session=True
        )
        until = time.monotonic() + 300
        while not is_ready(self.port):
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(0.1)

    def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        if number is signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.process.wait()

    def call(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> bytes:
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return bytes(answer.read())

    def json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self.call(method, path, None if body is None else json.dumps(body).encode()))

    def upload(self, content: bytes) -> str:
        parts = [
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + content,
            b"\r\n--b--\r\n",
        ]
        answer = self.call("POST", "/v1/files", b"".join(parts), "multipart/form-data; boundary=b")
        return str(json.loads(answer)["id"])

    def begin(self, file_id: str) -> str:
        body = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
        return str(self.json("POST", "/v1/batches", body)["id"])

    def batch(self, batch_id: str) -> Any:
        return self.json("GET", f"/v1/batches/{batch_id}")

    def wait(self, batch_id: str, *statuses: str, completed: int = 0) -> Any:
        while True:
            found = self.batch(batch_id)
            if found["status"] in statuses and found["request_counts"]["completed"] >= completed:
                return found
            time.sleep(0.2)


def lines_of(texts: list[str]) -> bytes:
    rows = (
        {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": {"input": text, **CUT}}
        for number, text in enumerate(texts)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# --- the interactive load -----------------------------------------------------------------------------------


class Connection:
    """One connection that sends one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, body: bytes) -> bool:
        """Send a request. True if it was answered, False if it was refused."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await self._reader.readexactly(size)
        return b" 200 " in answer.split(b"\r\n", 1)[0]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Load:
    """Interactive requests. Each has a different text."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._texts = [text[:MAX_CHARS] for text in natural_texts(2000, seed=1)]
        self._numbers = count()
        self.num_refused = 0  # with 429: the machine became slower than at the first measurement
        self.num_broken = 0  # without an answer because the server was killed

    def body(self) -> bytes:
        number = next(self._numbers)
        return json.dumps({"input": f"{number} {self._texts[number % len(self._texts)]}"}).encode()

    async def closed(self, seconds: float, num_connections: int) -> list[float]:
        """Latencies of connections that send their next request after each answer."""
        until, found = time.perf_counter() + seconds, list[float]()

        async def client() -> None:
            connection = Connection(self._port)
            while (began := time.perf_counter()) < until:
                if await connection.post(self.body()):
                    found.append(time.perf_counter() - began)
                else:
                    self.num_refused += 1
            connection.close()

        await asyncio.gather(*(client() for _ in range(num_connections)))
        return found

    async def open(self, seconds: float, rate: float, seed: int) -> list[float]:
        """Latencies of requests that arrive at random times, counted from their planned send time."""
        draw, found, free = random.Random(seed), list[float](), list[Connection]()
        tasks: set[asyncio.Task[None]] = set()

        async def one(due_s: float) -> None:
            connection = free.pop() if free else Connection(self._port)
            try:
                was_answered = await connection.post(self.body())
            except (OSError, EOFError):
                self.num_broken += 1
                return
            if was_answered:
                found.append(time.perf_counter() - due_s)
            else:
                self.num_refused += 1
            free.append(connection)

        began = due = time.perf_counter()
        while due - began < seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(one(due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += draw.expovariate(rate)
        await asyncio.gather(*tasks)
        for connection in free:
            connection.close()
        return found


def percentile_ms(seconds: list[float], share: float) -> float:
    return 1000 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


# --- what is measured ---------------------------------------------------------------------------------------


@dataclass
class Round:
    kind: str
    alone: list[float]
    beside: list[float]
    lines_per_s: float

    def figures(self) -> tuple[float, ...]:
        alone, beside = percentile_ms(self.alone, 0.99), percentile_ms(self.beside, 0.99)
        return (
            percentile_ms(self.alone, 0.5),
            percentile_ms(self.beside, 0.5),
            alone,
            beside,
            beside / alone,
            self.lines_per_s,
        )


def measure(server: Server, options: argparse.Namespace) -> tuple[float, list[Round]]:
    """The server's capacity in requests per second, and the rounds."""
    load = Load(server.port)
    asyncio.run(load.closed(3, 16))
    capacity = len(asyncio.run(load.closed(options.seconds / 2, 16))) / (options.seconds / 2)
    rate = options.share * capacity
    print(f"16 connections: {capacity:.0f} requests/s; the open loop sends {rate:.0f}/s", flush=True)
    file_id = server.upload(lines_of(natural_texts(options.lines)))
    rounds = []
    for number in range(options.rounds):
        loads = {
            f"open loop, {rate:.0f}/s": lambda: load.open(options.seconds, rate, number),  # noqa: B023
            f"closed loop, {NUM_CLOSED} connections": lambda: load.closed(options.seconds, NUM_CLOSED),
        }
        for kind, run in loads.items():
            alone = asyncio.run(run())
            batch_id = server.begin(file_id)
            before = server.wait(batch_id, "in_progress")["request_counts"]["completed"]
            began = time.monotonic()
            beside = asyncio.run(run())
            done = server.batch(batch_id)["request_counts"]["completed"] - before
            rounds.append(Round(kind, alone, beside, done / (time.monotonic() - began)))
            server.json("POST", f"/v1/batches/{batch_id}/cancel")
            server.wait(batch_id, "cancelled")
            print(row(kind, rounds[-1].figures()), flush=True)
    if load.num_refused:
        print(f"{load.num_refused} requests were refused with 429", flush=True)
    return capacity, rounds


def row(kind: str, figures: tuple[float, ...]) -> str:
    numbers = [f"{value:.1f}" for value in figures[:4]] + [f"{figures[4]:.2f}", f"{figures[5]:.0f}"]
    return f"| {kind} | {' | '.join(numbers)} |"


def table(rounds: list[Round]) -> Iterator[str]:
    yield "| load | p50 alone | p50 beside | p99 alone | p99 beside | ratio of p99 | lines/s |"
    yield "|---|---|---|---|---|---|---|"
    for kind in dict.fromkeys(each.kind for each in rounds):
        own = [each for each in rounds if each.kind == kind]
        yield from (row(f"{kind}, round {at}", each.figures()) for at, each in enumerate(own, 1))
        merged = [latency for each in own for latency in each.alone]
        beside = [latency for each in own for latency in each.beside]
        rate = statistics.mean(each.lines_per_s for each in own)
        yield row(f"**{kind}, all rounds**", Round(kind, merged, beside, rate).figures())


class SteadyLoad:
    """The open loop in its own thread, paused while the server is down."""

    ROUND_S = 5.0

    def __init__(self, server: Server, rate: float) -> None:
        self._server, self._rate = server, rate
        self._may_run, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.load = Load(server.port)
        self.latencies_s: list[float] = []
        self._may_run.set()
        self._thread.start()

    def _run(self) -> None:
        for number in count():
            self._may_run.wait()
            if self._is_over.is_set():
                return
            self.latencies_s += asyncio.run(self.load.open(self.ROUND_S, self._rate, number))

    def kill_server(self) -> None:
        self._may_run.clear()
        self._server.end(signal.SIGKILL)
        self._server.start()
        self._may_run.set()

    def stop(self) -> None:
        self._is_over.set()
        self._may_run.set()
        self._thread.join()


def kill_and_compare(server: Server, options: argparse.Namespace) -> str:
    """Kill the server in the middle of a batch beside a load, finish the batch, and compare every line with a
    direct answer."""
    texts = natural_texts(options.lines)
    load = Load(server.port)
    capacity = len(asyncio.run(load.closed(options.seconds / 2, 16))) / (options.seconds / 2)
    rate = options.share * capacity
    alone = asyncio.run(load.open(2 * options.seconds, rate, 0))
    began = time.monotonic()
    batch_id = server.begin(server.upload(lines_of(texts)))
    steady = SteadyLoad(server, rate)
    killed_at = []
    for share in (0.25, 0.6):
        server.wait(batch_id, "in_progress", completed=int(share * options.lines))
        steady.kill_server()
        killed_at.append(server.batch(batch_id)["request_counts"]["completed"])
    batch = server.wait(batch_id, "completed", "failed", "expired")
    seconds = time.monotonic() - began
    steady.stop()
    p99_ms = [percentile_ms(each, 0.99) for each in (alone, steady.latencies_s)]
    content = server.call("GET", f"/v1/files/{batch['output_file_id']}/content").splitlines()
    answers: dict[str, list[list[float]]] = {}
    for line in content:
        found = json.loads(line)
        vector = found["response"]["body"]["data"][0]["embedding"]
        answers.setdefault(found["custom_id"], []).append(vector)
    once = sum(len(each) == 1 for each in answers.values())
    worst = 0.0
    for at in range(0, len(texts), 64):
        direct = server.json("POST", PATH, {"input": texts[at : at + 64], **CUT})["data"]
        for number, item in enumerate(direct, at):
            ours = answers[f"line-{number}"][0]
            worst = max(worst, max(abs(a - b) for a, b in zip(ours, item["embedding"], strict=True)))
    return (
        f"{options.lines} lines, killed with SIGKILL at {killed_at[0]} and {killed_at[1]} committed lines: "
        f"status {batch['status']}, {len(content)} lines in the output file, {len(answers)} different ones, "
        f"{once} answered once, error file {batch['error_file_id']}; largest difference of a component from "
        f"a direct answer {worst:.1e}; {seconds:.0f} s in all with two starts of the server. Beside it "
        f"{len(steady.latencies_s)} interactive requests at {rate:.0f}/s: p99 {p99_ms[1]:.1f} ms, against "
        f"{p99_ms[0]:.1f} ms without the batch ({p99_ms[1] / p99_ms[0]:.2f}); {steady.load.num_broken} more "
        "were sent while the server was down."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="duration of each load")
    parser.add_argument("--share", type=float, default=0.4, help="load of the open loop / capacity")
    parser.add_argument("--flags", nargs="*", default=[], help="more flags for the server")
    parser.add_argument("--only", choices=("latency", "kill"))
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options.flags)
        server.start()
        try:
            if options.only != "kill":
                capacity, rounds = measure(server, options)
                parts += [f"16 connections of single texts: {capacity:.0f} requests/s.", "", *table(rounds)]
            if options.only != "latency":
                parts += ["", kill_and_compare(server, options)]
        finally:
            server.end(signal.SIGTERM)
    print("\n".join(parts))
    if options.save:
        about = " ".join((__doc__ or "").split("\n\n")[2].split())
        RESULTS.write_text(f"# A batch beside interactive load\n\n{about}\n\n" + "\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
