"""Several engines of one model on one machine: scaling, the cost of a killed engine, the effect of affinity.

    python benchmarks/data_parallel.py scaling [--replicas 1 2 4 8] [--step-ms 50] [--rounds 3] [--save FILE]
    python benchmarks/data_parallel.py kill [--model FOLDER] [--seconds 30] [--rounds 1] [--save FILE]
    python benchmarks/data_parallel.py affinity [--replicas 4] [--queries 500] [--save FILE]

`scaling` runs engines on the null device, whose steps take a fixed time, so that CPU cores are not the limit.
`kill` ends a CPU engine with SIGKILL under load, and compares every answer with the idle server's. `affinity`
reranks for repeating queries, and counts how often a vector was cached. Exit code 1: throughput below 0.95 of
linear, more than 1 % of requests failed, or a wrong answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from checked_load import (
    CheckedModel,
    Sample,
    closed_loop,
    command_line,
    complaints_of,
    embed_questions,
    exchange,
    finish,
    heading,
    latency,
    statuses,
    table,
)
from http_load import Running, start
from soak import processes
from texts import natural_texts

from penstock.checkpoint.find import find

ENGINE = "penstock.serving.engine_process"
MIN_EFFICIENCY = 0.95
MAX_FAILED_SHARE = 0.01
WARM_UP_S = 2.0
NAME = "model"


@contextmanager
def serving(flags: Sequence[str], num_engines: int) -> Iterator[Running]:
    """Start a server and wait until all its engines can serve."""
    own = ["--api-server-count", "1", "--served-model-name", NAME, "--data-parallel-size", str(num_engines)]
    with start([*own, *flags]) as server:
        asyncio.run(wait_for_engines(server.port, num_engines))
        yield server


async def engines_ready(port: int) -> int:
    reply = await exchange(port, "GET", "/v1/models")
    return int(json.loads(reply.body)["data"][0]["engines_ready"])


async def wait_for_engines(port: int, count: int) -> None:
    while await engines_ready(port) < count:  # noqa: ASYNC110 (nothing tells this process)
        await asyncio.sleep(0.02)


async def metric(port: int, name: str, label: str) -> dict[str, float]:
    """The values of a metric by one of its labels."""
    text = (await exchange(port, "GET", "/metrics")).body.decode()
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^{name}{{([^}}]*)}} (\S+)$", text, flags=re.MULTILINE):
        key = dict(re.findall(r'(\w+)="([^"]*)"', labels))[label]
        found[key] = found.get(key, 0.0) + float(value)
    return found


# Scaling.


class Counted:
    """Counts the answers of a closed loop between two moments."""

    def __init__(self) -> None:
        self.count = 0
        self.is_over = False


async def client(port: int, message: bytes, counted: Counted) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not counted.is_over:
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if length is None or b" 200 " not in head[:16]:
            raise SystemExit(f"the server answered {head[:80]!r}")
        await reader.readexactly(int(length[1]))
        counted.count += 1
    writer.close()


async def throughput(port: int, clients: int, seconds: float) -> float:
    """Requests per second of a closed loop."""
    body = json.dumps({"input": "one short text", "encoding_format": "base64"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    counted = Counted()
    tasks = [asyncio.ensure_future(client(port, head.encode() + body, counted)) for _ in range(clients)]
    await asyncio.sleep(WARM_UP_S)
    before, began_s = counted.count, time.monotonic()
    await asyncio.sleep(seconds)
    rate = (counted.count - before) / (time.monotonic() - began_s)
    counted.is_over = True
    await asyncio.gather(*tasks)
    return rate


def spread(rows: dict[str, float]) -> str:
    """The smallest and the largest share of any engine, relative to an equal share."""
    if not rows:
        return "–"
    equal = sum(rows.values()) / len(rows)
    return f"{min(rows.values()) / equal:.2f} to {max(rows.values()) / equal:.2f}"


def scaling(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    rates: dict[int, list[float]] = {size: [] for size in options.replicas}
    spreads: dict[int, str] = {}
    flags = ["--device", "null", "--null-step-ms", str(options.step_ms)]
    flags += ["--max-num-seqs", str(options.rows), "--no-share-identical"]
    for _ in range(options.rounds):
        for size in options.replicas:
            with serving(flags, size) as server:
                clients = size * options.rows * options.depth
                rates[size].append(asyncio.run(throughput(server.port, clients, options.seconds)))
                spreads[size] = spread(asyncio.run(metric(server.port, "penstock_step_rows_total", "engine")))
    medians = {size: statistics.median(found) for size, found in rates.items()}
    one = medians[min(medians)] / min(medians)
    ceiling = options.rows / options.step_ms * 1000
    rows = [
        [
            size,
            f"{median:,.1f}",
            f"{median / (size * one):.3f}",
            f"{median / (size * ceiling):.3f}",
            spreads[size],
            " ".join(f"{each:,.0f}" for each in rates[size]),
        ]
        for size, median in medians.items()
    ]
    complaints = [
        f"{size} engines reach {median / (size * one):.3f} of linear"
        for size, median in medians.items()
        if median / (size * one) < MIN_EFFICIENCY
    ]
    head = ["engines", "requests/s", "of linear", "of what steps allow", "share of an engine", "rounds"]
    words = (
        f"Steps of {options.step_ms:g} ms and at most {options.rows} rows; one text a request; "
        f"{options.rows * options.depth} clients for each engine; {options.seconds:g} s after a warm-up of "
        f"{WARM_UP_S:g} s; median of {options.rounds} rounds."
    )
    return [words, table(head, rows)], complaints


# A killed engine.


async def under_load(
    server: Running, options: argparse.Namespace
) -> tuple[list[Sample], float, float, list[dict[str, float]]]:
    """Returns the samples, the time of the kill, how long the engine was gone, and each engine's rows before
    and after."""
    model = CheckedModel(NAME, server.port, embed_questions(NAME, options.questions), tolerance=1e-5)
    await model.learn()
    began = await metric(server.port, "penstock_step_rows_total", "engine")
    until_s = time.monotonic() + options.seconds
    load = asyncio.ensure_future(closed_loop(model, options.clients, lambda: time.monotonic() >= until_s))
    await asyncio.sleep(options.seconds / 3)
    at_kill = await metric(server.port, "penstock_step_rows_total", "engine")
    victim = next(pid for pid, module in processes(server.pid) if module == ENGINE)
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    while await engines_ready(server.port) == 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await wait_for_engines(server.port, 2)
    gone_s = time.monotonic() - killed_s
    await load
    ended = await metric(server.port, "penstock_step_rows_total", "engine")
    counts = [
        {engine: later[engine] - earlier.get(engine, 0.0) for engine in sorted(later)}
        for earlier, later in ((began, at_kill), (at_kill, ended))
    ]
    return model.taken(), killed_s, gone_s, counts


def kill(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    rows, complaints = [], []
    for number in range(options.rounds):
        with serving(["--model", str(find(options.model)), "--device", "cpu"], 2) as server:
            samples, killed_s, gone_s, counts = asyncio.run(under_load(server, options))
            retried = asyncio.run(metric(server.port, "penstock_retried_requests_total", "model"))
        failed = [sample for sample in samples if sample.status != 200]
        wrong = [sample for sample in samples if sample.complaint and sample.status == 200]
        hit = [sample for sample in samples if sample.sent_s <= killed_s <= sample.answered_s]
        complaints += complaints_of(f"round {number}", samples)
        if len(failed) > MAX_FAILED_SHARE * len(samples):
            complaints.append(f"round {number}: {len(failed)} of {len(samples)} requests failed")
        before = [sample for sample in samples if sample.answered_s < killed_s]
        after = [sample for sample in samples if sample.sent_s > killed_s]
        rows.append(
            [
                number,
                f"{len(samples):,}",
                f"{len(failed)} ({len(failed) / len(samples):.2%})",
                len(wrong),
                f"{len(hit)} / {sum(retried.values()):.0f}",
                f"{gone_s:.1f}",
                latency(before),
                latency(after),
                " · ".join(", ".join(f"{count:,.0f}" for count in each.values()) for each in counts),
                statuses(samples),
            ]
        )
    head = ["round", "requests", "failed", "wrong", "in flight / retried", "s until both serve"]
    head += ["p50 / p99 / max ms before", "after the kill", "rows by engine, before · after", "statuses"]
    words = (
        f"Two engines on the CPU, {options.clients} clients in a closed loop for {options.seconds:g} s, one "
        "text a request; every answer is compared with that of the idle server; one engine gets SIGKILL "
        "after a third of the time."
    )
    return [words, table(head, rows)], complaints


# Affinity.


async def rerank(port: int, bodies: Sequence[bytes], clients: int) -> float:
    """Seconds until all bodies are answered."""
    waiting = iter(bodies)

    async def one_client() -> None:
        for body in waiting:
            reply = await exchange(port, "POST", "/rerank", body)
            if reply.status != 200:
                raise SystemExit(f"the server answered {reply.status}: {reply.body[:200]!r}")

    began_s = time.monotonic()
    await asyncio.gather(*(one_client() for _ in range(clients)))
    return time.monotonic() - began_s


def affinity(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    (size,) = options.replicas
    chance = random.Random(1)
    texts = [text[:200] for text in natural_texts(options.queries + 64)]
    weights = [1 / (rank + 1) for rank in range(options.queries)]  # few queries are frequent
    asked = chance.choices(range(options.queries), weights, k=options.requests)
    bodies = [
        json.dumps(
            {
                "query": " ".join(texts[64 + query].split()[:8]) + f" {query}",
                "documents": chance.sample(texts[:64], 4),
            }
        ).encode()
        for query in asked
    ]
    rows, shares = [], []
    flags = ["--device", "null", "--null-step-ms", str(options.step_ms)]
    for words, flag in (("on", "--engine-affinity"), ("off", "--no-engine-affinity")):
        with serving([*flags, flag], size) as server:
            seconds = asyncio.run(rerank(server.port, bodies, options.clients))
            hits = asyncio.run(metric(server.port, "penstock_score_cache_hits", "kind"))["query"]
            lookups = asyncio.run(metric(server.port, "penstock_score_cache_asked", "kind"))["query"]
            balance = spread(asyncio.run(metric(server.port, "penstock_step_rows_total", "engine")))
        shares.append(hits / lookups)
        rows.append([words, f"{hits / lookups:.1%}", f"{len(bodies) / seconds:,.0f}", balance])
    most = 1 - len(set(asked)) / len(asked)
    rows.append(["one engine that keeps all", f"{most:.1%}", "–", "–"])
    said = (
        f"{size} engines of the null device, steps of {options.step_ms:g} ms, {options.requests:,} reranks "
        f"for {options.queries:,} queries (the n-th is asked 1/n as often as the first), {options.clients} "
        "clients."
    )
    complaints = [] if shares[0] > shares[1] else ["affinity finds no more cached queries than none"]
    head = ["affinity", "queries found in the cache", "requests/s", "rows of an engine, relative"]
    return [said, table(head, rows)], complaints


PARTS = {"scaling": scaling, "kill": kill, "affinity": affinity}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--replicas", type=int, nargs="+", help="numbers of engines; default 1 2 4 8, for affinity 4"
    )
    parser.add_argument(
        "--step-ms", type=float, help="time of a step on the null device; default 50, for affinity 5"
    )
    parser.add_argument("--rows", type=int, default=4, help="for scaling: maximum rows per step")
    parser.add_argument("--depth", type=int, default=3, help="steps of work queued at each engine")
    parser.add_argument("--seconds", type=float, help="duration of a measurement; default 10, for kill 30")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", help="for kill: model folder; by default the bundled model")
    parser.add_argument("--clients", type=int, default=16, help="connections, for kill and affinity")
    parser.add_argument("--questions", type=int, default=64, help="for kill: number of different texts")
    parser.add_argument("--queries", type=int, default=500, help="for affinity: number of different queries")
    parser.add_argument("--requests", type=int, default=3000, help="for affinity: number of requests")
    parser.add_argument("--save", type=Path, help="append the report to this file")
    options = parser.parse_args()
    options.replicas = options.replicas or ([4] if options.part == "affinity" else [1, 2, 4, 8])
    options.step_ms = options.step_ms or (5.0 if options.part == "affinity" else 50.0)
    options.seconds = options.seconds or (30.0 if options.part == "kill" else 10.0)
    beginning = list(heading(f"Data parallel: {options.part}", command_line()))
    parts, complaints = PARTS[options.part](options)
    return finish([*beginning, *parts], complaints, options.save)


if __name__ == "__main__":
    sys.exit(main())
