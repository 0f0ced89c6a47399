"""A server under more load than it can serve: goodput, latency of accepted requests, latency of refusals.

    python benchmarks/overload.py [--seconds 30] [--rows 64] [--times 4] [--flags="--max-queue-seconds 5"]

First a few clients that wait for their answers measure the capacity. Then requests arrive at random at
`--times` that rate, whether answers come or not. No two requests share a text. Requests answered after the
end of the arrivals count for latency, not for goodput.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator

from http_load import start
from texts import natural_texts

MAX_CHARS = 100  # per text: about 25 tokens
CLIENTS = 4  # while the capacity is measured


def bodies(rows: int, name: str) -> Iterator[bytes]:
    texts = [text[:MAX_CHARS] for text in natural_texts(2048)]
    for number in itertools.count():
        own = (texts[(number * rows + at) % len(texts)] for at in range(rows))
        fields = {"input": [f"{name}{number} {text}" for text in own], "encoding_format": "base64"}
        body = json.dumps(fields).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        yield head.encode() + b"Connection: close\r\n\r\n" + body


async def post(port: int, message: bytes) -> tuple[int, float, str]:
    """Send a request on its own connection. Returns status, seconds and Retry-After."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(message)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    while await reader.read(1 << 16):
        pass
    writer.close()
    retry = next((line.split(":")[1].strip() for line in head.split("\r\n") if "retry-after" in line), "")
    return int(head.split(" ", 2)[1]), time.perf_counter() - began, retry


async def capacity(port: int, rows: int, seconds: float) -> float:
    """Requests per second, measured with a few clients that wait for their answers."""
    waiting, until, done = bodies(rows, "c"), time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < until:
            status, _, _ = await post(port, next(waiting))
            done += status == 200 and time.perf_counter() < until

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return done / seconds


async def overload(port: int, rows: int, rate: float, seconds: float) -> list[tuple[float, int, float, str]]:
    """Returns each request's arrival time, status, seconds and Retry-After."""
    rng, waiting = random.Random(0), bodies(rows, "o")
    running: list[asyncio.Task[tuple[float, int, float, str]]] = []
    began = time.perf_counter()

    async def one(message: bytes) -> tuple[float, int, float, str]:
        at = time.perf_counter() - began
        return at, *(await post(port, message))

    while time.perf_counter() - began < seconds:
        running.append(asyncio.ensure_future(one(next(waiting))))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*running))


def percentiles_ms(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    if not ordered:
        return "– / –"
    p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"{1000 * p50:.0f} / {1000 * p99:.0f}"


async def measure(port: int, options: argparse.Namespace) -> None:
    rows = options.rows
    await capacity(port, rows, 3)  # warm up
    before = await capacity(port, rows, options.seconds / 2)
    answers = await overload(port, rows, options.times * before, options.seconds)
    after = await capacity(port, rows, options.seconds / 2)
    in_time = sum(status == 200 and at + took <= options.seconds for at, status, took, _ in answers)
    print("statuses:", dict(Counter(status for _, status, _, _ in answers)))
    print("Retry-After:", dict(Counter(retry for _, _, _, retry in answers if retry)))
    print("| capacity before, after (rows/s) | goodput (rows/s) | accepted p50 / p99 ms | 429 p50 / p99 ms |")
    print("|---|---|---|---|")
    print(
        f"| {before * rows:.0f}, {after * rows:.0f} | {in_time * rows / options.seconds:.0f} "
        f"| {percentiles_ms([took for _, status, took, _ in answers if status == 200])} "
        f"| {percentiles_ms([took for _, status, took, _ in answers if status == 429])} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--times", type=float, default=4)
    parser.add_argument("--flags", default="", help="more flags for the server")
    options = parser.parse_args()
    with start(["--device", "cpu", *options.flags.split()]) as server:
        asyncio.run(measure(server.port, options))


if __name__ == "__main__":
    main()
