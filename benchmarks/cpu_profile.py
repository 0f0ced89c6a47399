"""Time of a CPU step, by operation and by number of tokens.

    python benchmarks/cpu_profile.py [--quantization int8] [--save]

Runs only the runner of the default model, on natural texts planned into steps as the engine does.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from cpu_embed import cpu_name
from texts import natural_texts

from penstock import Engine
from penstock.inputs.processor import InputOptions
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Budget, Scheduler
from penstock.types import PoolingParams, PoolPlan

SIZES = (128, 256, 512, 1024, 2048, 4096)


def plans_of(engine: Engine, texts: list[str], tokens: int) -> list[PoolPlan]:
    options = InputOptions(truncate_prompt_tokens=-1)
    request = engine.local.text.processor.prepare("profile", texts, PoolingParams(), options)
    scheduler = Scheduler(Budget(tokens, 4096, 1 << 40))
    scheduler.add(request)
    plans = []
    while shares := scheduler.schedule():
        plans.append(build_plan(shares))
    return plans


def by_size(engine: Engine, runner: ModelRunner, texts: list[str], rounds: int) -> list[str]:
    """Tokens per second for each step size. The sizes take turns."""
    plans = {size: plans_of(engine, texts, size) for size in SIZES}
    rates: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size, steps in plans.items():
            began = time.perf_counter()
            for plan in steps:
                runner.forward(plan)
            rates[size].append(sum(plan.num_tokens for plan in steps) / (time.perf_counter() - began))
    lines = ["| tokens a step | tokens/s (median) | length groups a step |", "|---|---|---|"]
    for size in SIZES:
        groups = statistics.mean(len(plan.groups) for plan in plans[size])
        lines.append(f"| {size} | {statistics.median(rates[size]):,.0f} | {groups:.1f} |")
    return lines


def by_operation(engine: Engine, runner: ModelRunner, texts: list[str]) -> list[str]:
    """Each operation's share of the time, in steps of the default size."""
    plans = plans_of(engine, texts, engine.settings.max_num_batched_tokens)
    with torch.profiler.profile() as profile:
        for plan in plans:
            runner.forward(plan)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    lines = ["| operation | share of the step | calls a step |", "|---|---|---|"]
    for event in events[:8]:
        share = event.self_cpu_time_total / total
        lines.append(f"| `{event.key}` | {share:.1%} | {event.count / len(plans):.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    texts = natural_texts(options.texts)
    with Engine(device="cpu", quantization=options.quantization) as engine:
        runner = engine.local.engine.core.runner
        assert isinstance(runner, ModelRunner)
        parts = [by_size(engine, runner, texts, options.rounds), by_operation(engine, runner, texts)]
    text = "\n\n".join("\n".join(lines) for lines in parts)
    print(text)
    if options.save:
        kind = options.quantization or "fp32"
        flag = f" --quantization {kind}" if options.quantization else ""
        head = (
            f"# Profile of a CPU step, all-MiniLM-L6-v2, {kind}\n\n"
            f"{date.today()} · {cpu_name()}, {torch.get_num_threads()} threads · "
            f"Python {platform.python_version()} · torch {torch.__version__}\n\n"
            f"`python benchmarks/cpu_profile.py{flag} --save`\n\n"
        )
        target = Path(__file__).parent / "results" / f"cpu_profile_{kind}.md"
        target.write_text(head + text + "\n")


if __name__ == "__main__":
    main()
