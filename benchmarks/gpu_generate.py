"""Offline generation of many sequences at once: tokens per second, time to first token, time between tokens.

python benchmarks/gpu_generate.py FOLDER [--load-format dummy] [--requests 128] [--output 512] [--sampled]
"""

from __future__ import annotations

import argparse
import asyncio
import time

import numpy as np

from penstock import Engine
from penstock.errors import PenstockError
from penstock.types import GeneratedTokens, PoolingParams, Request, SamplerParams, Task


class TokenTimes:
    """When the tokens of one request arrived; a `StreamListener`."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.last_s = 0.0
        self.num_tokens = 0
        self.error: PenstockError | None = None
        self.done = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.done.is_set()

    def on_token(self, row: int, token_id: int) -> None:
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.num_tokens += 1

    def on_tokens(self, parts: list[GeneratedTokens]) -> None:
        for part in parts:
            for token_id in part.token_ids.tolist():
                self.on_token(part.row, token_id)
            if part.finish_reason is not None:
                self.done.set()

    def on_error(self, error: PenstockError) -> None:
        self.error = error
        self.done.set()


async def stream_all(engine: Engine, rows: list[list[int]], params: SamplerParams) -> list[TokenTimes]:
    times = [TokenTimes() for _ in rows]
    leaves = []
    for number, row in enumerate(rows):
        token_ids = np.array(row, dtype=np.int32)
        lengths = np.array([len(row)], dtype=np.int32)
        request = Request(f"row-{number}", token_ids, lengths, PoolingParams(Task.GENERATE), sampling=params)
        leaves.append(engine.local.engine.stream(request, times[number]))
    for each in times:
        await each.done.wait()
        if each.error is not None:
            raise each.error
    for leave in leaves:
        leave()
    return times


def measure(engine: Engine, rows: list[list[int]], params: SamplerParams) -> tuple[float, float, float]:
    """Tokens per second, median seconds to the first token, median seconds between tokens."""
    start_s = time.perf_counter()
    times = asyncio.run(stream_all(engine, rows, params))
    first, last = np.array([each.first_s for each in times]), np.array([each.last_s for each in times])
    counts = np.array([each.num_tokens for each in times])
    between = (last - first) / np.maximum(counts - 1, 1)
    rate = counts.sum() / (last.max() - start_s)
    return float(rate), float(np.median(first - start_s)), float(np.median(between))


def profile(engine: Engine, rows: list[list[int]], params: SamplerParams) -> None:
    """Mean device time of each kernel in a step, and the idle time of the device."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        measure(engine, rows, params)
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.device_time)
    busy = sum(sum(of_kernel) for of_kernel in times.values())
    span = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
    steps = params.max_tokens
    print(f"a step: {span / steps:.0f} µs, of which kernels {busy / steps:.0f} µs")
    for name, of_kernel in sorted(times.items(), key=lambda item: -sum(item[1]))[:24]:
        each, total, count = np.mean(of_kernel), sum(of_kernel) / steps, len(of_kernel) / steps
        print(f"{total:9.1f} µs {count:7.1f} × {each:8.2f}   {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--input", type=int, default=2)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--sampled", action="store_true", help="top-p 0.95 and top-k 50 instead of greedy")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quantization")
    parser.add_argument("--profile", action="store_true", help="print the device time of a step by kernel")
    given = parser.parse_args()
    how = {"temperature": 1.0, "top_p": 0.95, "top_k": 50} if given.sampled else {"temperature": 0.0}
    params = SamplerParams(max_tokens=given.output, ignore_eos=True, **how)  # type: ignore[arg-type]
    length = given.input + given.output
    began = time.perf_counter()
    with Engine(
        given.folder,
        load_format=given.load_format,
        max_model_len=length,
        enable_generation=True,
        quantization=given.quantization,
    ) as engine:
        print(f"ready in {time.perf_counter() - began:.1f} s")
        draw = np.random.default_rng(0)
        rows = draw.integers(10, engine.spec.vocab_size - 10, (given.requests, given.input)).tolist()
        warm = SamplerParams(max_tokens=8, ignore_eos=True, **how)  # type: ignore[arg-type]
        measure(engine, rows, warm)
        for _ in range(given.repeat):
            rate, first, between = measure(engine, rows, params)
            print(f"{rate:10.0f} tok/s   first {first * 1e3:7.1f} ms   each {between * 1e3:7.2f} ms")
        if given.profile:
            few = SamplerParams(max_tokens=given.output // 4, ignore_eos=True, **how)  # type: ignore[arg-type]
            profile(engine, rows, few)


if __name__ == "__main__":
    main()
