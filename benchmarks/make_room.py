"""Two models that do not fit on a GPU together: a request wakes its model, and the other one sleeps.

    python benchmarks/make_room.py --first FOLDER --second FOLDER --kv-cache-gb 60 66 [--save FILE]

The KV caches are so large that there is no memory for both. Weights are dummies. First the models get
requests in turn, then both have clients at the same time. Exit code 1: a wrong answer, a refusal, or a model
in the wrong state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from checked_load import (
    TASKS,
    CheckedModel,
    closed_loop,
    command_line,
    complaints_of,
    exchange,
    finish,
    heading,
    latency,
    model_entry,
    start_models,
    statuses,
    table,
)
from soak import device_mib

NAMES = ("first", "second")


async def states(port: int) -> dict[str, str]:
    entries = json.loads((await exchange(port, "GET", "/v1/models")).body)["data"]
    return {entry["id"]: entry["state"] for entry in entries}


async def measure(port: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The parts of the report, and what failed."""
    models = [CheckedModel(name, port, TASKS[options.task](name, 2), options.tolerance) for name in NAMES]
    complaints, rows, at_start = [], [], await states(port)
    for model in models:
        await model.learn()
    for number in range(options.times):
        for model in models:
            sample = await model.ask()
            found = await states(port)
            asleep = [name for name, state in found.items() if state == "asleep"]
            device = device_mib() or 0.0
            rows.append([number, model.name, f"{1000 * sample.seconds:,.0f}", found, f"{device / 1024:.1f}"])
            if asleep != [name for name in NAMES if name != model.name]:
                complaints.append(f"turn {number}: {model.name} was asked, and the states are {found}")
    in_turn = [model.taken() for model in models]
    until_s = time.monotonic() + options.seconds
    async with asyncio.TaskGroup() as group:
        for model in models:
            group.create_task(closed_loop(model, 2, lambda: time.monotonic() >= until_s))
    together = [model.taken() for model in models]
    for model, *parts in zip(models, in_turn, together, strict=True):
        for samples in parts:
            complaints += complaints_of(model.name, samples)
            complaints += [f"{model.name}: {sample.status}" for sample in samples if sample.status != 200]
    head = ["model", "phase", "p50 / p99 / max ms", "statuses"]
    summary = [
        [model.name, phase, latency(samples), statuses(samples)]
        for phase, found_samples in (("in turn", in_turn), ("at the same time", together))
        for model, samples in zip(models, found_samples, strict=True)
    ]
    return [
        f"States after the start: {at_start}.",
        table(head, summary),
        table(["turn", "asked", "ms", "states afterwards", "GiB in use"], rows[:8]),
    ], complaints


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", required=True, help="folder of a model that generates")
    parser.add_argument("--second", required=True, help="folder of another model that generates")
    parser.add_argument("--kv-cache-gb", type=float, nargs=2, required=True)
    parser.add_argument("--task", choices=sorted(TASKS), default="generate")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=15, help="time with clients of both models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tolerance", type=float, default=1e-2)
    parser.add_argument("--flags", default="", help="more flags for the server")
    parser.add_argument("--save", type=Path, help="append the report to this file")
    options = parser.parse_args()
    common = {"device": options.device, "dtype": options.dtype, "load_format": "dummy"}
    folders = zip(NAMES, (options.first, options.second), options.kv_cache_gb, strict=True)
    entries = [model_entry(name, folder, common | {"kv_cache_gb": size}) for name, folder, size in folders]
    parts = list(heading(f"Two models that do not fit together, {options.device}", command_line()))
    with start_models(entries, options.flags.split()) as server:
        measured, complaints = asyncio.run(measure(server.port, options))
    return finish(parts + measured, complaints, options.save)


if __name__ == "__main__":
    sys.exit(main())
