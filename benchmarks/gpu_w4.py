"""4-bit weights compared with bfloat16 on one GPU: the products of Qwen3-8B, for few and for many rows.

    python benchmarks/gpu_w4.py [--only products,tiles] [--save PATH]

`products` times F.linear in bf16, the kernel that dequantises as it multiplies, and dequantising for the
matrix library; `chosen` is what a layer does. `tiles` times other tiles of the kernel. Times are medians of
CUDA graph replays over several weights, so that no weight stays in the cache. `--smoke` runs tiny shapes on
any device (without a GPU under TRITON_INTERPRET=1) and times nothing.
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
    INT4_TILES,
    Int4Tile,
    PackedInt4,
    dequantize_int4,
    int4_matmul,
    int4_matmul_reference,
    pack_int4,
)
from penstock.layers.int4 import MAX_KERNEL_ROWS

SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate, up": (4096, 24576), "down": (12288, 4096)}
ROWS = (1, 16, 64, 128, 256, 512, 4096)
GROUP = 128
CACHE_BYTES = 200_000_000  # more than the device's cache holds


class Bench:
    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float16 if smoke else torch.bfloat16
        self.shapes = {"tiny": (128, 48)} if smoke else SHAPES
        self.rows = (1, 20) if smoke else ROWS
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
        """Microseconds of one call, over all weights in turn."""
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
    """The fastest tiles for few rows. The tiles in use are marked."""
    bench.head("product", "rows", "tile", "µs")
    for (name, (inputs, outputs)), rows in product(bench.shapes.items(), bench.rows):
        if rows > 256:
            continue
        weights = bench.weights(inputs, outputs)
        x = torch.randn(rows, inputs, device=bench.device).to(bench.dtype)
        used = next(tile for most, tile in INT4_TILES if rows <= most)
        found = []
        for tile in {used, *_candidates(rows, bench.smoke)}:
            try:
                found.append((bench.us(partial(int4_matmul, x, tile=tile), weights), tile))
            except Exception as error:  # too much shared memory
                print(f"{tile}: {type(error).__name__}")
        for us, tile in sorted(found, key=lambda entry: entry[0])[:3]:
            bench.row(f"{name} {inputs} → {outputs}", str(rows), f"{tuple(tile)}", f"{us:.1f}")
        bench.row(
            f"{name} {inputs} → {outputs}",
            str(rows),
            f"{tuple(used)} (in use)",
            next(f"{us:.1f}" for us, tile in found if tile == used),
        )


def _candidates(rows: int, smoke: bool) -> list[Int4Tile]:
    if smoke:
        return [Int4Tile(16, 16, 4, 3, swap=True)]
    heights = [height for height in (16, 32, 64, 128) if height <= max(16, 2 * rows)]
    every = product(heights, (16, 32, 64, 128), (2, 4, 8), (3, 4, 5, 6), (True, False))
    return [
        Int4Tile(height, width, warps, stages, swap)
        for height, width, warps, stages, swap in every
        if height * width >= 512 and height * width <= 64 * warps * 64 and (swap or height >= 16)
    ]


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
