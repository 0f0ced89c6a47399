"""Check a server's promises under twice the load that it can serve, for minutes, while engines are killed.

    python benchmarks/overload_soak.py [--seconds 180] [--times 2] [--kills 2] [--model FOLDER] [--save FILE]

First a few clients that wait for their answers measure the capacity. Then requests arrive at random at
`--times` that rate, whether answers come or not, and the engine is killed at regular intervals. Exit code 1:
a status other than 200, 429 and 503; an answer that is wrong, missing, sent twice or for another request; 503
while the engine serves; no correct answer within `--max-recovery` seconds of a kill; the server's counts of
answers differ from the client's; or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from checked_load import (
    CheckedModel,
    Sample,
    command_line,
    complaints_of,
    embed_questions,
    engine_pids,
    exchange,
    finish,
    for_seconds,
    heading,
    latency,
    rate,
    statuses,
    table,
)
from http_load import Running, start
from process_memory import Memory, MemoryRow, memory_complaints, memory_table

CLIENTS = 4  # while the capacity is measured
NUM_QUESTIONS = 64
_COUNTED = re.compile(r'^penstock_requests_total\{([^}]*route="/v1/embeddings"[^}]*)\} (\S+)$', re.MULTILINE)


@dataclass
class Kill:
    at_s: float
    recovered_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.recovered_s - self.at_s if self.recovered_s else float("inf")


async def counted(port: int) -> Counter[int]:
    """The server's counts of answers to embedding requests, by status."""
    text = (await exchange(port, "GET", "/metrics")).body.decode()
    counts: Counter[int] = Counter()
    for labels, value in _COUNTED.findall(text):
        if status := re.search(r'status="(\d+)"', labels):
            counts[int(status[1])] += int(float(value))
    return counts


async def arrivals(model: CheckedModel, requests_per_s: float, seconds: float) -> None:
    """Send requests at random times, whether answers come or not; return when all have been answered."""
    draw, until_s = random.Random(0), time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until_s:
            group.create_task(model.ask())
            await asyncio.sleep(draw.expovariate(requests_per_s))


async def kill_engines(server: Running, kills: list[Kill], count: int, seconds: float) -> None:
    for _ in range(count):
        await asyncio.sleep(seconds / (count + 1))
        engines = engine_pids(server.pid)
        kills.append(Kill(time.monotonic()))
        for pid in engines.values():
            os.kill(pid, signal.SIGKILL)


def recoveries(samples: list[Sample], kills: list[Kill]) -> None:
    """Record for each kill when a request sent after it was first answered correctly."""
    for kill in kills:
        after = [each.answered_s for each in samples if each.is_right and each.sent_s >= kill.at_s]
        kill.recovered_s = min(after, default=0.0)


def late_refusals(samples: list[Sample], kills: list[Kill]) -> list[Sample]:
    """The 503 answers that no kill explains: the request was not in flight while an engine was gone."""
    return [
        each
        for each in samples
        if each.status == 503
        and not any(kill.at_s <= each.answered_s and each.sent_s <= kill.recovered_s for kill in kills)
    ]


async def soak(server: Running, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The parts of the report, and what failed."""
    model = CheckedModel(
        options.name, server.port, embed_questions(options.name, NUM_QUESTIONS, options.rows)
    )
    await model.learn()
    await for_seconds(model, CLIENTS, options.warm_up)
    capacity = rate(await for_seconds(model, CLIENTS, options.capacity_seconds), options.capacity_seconds)
    before, began_s, kills = await counted(server.port), time.monotonic(), list[Kill]()
    memory = Memory(server.pid)
    watcher = asyncio.create_task(memory.watch())
    async with asyncio.TaskGroup() as group:
        group.create_task(arrivals(model, options.times * capacity, options.seconds))
        group.create_task(kill_engines(server, kills, options.kills, options.seconds))
    watcher.cancel()
    samples = model.taken()
    await asyncio.sleep(1.0)  # the server publishes its counts with a delay
    after = await counted(server.port)
    recoveries(samples, kills)
    rows = memory.rows(began_s + options.seconds / 10)
    complaints = complaints_of("answers", samples) + memory_complaints(rows, options.bound_mib)
    if not any(sample.is_right for sample in samples):
        complaints.append("no request was answered with 200")
    for number, kill in enumerate(kills, start=1):
        if kill.seconds > options.max_recovery:
            complaints.append(f"kill {number}: no right answer for {kill.seconds:.1f} s")
    if late := late_refusals(samples, kills):
        complaints.append(f"{len(late)} requests got 503 while the engine served")
    sent = Counter(sample.status for sample in samples)
    if (server_counts := after - before) != sent:
        complaints.append(f"the server counts {dict(server_counts)}, the client {dict(sent)}")
    return report(samples, capacity, kills, rows, options), complaints


def report(
    samples: list[Sample],
    capacity: float,
    kills: list[Kill],
    rows: list[MemoryRow],
    options: argparse.Namespace,
) -> list[str]:
    by_status = {status: [each for each in samples if each.status == status] for status in (200, 429, 503)}
    refused = [
        latency([Sample(each.sent_s, each.answered_s, 200) for each in by_status[status]])
        for status in (429, 503)
    ]
    seconds = options.seconds
    return [
        f"{len(samples):,} requests of {options.rows} texts in {seconds:g} s: {statuses(samples)}.",
        table(
            ["capacity requests/s", "sent/s", "answered/s", "200 p50 / p99 / max ms", "429 ms", "503 ms"],
            [
                [
                    f"{capacity:.1f}",
                    f"{len(samples) / seconds:.1f}",
                    f"{rate(samples, seconds):.1f}",
                    latency(samples),
                    *refused,
                ]
            ],
        ),
        table(
            ["engine kill", "until the next right answer, s"],
            [[number, f"{kill.seconds:.2f}"] for number, kill in enumerate(kills, start=1)],
        ),
        memory_table(rows),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--times", type=float, default=2, help="load / capacity")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="texts per request")
    parser.add_argument(
        "--max-recovery",
        type=float,
        default=10,
        help="allowed seconds until the next right answer",
    )
    parser.add_argument("--bound-mib", type=float, default=48, help="allowed growth of each process")
    parser.add_argument("--warm-up", type=float, default=5, help="seconds before measurements start")
    parser.add_argument("--capacity-seconds", type=float, default=15)
    parser.add_argument("--model", help="folder of an embedding model; by default the default model")
    parser.add_argument("--name", default="model", help=argparse.SUPPRESS)
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--save", type=Path, help="append the report to this file")
    options = parser.parse_args()
    flags = [*([options.model] if options.model else []), "--served-model-name", options.name]
    flags += ["--device", "cpu", "--api-server-count", "1", *options.flags.split()]
    parts = list(heading("Twice the capacity, with engine kills", command_line()))
    with start(flags) as server:
        report_parts, complaints = asyncio.run(soak(server, options))
    return finish(parts + report_parts, complaints, options.save)


if __name__ == "__main__":
    sys.exit(main())
