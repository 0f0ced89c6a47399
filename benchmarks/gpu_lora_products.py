"""The time that adapters add to one linear layer, as separate launches and inside the product.

    python benchmarks/gpu_lora_products.py [--rank 16] [--tokens 2048 16384] [--length 32]

Each product runs in a CUDA graph of several copies with different inputs. The table has microseconds for the
product alone, for separate launches of the adapters in tiles of 16 and of 64 lines, and for adapters inside
the product in tiles of 128 and of 256 columns. Further columns name the variant that a step of this size
uses, and the largest differences to the reference in fp32, relative to the largest value.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.lora import (
    LARGE_TILE,
    SMALL_TILE,
    LineTiles,
    LowRank,
    expand_,
    expand_gated,
    rank_bucket,
    shrink,
    tile_lines_for,
)
from penstock.kernels.lora_linear import LoraLinear, lora_linear_reference
from penstock.layers.adapter_lines import plan_lines
from penstock.layers.linear import Linear

SLOTS = 64
COPIES, ROUNDS = 6, 9
# Name, inputs, outputs of each part, activation, whether the first half is a gate.
LAYERS: tuple[tuple[str, int, tuple[int, ...], str | None, bool | None], ...] = (
    ("bge-base qkv", 768, (768, 768, 768), None, None),
    ("bge-base out", 768, (768,), None, None),
    ("bge-base up", 768, (3072,), "gelu", None),
    ("bge-base down", 3072, (768,), None, None),
    ("qwen3-0.6b qkv", 1024, (2048, 1024, 1024), None, None),
    ("qwen3-0.6b out", 2048, (1024,), None, None),
    ("qwen3-0.6b gate_up", 1024, (3072, 3072), "silu", True),
    ("qwen3-0.6b down", 3072, (1024,), None, None),
)


def microseconds(work: Callable[[Tensor], object], inputs: list[Tensor]) -> float:
    for x in inputs:
        work(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work(x) for x in inputs for _ in range(4)]
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / len(kept))
    return statistics.median(times)


def row(layer: tuple, tokens: int, length: int, rank: int) -> str:
    name, inner, sizes, act, gate_first = layer
    outputs, bucket = sum(sizes), rank_bucket(rank)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).bfloat16()

    weight = random(outputs, inner, scale=inner**-0.5)
    bias = None if name.startswith("qwen") else random(outputs)
    ranks = torch.full((SLOTS, len(sizes)), rank, dtype=torch.int32, device="cuda")
    low = LowRank(
        random(SLOTS, len(sizes) * bucket, inner, scale=inner**-0.5),
        random(SLOTS, outputs, bucket, scale=0.3),
        ranks,
        tuple(np.cumsum(sizes).tolist()),
    )
    low.down.view(SLOTS, len(sizes), bucket, inner)[:, :, rank:] = 0
    low.up[:, :, rank:] = 0
    runs = tokens // length
    run_slots, lengths = (np.arange(runs) % SLOTS).astype(np.int32), np.full(runs, length, dtype=np.int32)
    plans = [plan_lines(run_slots, lengths, size) for size in (SMALL_TILE, LARGE_TILE)]
    slots = torch.from_numpy(plans[0].slots).cuda()
    tilings = [
        LineTiles(
            torch.from_numpy(plan.order).cuda(),
            torch.from_numpy(plan.tiles).view(-1, 3).cuda(),
            plan.tile_lines,
        )
        for plan in plans
    ]
    plain = Linear(weight, bias)
    base = plain if gate_first is not None or act is None else Linear(weight, bias, act)
    fused = LoraLinear.of(weight, bias, low.ends, act, gate_first)
    assert fused is not None

    def separate(x: Tensor, tiled: LineTiles) -> Tensor:
        y = plain(x)
        small = shrink(x, low, tiled, bucket)
        if gate_first is not None and act is not None:
            return expand_gated(y, small, low, tiled, act, gate_first=gate_first)
        return expand_(y, small, low, tiled, act)

    x = random(tokens, inner)
    far = low._replace(down=low.down.float(), up=low.up.float())
    reference = lora_linear_reference(
        x.float(), weight.float(), None if bias is None else bias.float(), far, slots, act, gate_first
    )
    forms = [
        *[lambda x, tiled=tiled: separate(x, tiled) for tiled in tilings],
        *[
            lambda x, cols=cols: fused(x, low, slots, bucket, cols=cols)
            for cols in fused.column_choices(bucket)
        ],
    ]
    errors = [((form(x).float() - reference).abs().max() / reference.abs().max()).item() for form in forms]
    inputs = [random(tokens, inner) for _ in range(COPIES)]
    times = [microseconds(form, inputs) for form in (base, *forms)]
    chosen = f"{tile_lines_for(tokens)} lines, {fused.columns(tokens, bucket)} columns"
    cells = " | ".join(f"{time:.1f}" for time in times)
    return f"| {name} | {tokens} × {length} | {cells} | {chosen} | {' '.join(f'{e:.4f}' for e in errors)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--length", type=int, nargs="+", default=[32, 256])
    options = parser.parse_args()
    titles = ("layer", "step", "product", "separate, 16", "separate, 64", "inside, 128", "inside, 256")
    print(f"| {' | '.join(titles)} | chosen | errors |")
    print("|---|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for tokens, length in zip(options.tokens, options.length, strict=True):
            for layer in LAYERS:
                print(row(layer, tokens, length, options.rank), flush=True)


if __name__ == "__main__":
    main()
