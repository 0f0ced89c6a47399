"""An embedder, a reranker and a generator in one server: mixed load, every answer checked, one engine killed.

    python benchmarks/mixed_models.py --reranker FOLDER --generator FOLDER [--seconds 180] [--save FILE]
    python benchmarks/mixed_models.py --device cuda --embedder FOLDER --reranker FOLDER --kill none

First each model gets load alone, then all models at once. The table shows how much of its throughput each
model keeps. In the middle of the mixed load one engine is killed. Exit code 1: a wrong answer, any error of a
model whose engine was not killed, an error of the killed model other than 503 or outside its restart, or no
recovery.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from checked_load import (
    TASKS,
    CheckedModel,
    Sample,
    closed_loop,
    command_line,
    complaints_of,
    engine_pids,
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
from http_load import Running
from process_memory import Memory, memory_complaints, memory_table

CLIENTS = {"embed": 4, "rerank": 2, "generate": 2}
NUM_QUESTIONS = {"embed": 64, "rerank": 32, "generate": 8}


@dataclass
class Phases:
    """The times at which the mixed load began, an engine was killed, its model answered again, and the load
    ended."""

    began_s: float
    killed_s: float = float("inf")
    recovered_s: float = float("inf")
    ended_s: float = float("inf")

    def of(self, model: CheckedModel) -> list[tuple[str, list[Sample], float]]:
        """Name, samples and seconds of each phase."""
        if self.killed_s == float("inf"):
            spans = [("together", self.began_s, self.ended_s)]
        else:
            recovered_s = min(self.recovered_s, self.ended_s)
            spans = [
                ("before the kill", self.began_s, self.killed_s),
                ("until the killed engine is back", self.killed_s, recovered_s),
                ("after", recovered_s, self.ended_s),
            ]
        return [(name, model.between(began, ended), ended - began) for name, began, ended in spans]


async def kill_engine(server: Running, number: int, phases: Phases, after_s: float) -> None:
    await asyncio.sleep(after_s)
    pid = engine_pids(server.pid)[number]
    phases.killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)


def find_recovery(model: CheckedModel, phases: Phases) -> None:
    """Record when the killed model first answered a request sent after the kill correctly."""
    right = (each.answered_s for each in model.samples if each.is_right and each.sent_s >= phases.killed_s)
    phases.recovered_s = min(right, default=float("inf"))


def errors_of(model: CheckedModel, phases: Phases, is_killed: bool) -> list[str]:
    """What was wrong with a model's answers. The killed model may answer 503 until it is back."""
    found = complaints_of(model.name, model.samples)
    refused = [sample for sample in model.samples if sample.status in (429, 503)]
    if is_killed:
        refused = [
            sample
            for sample in refused
            if sample.status != 503
            or sample.answered_s < phases.killed_s
            or sample.sent_s > phases.recovered_s
        ]
    if refused:
        found.append(f"{model.name}: {len(refused)} requests were refused that should not be")
    if not any(sample.is_right for sample in model.samples):
        found.append(f"{model.name} answered nothing")
    return found


