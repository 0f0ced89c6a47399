"""4-bit weights compared with bfloat16 on one GPU: the products of Qwen3-8B, for few and for many rows.

    python benchmarks/gpu_w4.py [--only products,tiles] [--save PATH]

`products` times F.linear in bf16, the kernel that dequantises as it multiplies, and dequantising before a
library product; `chosen` is the method that a layer uses. `tiles` times other tiles and splits of the kernel.
Times are medians of CUDA graph replays over several weights, so that no weight stays in the cache. `--smoke`
runs tiny shapes on any device (without a GPU under TRITON_INTERPRET=1) and times nothing.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_kernels import captured, replays_ms
from torch import Tensor

from penstock.kernels import language
from penstock.kernels.int4 import (
    SPAN,
    Int4Tile,
    PackedInt4,
    dequantize_int4,
    int4_matmul,
    int4_matmul_reference,
    int4_tile_for,
    num_parts_for,
    pack_int4,
)
from penstock.kernels.language import cdiv
from penstock.layers.int4 import MAX_KERNEL_ROWS

SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate, up": (4096, 24576), "down": (12288, 4096)}
ROWS = (1, 16, 32, 64, 128, 256, 512, 4096)
TILE_ROWS = (1, 16, 32, 64)
GROUP = 128
CACHE_BYTES = 200_000_000  # larger than the device's cache


class Bench:
    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float16 if smoke else torch.bfloat16
        self.shapes = {"tiny": (256, 48)} if smoke else SHAPES
        self.rows = (1, 20) if smoke else ROWS
        self.tile_rows = (1, 20) if smoke else TILE_ROWS
        self.lines: list[str] = []

    def weights(self, inputs: int, outputs: int) -> list[PackedInt4]:
        count = 1 if self.smoke else max(2, CACHE_BYTES // (inputs * outputs // 2))
        groups = (inputs // GROUP, outputs)
        return [
            pack_int4(
                torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=self.device),
                torch.full(groups, 0.2 * inputs**-0.5, dtype=torch.float16, device=self.device),
                torch.randint(0, 16, groups, dtype=torch.uint8, device=self.device),
            )
            for _ in range(count)
        ]

    def us(self, call: Callable[[Any], Tensor], weights: Sequence[Any]) -> float:
        """Microseconds per call, over all weights in turn."""
        if self.smoke:
            call(weights[0])
            return 1.0

        def every() -> None:
            for weight in weights:
                call(weight)

        return 1000 * statistics.median(replays_ms(captured(every, 1), repeats=7)) / len(weights)

    def row(self, *cells: str) -> None:
        self.lines.append(f"| {' | '.join(cells)} |")
        print(self.lines[-1], flush=True)

    def head(self, *names: str) -> None:
        self.lines += ["", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def products(bench: Bench) -> None:
    names = (
        "product",
        "rows",
        "bf16 µs",
        "kernel µs",
        "dequantise + library µs",
        "chosen",
        "× bf16",
        "error",
    )
    bench.head(*names)
    for name, (inputs, outputs) in bench.shapes.items():
        weights = bench.weights(inputs, outputs)
        scratch = torch.empty(outputs, inputs, dtype=bench.dtype, device=bench.device)
        plain = [dequantize_int4(weight, torch.empty_like(scratch)) for weight in weights]

        def by_library(x: Tensor, weight: PackedInt4, scratch: Tensor = scratch) -> Tensor:
            return x @ dequantize_int4(weight, scratch).t()

        for rows in bench.rows:
            x = torch.randn(rows, inputs, device=bench.device).to(bench.dtype)
            bf16 = bench.us(partial(F.linear, x), plain)
            kernel = bench.us(partial(int4_matmul, x), weights)
            library = bench.us(partial(by_library, x), weights)
            is_kernel = rows <= MAX_KERNEL_ROWS
            exact = int4_matmul_reference(x.float(), weights[0])
            error = float((int4_matmul(x, weights[0]).float() - exact).abs().max() / exact.abs().max())
            bench.row(
                f"{name} {inputs} → {outputs}",
                f"{rows:,}",
                *(f"{us:.1f}" for us in (bf16, kernel, library)),
                "kernel" if is_kernel else "library",
                f"{bf16 / (kernel if is_kernel else library):.2f}",
                f"{error:.1e}",
            )


def tiles(bench: Bench) -> None:
    """The three fastest tiles and splits for few rows, and those in use."""
    bench.head("product", "rows", "tile (rows, columns, warps, stages, swap)", "parts", "programs", "µs")
    for (name, (inputs, outputs)), rows in product(bench.shapes.items(), bench.tile_rows):
        weights = bench.weights(inputs, outputs)
        x = torch.randn(rows, inputs, device=bench.device).to(bench.dtype)
        used = int4_tile_for(rows)
        used_form = used, num_parts_for(used, outputs, inputs)
        found: dict[tuple[Int4Tile, int], float] = {}
        for form in dict.fromkeys((used_form, *_candidates(rows, inputs, outputs, bench.smoke))):
            tile, parts = form
            try:
                found[form] = bench.us(partial(int4_matmul, x, tile=tile, parts=parts), weights)
            except Exception as error:  # too much shared memory
                print(f"{tuple(tile)} × {parts}: {type(error).__name__}")
        best = sorted(found, key=lambda form: found[form])[:3]
        for tile, parts in (*best, used_form):
            note = " (in use)" if (tile, parts) == used_form else ""
            bench.row(
                f"{name} {inputs} → {outputs}",
                str(rows),
                f"{tuple(tile)}{note}",
                str(parts),
                str(parts * cdiv(outputs, tile.cols)),
                f"{found[tile, parts]:.1f}",
            )


def _candidates(rows: int, inputs: int, outputs: int, smoke: bool) -> list[tuple[Int4Tile, int]]:
    """Tiles as high as the rows, with the splits that give each of 132 processors a few programs."""
    if smoke:
        return [(Int4Tile(16, 16, 4, 3), 2), (Int4Tile(16, 16, 4, 3, swap=False), 1)]
    used, spans = int4_tile_for(rows), cdiv(inputs, SPAN)
    shapes = [(32, 1), (64, 2), (64, 4), (128, 4)] if used.rows <= 32 else [(64, 2), (128, 4), (256, 8)]
    tiles = [Int4Tile(used.rows, cols, warps, used.stages) for cols, warps in shapes]
    if rows <= 8:
        tiles.append(used._replace(rows=8))
    found = [
        (tile, parts)
        for tile, parts in product(tiles, (1, 2, 3, 4, 6, 8, 12))
        if 190 <= parts * cdiv(outputs, tile.cols) <= 6 * 132
        and cdiv(spans, cdiv(spans, parts)) == parts
        and spans // parts >= 3
    ]
    parts = num_parts_for(used, outputs, inputs)
    return found + [(used._replace(stages=stages), parts) for stages in (3, 4, 6)]


SECTIONS: dict[str, Callable[[Bench], None]] = {section.__name__: section for section in (products, tiles)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="products")
    parser.add_argument("--save", metavar="PATH")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.smoke)
    if options.smoke:
        language.set_kernel_devices("cpu")
    with torch.inference_mode():
        for name in options.only.split(","):
            SECTIONS[name](bench)
    table = "\n".join(bench.lines).strip()
    print(f"\n{table}")
    if options.save:
        device = "no GPU" if options.smoke else torch.cuda.get_device_name()
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        head = f"# 4-bit weights beside bfloat16\n\n{date.today()} · {device} · {versions}\n\n"
        Path(options.save).write_text(f"{head}`python benchmarks/gpu_w4.py --save PATH`\n\n{table}\n")


if __name__ == "__main__":
    main()
