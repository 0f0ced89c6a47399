"""Prefills beside decodes: streams that start as others end, with and without an inter-token latency target.

Each policy has its own engine process. A stream begins as soon as another ends, so that `--streams` of them
are always open. The model has the shape of Qwen3-8B, or with `--as-is` that of the folder.

python benchmarks/gpu_streams.py FOLDER [--streams 16 64] [--targets 0 14] [--rounds 6] [--fp8] [--trace]
    [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from model_shapes import QWEN3_8B, derive

from penstock import Engine
from penstock.errors import PenstockError
from penstock.types import GeneratedTokens, GeneratePlan, PoolingParams, Request, SamplerParams, Task

FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


class TokenTimes:
    """When the tokens of one request arrived; a `StreamListener`."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.times_s: list[float] = []
        self.error: PenstockError | None = None
        self.done = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.done.is_set()

    def on_token(self, row: int, token_id: int) -> None:
        self.times_s.append(time.perf_counter())

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        for part in parts:
            self.times_s.extend([time.perf_counter()] * len(part.token_ids))
            if part.finish_reason is not None:
                self.done.set()

    def on_error(self, error: PenstockError) -> None:
        self.error = error
        self.done.set()


async def stream_all(
    engine: Engine, rows: list[list[int]], params: SamplerParams, num_streams: int
) -> list[TokenTimes]:
    """Stream all rows, `num_streams` at a time."""
    waiting, found = iter(enumerate(rows)), []

    async def stream() -> None:
        for number, row in waiting:
            token_ids, lengths = np.array(row, dtype=np.int32), np.array([len(row)], dtype=np.int32)
            request = Request(
                f"row-{number}", token_ids, lengths, PoolingParams(Task.GENERATE), sampling=params
            )
            times = TokenTimes()
            found.append(times)
            leave = engine.local.engine.stream(request, times)
            await times.done.wait()
            leave()
            if times.error is not None:
                raise times.error

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return found


def figures(streams: list[TokenTimes], seconds: float) -> dict[str, float]:
    between = np.concatenate([np.diff(each.times_s) for each in streams]) * 1e3
    means = [(each.times_s[-1] - each.times_s[0]) / (len(each.times_s) - 1) * 1e3 for each in streams]
    first = [(each.times_s[0] - each.began_s) * 1e3 for each in streams]
    return {
        "tok/s": sum(len(each.times_s) for each in streams) / seconds,
        "TPOT p50": float(np.median(means)),
        "ITL p50": float(np.percentile(between, 50)),
        "ITL p99": float(np.percentile(between, 99)),
        "TTFT p50": float(np.median(first)),
        "TTFT p99": float(np.percentile(first, 99)),
    }


