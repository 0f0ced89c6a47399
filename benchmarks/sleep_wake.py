"""Two models in one server: one serves a steady load while the other repeatedly sleeps and wakes.

    python benchmarks/sleep_wake.py [--times 200] [--steady FOLDER] [--sleeper FOLDER] [--save FILE]
    python benchmarks/sleep_wake.py --device cuda --sleeper FOLDER --task generate

After each wake the sleeper answers a request; every fourth wake is caused by the request itself. Exit code 1:
an error or a wrong answer of either model, a model in the wrong state, or memory that grows after the
warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checked_load import (
    TASKS,
    CheckedModel,
    Sample,
    closed_loop,
    command_line,
    complaints_of,
    embed_questions,
    exchange,
    finish,
    for_seconds,
    heading,
    latency,
    model_entry,
    rate,
    start_models,
    statuses,
    table,
)
from process_memory import Memory, memory_complaints, memory_table

STEADY, SLEEPER = "steady", "sleeper"
WOKEN_BY_REQUEST = 4  # every fourth wake
WARM_UP = 0.2  # share of the cycles after which memory is compared


@dataclass
class Admin:
    """Client of the admin routes."""

    port: int
    key: str

    async def order(self, action: str, **fields: Any) -> tuple[dict[str, Any], float]:
        """Send an order for the sleeper. Returns the answer and the seconds until it came."""
        began_s, body = time.monotonic(), json.dumps({"model": SLEEPER, **fields}).encode()
        path, headers = f"/v1/admin/models/{action}", {"Authorization": f"Bearer {self.key}"}
        reply = await exchange(self.port, "POST", path, body, headers)
        if reply.status != 200:
            raise SystemExit(f"{path} answered {reply.status}: {reply.body.decode()[:300]}")
        return json.loads(reply.body), time.monotonic() - began_s

    async def state(self) -> str:
        entries = json.loads((await exchange(self.port, "GET", "/v1/models")).body)["data"]
        return str(next(entry["state"] for entry in entries if entry["id"] == SLEEPER))


@dataclass
class Cycles:
    """Measurements of the sleeper."""

    awake: Memory
    asleep: Memory
    sleep_s: list[float] = field(default_factory=list)  # reported by the server
    wake_s: list[float] = field(default_factory=list)  # reported by the server
    wake_route_s: list[float] = field(default_factory=list)  # from the order to its answer
    wake_request_s: list[float] = field(default_factory=list)  # from a request that wakes it to its answer
    next_request_s: list[float] = field(default_factory=list)  # the first request after a wake by the route
    samples: list[Sample] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    warm_s: float = 0.0

    def expect(self, found: str, expected: str, number: int) -> None:
        if found != expected:
            self.complaints.append(f"cycle {number}: {SLEEPER} is {found}, not {expected}")


async def run_cycles(
    sleeper: CheckedModel, admin: Admin, cycles: Cycles, options: argparse.Namespace
) -> None:
    level = {"level": options.level} if options.level else {}
    for number in range(options.times):
        if number == int(WARM_UP * options.times):
            cycles.warm_s = time.monotonic()
        answer, _ = await admin.order("sleep", **level)
        cycles.sleep_s.append(answer["seconds"])
        cycles.expect(await admin.state(), "asleep", number)
        cycles.asleep.sample()
        by_request = number % WOKEN_BY_REQUEST == WOKEN_BY_REQUEST - 1
        if not by_request:
            answer, seconds = await admin.order("wake")
            cycles.wake_s.append(answer["seconds"])
            cycles.wake_route_s.append(seconds)
            cycles.expect(await admin.state(), "awake", number)
        sample = await sleeper.ask()
        cycles.samples.append(sample)
        (cycles.wake_request_s if by_request else cycles.next_request_s).append(sample.seconds)
        if sample.status != 200:
            cycles.complaints.append(f"cycle {number}: {SLEEPER} answered {sample.status}")
        cycles.expect(await admin.state(), "awake", number)
        cycles.awake.sample()


def quantiles(seconds: Sequence[float]) -> list[str]:
    """Count, then p50, p99 and maximum in ms."""
    ordered = sorted(seconds)
    if not ordered:
        return ["0", "–", "–", "–"]
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    values = (statistics.median(ordered), p99, ordered[-1])
    return [str(len(ordered)), *(f"{1000 * value:,.1f}" for value in values)]


async def measure(
    server_pid: int, port: int, key: str, options: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """The parts of the report, and what failed."""
    steady = CheckedModel(STEADY, port, embed_questions(STEADY, 64), options.tolerance)
    sleeper = CheckedModel(SLEEPER, port, TASKS[options.task](SLEEPER, 16), options.sleeper_tolerance)
    admin, cycles = Admin(port, key), Cycles(Memory(server_pid), Memory(server_pid))
    for model in (steady, sleeper):
        await model.learn()
    await for_seconds(steady, options.clients, 2)
    alone, done = await for_seconds(steady, options.clients, options.alone_seconds), asyncio.Event()

    async def cycle() -> None:
        try:
            await run_cycles(sleeper, admin, cycles, options)
        finally:
            done.set()

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(closed_loop(steady, options.clients, done.is_set))
        group.create_task(cycle())
    seconds, beside = time.monotonic() - began_s, steady.taken()
    rows, asleep = cycles.awake.rows(cycles.warm_s), cycles.asleep.rows(cycles.warm_s)
    complaints = cycles.complaints + complaints_of(SLEEPER, cycles.samples) + complaints_of(STEADY, beside)
    complaints += memory_complaints(rows, options.bound_mib)
    if failed := sum(sample.status != 200 for sample in beside):
        complaints.append(f"{failed} requests of {STEADY} failed: {statuses(beside)}")
    parts = [
        f"{options.times} cycles in {seconds:.0f} s beside {len(beside):,} requests of the steady model "
        f"({statuses(beside)}). Answers of the sleeper: {statuses(cycles.samples)}.",
        table(
            ["", "times", "p50 ms", "p99 ms", "max ms"],
            [
                ["falling asleep, in the engine", *quantiles(cycles.sleep_s)],
                ["waking, as the route says", *quantiles(cycles.wake_s)],
                ["waking, until the route answers", *quantiles(cycles.wake_route_s)],
                ["the next request, until it is answered", *quantiles(cycles.next_request_s)],
                ["waking by a request, until it is answered", *quantiles(cycles.wake_request_s)],
            ],
        ),
        table(
            ["steady model", "requests/s", "p50 / p99 / max ms"],
            [
                ["alone", f"{rate(alone, options.alone_seconds):.1f}", latency(alone)],
                ["beside", f"{rate(beside, seconds):.1f}", latency(beside)],
            ],
        ),
        "Memory after each wake:\n\n" + memory_table(rows),
        "Memory while the sleeper sleeps:\n\n" + memory_table(asleep),
    ]
    return parts, complaints


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--steady", help="folder of an embedding model; by default the default model")
    parser.add_argument("--sleeper", help="folder of the model that sleeps; by default the default model")
    parser.add_argument(
        "--task", choices=sorted(TASKS), default="embed", help="task of the sleeper's requests"
    )
    parser.add_argument("--level", type=int, choices=(1, 2), help="sleep level")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="dtype of both models")
    parser.add_argument("--clients", type=int, default=2, help="clients of the steady load")
    parser.add_argument("--alone-seconds", type=float, default=15)
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="allowed difference of the steady model's vectors"
    )
    parser.add_argument("--sleeper-tolerance", type=float, default=1e-6)
    parser.add_argument("--bound-mib", type=float, default=48, help="allowed growth of each process")
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--save", type=Path, help="append the report to this file")
    options = parser.parse_args()
    common = {"device": options.device, "dtype": options.dtype}
    models = [
        model_entry(STEADY, options.steady, common),
        model_entry(SLEEPER, options.sleeper, common),
    ]
    key, parts = secrets.token_hex(16), list(heading(f"Sleep and wake, {options.device}", command_line()))
    with start_models(models, options.flags.split(), {"PENSTOCK_ADMIN_KEY": key}) as server:
        measured, complaints = asyncio.run(measure(server.pid, server.port, key, options))
    return finish(parts + measured, complaints, options.save)


if __name__ == "__main__":
    sys.exit(main())
