"""Paged attention of decode steps on one GPU: microseconds of each tiling, and the floor by memory traffic.

    python benchmarks/gpu_paged.py [--rows 16,64,128] [--keys 64,256,1024] [--dtype bf16|fp8]

Heads are those of Qwen3-4B (32 query heads over 8 key heads of 128). Times are medians of CUDA graph replays
over several caches, so that keys and values come from memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial

import torch
from gpu_kernels import captured, replays_ms

from penstock.kernels import paged
from penstock.kernels.paged import PagedTiling, paged_attention
from penstock.kernels.quantize import FP8
from penstock.kvcache.store import KVStore

BYTES_A_S = 4.3e12
SETS = 4
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
TILINGS = [
    PagedTiling(keys, warps, stages)
    for keys, warps, stages in itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4))
    if keys * stages <= 256 and keys >= 16 * warps
]


def measure(rows: int, count: int, dtype: torch.dtype, tiling: PagedTiling) -> float:
    """Median microseconds of one call."""
    width = -(-count // PAGE)
    calls = []
    for number in range(SETS):
        draw = torch.Generator(device="cuda").manual_seed(number)
        query = torch.randn((rows, HEADS, DIM), generator=draw, device="cuda", dtype=torch.bfloat16)
        slots = rows * width * PAGE
        keys, values = (
            torch.randn((slots, KV_HEADS, DIM), generator=draw, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        store = KVStore(1, slots, KV_HEADS, DIM, dtype, keys.device)
        store.write(0, torch.arange(slots, device="cuda"), keys, values)
        order = torch.randperm(rows * width, device="cuda", generator=draw).int().view(rows, width)
        counts = torch.full((rows,), count, dtype=torch.int32, device="cuda")
        out = torch.empty((rows, HEADS * DIM), device="cuda", dtype=torch.bfloat16)
        calls.append(
            partial(
                paged_attention,
                query,
                store.layer(0),
                order,
                counts,
                block_size=PAGE,
                scale=DIM**-0.5,
                out=out,
                tiling=tiling,
            )
        )

    def work() -> None:
        for call in calls:
            call()

    return statistics.median(replays_ms(captured(work, 1), repeats=7)) * 1000 / SETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="16,64,128")
    parser.add_argument("--keys", default="64,256,1024")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    given = parser.parse_args()
    dtype = FP8 if given.dtype == "fp8" else torch.bfloat16
    for rows, count in itertools.product(*(map(int, each.split(",")) for each in (given.rows, given.keys))):
        floor = rows * count * KVStore.bytes_per_slot(1, KV_HEADS, DIM, dtype) / BYTES_A_S * 1e6
        took = {tiling: measure(rows, count, dtype, tiling) for tiling in TILINGS}
        used = measure(rows, count, dtype, paged.tiling_for(DIM))
        best = sorted(took, key=took.__getitem__)[:4]
        shown = ", ".join(f"{t.keys} w{t.warps} s{t.stages}: {took[t]:.1f}" for t in best)
        print(
            f"{rows:>4} rows × {count:>5} keys | floor {floor:6.1f} | used {used:6.1f} | {shown}", flush=True
        )


if __name__ == "__main__":
    main()