class StepTrace:
    """Device time of steps by their decodes and prompt tokens."""

    def __init__(self, engine: Engine) -> None:
        self.steps: dict[tuple[str, int], list[float]] = {}
        generation = engine.local.engine.core.generation
        assert generation is not None
        collect = generation.collect

        def traced(plan: GeneratePlan, result: Any) -> Any:
            prompts = plan.num_tokens - plan.paged.num_rows
            kind = "decode" if not prompts else "mixed" if plan.paged.num_rows else "prefill"
            size = -(-plan.num_tokens // 64) * 64
            self.steps.setdefault((kind, size), []).append(result.device_s)
            return collect(plan, result)

        generation.collect = traced  # type: ignore[method-assign]

    def show(self) -> None:
        for (kind, size), seconds in sorted(self.steps.items()):
            if len(seconds) > 3:
                low, middle, high = np.percentile(seconds, (5, 50, 95)) * 1e3
                spread = f"{middle:6.2f} ms ({low:.2f}–{high:.2f})"
                print(f"  {kind:8} ≤ {size:5} tokens: {len(seconds):5} × {spread}")
        self.steps.clear()


def show_kernels(trace: StepTrace, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run streams, and print the device time of each kernel in a step."""
    import torch
    from torch.profiler import ProfilerActivity

    trace.steps.clear()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        asyncio.run(work())
        torch.cuda.synchronize()
    steps = sum(map(len, trace.steps.values()))
    times: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time)
    print(f"  {steps} steps, sum of kernels {sum(map(sum, times.values())) / steps / 1000:.2f} ms each")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:22]:
        print(f"  {sum(each) / steps:8.0f} µs {len(each) / steps:6.1f} × {np.mean(each):6.1f}  {name[:90]}")


def measure(given: argparse.Namespace) -> list[dict[str, float]]:
    """Measure one policy in this process."""
    params = SamplerParams(max_tokens=given.output, ignore_eos=True, temperature=0.0)
    began, found = time.perf_counter(), []
    with Engine(
        given.folder,
        load_format="dummy",
        max_model_len=given.input + given.output,
        enable_generation=True,
        target_itl_ms=given.target,
        **(FP8 if given.fp8 else {}),
    ) as engine:
        print(f"ready in {time.perf_counter() - began:.1f} s", flush=True)
        draw = np.random.default_rng(0)
        trace = StepTrace(engine) if given.trace or given.profile else None
        for num_streams in given.streams:
            for rounds in (2, given.rounds):  # the first pass is a warm-up
                count = rounds * num_streams
                rows = draw.integers(10, engine.spec.vocab_size - 10, (count, given.input)).tolist()
                start_s = time.perf_counter()
                times = asyncio.run(stream_all(engine, rows, params, num_streams))
                result = figures(times, time.perf_counter() - start_s)
                if trace is not None and rounds == given.rounds:
                    trace.show()
            found.append({"streams": num_streams, "target": given.target} | result)
            if given.profile and trace is not None:
                size = (2 * num_streams, given.input)  # other prompts: none is in the prefix cache
                rows = draw.integers(10, engine.spec.vocab_size - 10, size).tolist()
                show_kernels(trace, partial(stream_all, engine, rows, params, num_streams))
                trace.show()
        runner: Any = engine.local.engine.core.runner
        graphs = {"decode": runner.decode, "mixed": runner.mixed, "other": runner.graphs}
        counts = {
            name: (len(each.captured), each.replays) for name, each in graphs.items() if each is not None
        }
        print(f"graphs and replays: {counts}", flush=True)
        if given.trace and runner.mixed is not None:
            print(Counter((key.tokens, key.decodes, key.max_blocks) for key in runner.mixed.captured))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="configuration and tokenizer of a Qwen3 model")
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument(
        "--targets", type=float, nargs="+", default=[0.0, 14.0], help="target_itl_ms; 0: none"
    )
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6, help="requests per stream")
    parser.add_argument("--fp8", action="store_true", help="FP8 weights and KV cache")
    parser.add_argument("--as-is", action="store_true", help="keep the shape of the folder's model")
    parser.add_argument("--trace", action="store_true", help="print the device time of steps by size")
    parser.add_argument("--profile", action="store_true", help="also print the time of kernels in a step")
    # Internal: starts the process of one policy.
    parser.add_argument("--target", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.target is not None:
        print(json.dumps(measure(given)), flush=True)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # print the results so far
    found: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory() as work:
            folder = given.folder
            if not given.as_is:
                folder = str(derive(Path(folder), Path(work) / "qwen3-8b", QWEN3_8B))
            for target in given.targets:
                found += run_policy(folder, target, given)
    finally:
        if found:
            print(table(found), flush=True)


def run_policy(folder: str, target: float, given: argparse.Namespace) -> list[dict[str, float]]:
    """Measure one policy in its own process."""
    command = [sys.executable, __file__, folder, "--target", str(target), "--rounds", str(given.rounds)]
    command += ["--input", str(given.input), "--output", str(given.output)]
    command += ["--streams", *map(str, given.streams), *(["--trace"] if given.trace else [])]
    command += [f"--{name}" for name in ("fp8", "profile") if getattr(given, name)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *lines, last = done.stdout.strip().splitlines()
    print("\n".join([f"target {target:g} ms", *lines]), flush=True)
    found: list[dict[str, float]] = json.loads(last)
    return found


def table(found: list[dict[str, float]]) -> str:
    lines = ["| " + " | ".join(found[0]) + " |", "|---" * len(found[0]) + "|"]
    for row in sorted(found, key=lambda each: (each["streams"], each["target"])):
        cells = (f"{value:,.{0 if value >= 1000 else 1}f}" for value in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
