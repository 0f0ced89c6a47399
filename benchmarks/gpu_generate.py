"""Tokens a second of many rows that are continued at once, offline, with the time to and between tokens.

python benchmarks/gpu_generate.py FOLDER [--load-format dummy] [--requests 128] [--output 512] [--sampled]
"""

from __future__ import annotations

import argparse
import queue
import time

import numpy as np

from penstock import Engine, SamplingParams
from penstock.wire.router import parts_of


def measure(engine: Engine, rows: list[list[int]], params: SamplingParams) -> tuple[float, float, float]:
    """Tokens a second, median seconds to the first token, median seconds between two."""
    inbox: queue.SimpleQueue[tuple[int, float, int, bool]] = queue.SimpleQueue()
    requests = engine._requests(rows, [params] * len(rows), False, 0, "")
    began = time.perf_counter()
    for number, request in enumerate(requests):

        def receive(parts: object, number: int = number) -> None:
            now = time.perf_counter()
            if isinstance(parts, Exception):
                raise parts
            assert isinstance(parts, list)
            for part in parts:
                inbox.put((number, now, len(part.token_ids), part.finish is not None))

        engine._engine.stream_all(
            [request], lambda told: receive(told if isinstance(told, Exception) else parts_of(told))
        )
    first, last, counts = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows))
    left = len(rows)
    while left:
        number, now, tokens, ended = inbox.get()
        first[number] = first[number] or now
        last[number] = now
        counts[number] += tokens
        left -= ended
    took = last.max() - began
    between = (last - first) / np.maximum(counts - 1, 1)
    return float(counts.sum() / took), float(np.median(first - began)), float(np.median(between))


def profile(engine: Engine, rows: list[list[int]], params: SamplingParams) -> None:
    """Device time of each kernel in a step, on average, and how long the device had nothing to do."""
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
    parser.add_argument(
        "--sampled", action="store_true", help="top-p 0.95 and top-k 50 instead of the likeliest"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quantization")
    parser.add_argument(
        "--profile", action="store_true", help="print where a step's time goes, kernel by kernel"
    )
    given = parser.parse_args()
    how = {"temperature": 1.0, "top_p": 0.95, "top_k": 50} if given.sampled else {"temperature": 0.0}
    params = SamplingParams(max_tokens=given.output, ignore_eos=True, **how)  # type: ignore[arg-type]
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
        warm = SamplingParams(max_tokens=8, ignore_eos=True, **how)  # type: ignore[arg-type]
        measure(engine, rows, warm)
        for _ in range(given.repeat):
            rate, first, between = measure(engine, rows, params)
            print(f"{rate:10.0f} tok/s   first {first * 1e3:7.1f} ms   each {between * 1e3:7.2f} ms")
        if given.profile:
            few = SamplingParams(max_tokens=given.output // 4, ignore_eos=True, **how)  # type: ignore[arg-type]
            profile(engine, rows, few)


if __name__ == "__main__":
    main()
