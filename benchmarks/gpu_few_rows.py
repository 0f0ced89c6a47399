"""fp8 products of few rows on one GPU, in microseconds: the library's, in bf16 and fp8, and the kernel's.

    python benchmarks/gpu_few_rows.py [--rows 16 32 64 128] [--tune]

The shapes are those of Qwen3-8B. The floor is reading the fp8 weight once. `--tune` also times other tiles
and numbers of programs that share a tile's inputs. Times are medians of CUDA graph replays over several
weights, so that no weight stays in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gpu_kernels import captured, replays_ms, worst
from gpu_w4 import CACHE_BYTES, SHAPES
from torch import Tensor

from penstock.kernels.few_rows import (
    FEW_ROWS_TILES,
    FewRowsTile,
    few_rows_matmul,
    few_rows_tile_for,
)
from penstock.kernels.language import MAX_COMPILER_THREADS, cdiv, precompile
from penstock.kernels.quantize import Quantized, quantize_rows

BYTES_A_S = 4.3e12
TILES = ((64, 128, 6), (64, 256, 3), (128, 128, 4))  # outputs, inputs, stages
PROGRAMS = (132, 264, 528)
Call = Callable[..., Tensor]


def candidates(rows: int, outputs: int) -> list[tuple[FewRowsTile, int]]:
    found = {}
    for cols, depth, stages in TILES:
        tile = FewRowsTile(few_rows_tile_for(rows).rows, cols, depth, stages)
        for programs in PROGRAMS:
            found[tile, max(1, round(programs / cdiv(outputs, cols)))] = None
    return list(found)


def by_library(x: Quantized, weight: Quantized) -> Tensor:
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def by_kernel(x: Quantized, weight: Quantized, **options: Any) -> Tensor:
    return few_rows_matmul(x, weight, None, torch.bfloat16, **options)


def microseconds(calls: list[Callable[[], Tensor]]) -> float:
    """Median time of one call."""

    def work() -> None:
        for call in calls:
            call()

    return statistics.median(replays_ms(captured(work, 1), repeats=9)) * 1000 / len(calls)


def measure(name: str, rows: int, *, tunes: bool) -> None:
    inputs, outputs = SHAPES[name]
    copies = max(4, cdiv(CACHE_BYTES, inputs * outputs))
    wide = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    weights = [quantize_rows(each) for each in wide]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    small = quantize_rows(x)
    floor = inputs * outputs / BYTES_A_S * 1e6
    in_half = microseconds([partial(torch.mm, x, each.t()) for each in wide])
    library = microseconds([partial(by_library, small, each) for each in weights])
    line = f"{name:>9} {inputs} → {outputs}, {rows:>3} rows | floor {floor:5.1f} | bf16 {in_half:5.1f}"
    line += f" | library {library:5.1f}"
    if rows <= FEW_ROWS_TILES[-1][0]:
        error = worst(by_kernel(small, weights[0]), by_library(small, weights[0]))
        took = microseconds([partial(by_kernel, small, each) for each in weights])
        line += f" | kernel {took:5.1f} (error {error:.4f})"
        if tunes:
            line += f" | {best(partial(by_kernel, small), weights, candidates(rows, outputs))}"
    print(line, flush=True)


def best(call: Call, weights: Sequence[Quantized], chosen: list[tuple[FewRowsTile, int]]) -> str:
    """The three fastest tiles and numbers of programs."""
    with precompile(min(os.cpu_count() or 1, MAX_COMPILER_THREADS)) or contextlib.nullcontext():
        for tile, parts in chosen:
            call(weights[0], tile=tile, parts=parts)
    took = {
        (tile, parts): microseconds([partial(call, each, tile=tile, parts=parts) for each in weights])
        for tile, parts in chosen
    }
    ranked = sorted(took, key=took.__getitem__)[:3]
    return ", ".join(f"{t.cols}×{t.inputs} s{t.stages} ×{p}: {took[t, p]:.1f}" for t, p in ranked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 192, 256])
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    given = parser.parse_args()
    for rows in given.rows:
        for name in SHAPES:
            measure(name, rows, tunes=given.tune)


if __name__ == "__main__":
    main()
