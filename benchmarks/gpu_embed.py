"""Rows per second on one GPU, offline: the runner alone, and the whole engine with token ids as input.

    python benchmarks/gpu_embed.py FOLDER [FOLDER…] [--save]

Folders need only a configuration and a tokenizer; weights are random (`--load-format dummy`).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from penstock import Engine
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import Request

SHAPES = ((1, 32), (64, 32), (16, 256), (64, 256), (32, 500))


def step_ms(engine: Engine, rows: int, length: int, repeats: int = 30) -> float:
    """Device time of one step of `rows` × `length` tokens, from plan to vectors."""
    tokens = np.random.default_rng(0).integers(1000, 20000, rows * length).astype(np.int32)
    request = Request("bench", tokens, np.full(rows, length, dtype=np.int32))
    plan = build_plan([ScheduledRows(request, np.arange(rows, dtype=np.int32))])
    runner = engine.local.engine.core.runner
    for _ in range(5):
        runner.launch(plan).result()
    return statistics.median(runner.launch(plan).result().device_s * 1000 for _ in range(repeats))


def engine_rate(engine: Engine, rows: int, length: int) -> float:
    """Rows per second through the whole engine, from token ids to vectors."""
    inputs = np.random.default_rng(1).integers(1000, 20000, (rows, length)).tolist()
    engine.embed(inputs[:256])
    began = time.perf_counter()
    engine.embed(inputs)
    return rows / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    lines = ["| model | step | ms | rows/s of the step |", "|---|---|---|---|"]
    for folder in options.folders:
        began = time.perf_counter()
        with Engine(folder, device="cuda", load_format="dummy") as engine:
            loaded_s = time.perf_counter() - began
            limit = engine.spec.max_model_len
            for rows, length in SHAPES:
                if length <= limit:
                    ms = step_ms(engine, rows, length)
                    lines.append(
                        f"| {Path(folder).name} | {rows} × {length} | {ms:.2f} | {rows / ms * 1000:,.0f} |"
                    )
            for rows, length in ((20_000, 32), (10_000, 256)):
                rate = engine_rate(engine, rows, length)
                lines.append(f"| {Path(folder).name} | engine, {rows:,} × {length} | | {rate:,.0f} |")
            lines.append(f"| {Path(folder).name} | loaded in {loaded_s:.1f} s | | |")
    print("\n".join(lines))
    if options.save:
        name = torch.cuda.get_device_name()
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        head = f"# GPU embedding, offline\n\n{date.today()} · {name} · {versions}\n\n"
        command = "`python benchmarks/gpu_embed.py FOLDER… --save`\n\n"
        target = Path(__file__).parent / "results" / "gpu_embed.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(head + command + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