async def measure(
    server: Running, tasks: dict[str, str], options: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """The parts of the report, and what failed."""
    models = {
        name: CheckedModel(name, server.port, TASKS[task](name, NUM_QUESTIONS[task]), options.tolerance)
        for name, task in tasks.items()
    }
    for name, model in models.items():
        await model.learn()
        if tasks[name] == "generate" and options.learn_seconds:
            await model.learn_texts(CLIENTS[tasks[name]], options.learn_seconds)
    alone = {}
    for name, model in models.items():
        await for_seconds(model, CLIENTS[tasks[name]], 2)
        alone[name] = await for_seconds(model, CLIENTS[tasks[name]], options.alone_seconds)
    memory, phases = Memory(server.pid), Phases(time.monotonic())
    watcher = asyncio.create_task(memory.watch())
    until_s = phases.began_s + options.seconds
    async with asyncio.TaskGroup() as group:
        for name, model in models.items():
            clients = CLIENTS[tasks[name]]
            group.create_task(closed_loop(model, clients, lambda: time.monotonic() >= until_s))
        if options.kill != "none":
            number = list(models).index(options.kill)
            group.create_task(kill_engine(server, number, phases, options.seconds / 2))
    watcher.cancel()
    phases.ended_s = time.monotonic()
    complaints = []
    if options.kill != "none":
        find_recovery(models[options.kill], phases)
        if (took_s := phases.recovered_s - phases.killed_s) > options.max_recovery:
            complaints.append(f"{options.kill} gave no right answer for {took_s:.1f} s after the kill")
    for name, model in models.items():
        complaints += complaints_of(f"{name} alone", alone[name])
        complaints += errors_of(model, phases, is_killed=name == options.kill)
    rows = memory.rows(phases.began_s + options.seconds / 5)
    complaints += memory_complaints(rows, options.bound_mib)
    return [*report(models, alone, phases, options), memory_table(rows)], complaints


def report(
    models: dict[str, CheckedModel],
    alone: dict[str, list[Sample]],
    phases: Phases,
    options: argparse.Namespace,
) -> list[str]:
    rows, total = [], 0.0
    for name, model in models.items():
        alone_rate = rate(alone[name], options.alone_seconds)
        rows.append([name, "alone", f"{alone_rate:.1f}", "1.00", latency(alone[name]), statuses(alone[name])])
        for at, (phase, samples, seconds) in enumerate(phases.of(model)):
            found = rate(samples, seconds) if seconds else 0.0
            share = found / alone_rate if alone_rate else 0.0
            total += share if at == 0 else 0.0
            rows.append([name, phase, f"{found:.1f}", f"{share:.2f}", latency(samples), statuses(samples)])
    parts = [
        table(["model", "phase", "right answers/s", "of alone", "p50 / p99 / max ms", "statuses"], rows),
        f"The shares of throughput alone add up to {total:.2f} while all models have load.",
    ]
    if options.kill != "none":
        took_s = phases.recovered_s - phases.killed_s
        parts.append(f"{options.kill} answered again {took_s:.1f} s after its engine was killed.")
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--alone-seconds", type=float, default=15, help="time for each model alone")
    parser.add_argument("--embedder", help="model folder; by default the default model")
    parser.add_argument("--reranker", help="model folder; without it, no reranker")
    parser.add_argument("--generator", help="model folder; without it, no generator")
    parser.add_argument(
        "--kill", choices=[*CLIENTS, "none"], default="embed", help="model whose engine is killed"
    )
    parser.add_argument(
        "--max-recovery",
        type=float,
        default=30,
        help="allowed seconds until the next right answer",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="dtype of all models")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="allowed difference of vectors and scores"
    )
    parser.add_argument(
        "--learn-seconds",
        type=float,
        default=0,
        help="on a GPU: time to learn which texts several clients get",
    )
    parser.add_argument("--bound-mib", type=float, default=64, help="allowed growth of each process")
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--save", type=Path, help="append the report to this file")
    options = parser.parse_args()
    folders = {"embed": options.embedder, "rerank": options.reranker, "generate": options.generator}
    tasks = {task: task for task, folder in folders.items() if folder or task == "embed"}
    if options.kill not in (*tasks, "none"):
        parser.error(f"--kill {options.kill}: the server has no such model")
    common = {"device": options.device, "dtype": options.dtype}
    # On a CPU the memory of the KV cache is allocated on first use, which looks like growth. A small one is
    # soon full.
    small = {"max_model_len": 1024, "kv_cache_gb": 0.1} if options.device == "cpu" else {}
    own = {"generate": small}
    entries = [model_entry(name, folders[name], {**common, **own.get(name, {})}) for name in tasks]
    parts = list(heading(f"Mixed models, {options.device}", command_line()))
    with start_models(entries, options.flags.split()) as server:
        measured, complaints = asyncio.run(measure(server, tasks, options))
    return finish(parts + measured, complaints, options.save)


if __name__ == "__main__":
    sys.exit(main())
