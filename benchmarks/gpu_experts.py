"""The experts of Qwen3-30B-A3B on one GPU, in bfloat16 and fp8: correctness, and time beside a lower bound.

    python benchmarks/gpu_experts.py [--only half,fp8,dense] [--tokens 1,128] [--defaults] [--seconds 400]

Device times are medians of CUDA graph replays, each over several sets of tokens, so that weights come from
memory. The lower bound is the time to read the weights of the chosen experts, or to multiply. `--defaults`
tries only the tilings in use; `--smoke` runs tiny shapes on any device (without a GPU under
TRITON_INTERPRET=1) and times nothing.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_kernels import allow_loaded_bounds, captured, replays_ms
from torch import Tensor

from penstock.kernels import experts as kernels
from penstock.kernels import language
from penstock.kernels.activation import ACTIVATION_CODES
from penstock.kernels.blockwise import (
    GROUP,
    BlockQuantized,
    GroupQuantized,
    block_matmul,
    quantize_blocks,
    quantize_groups,
)
from penstock.kernels.experts import (
    ExpertTiling,
    Routes,
    Tile,
    expert_matmul,
    expert_tiling_for,
    route,
    route_reference,
    run_experts,
)
from penstock.kernels.quantize import FP8
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.moe import ExpertShape, SparseMLP, _product

TOKENS = (1, 16, 64, 128, 512, 4096, 8192)
SETS = 4  # sets of tokens, used in turn
BYTES_A_S = 4.3e12  # memory bandwidth of an H200
FLOPS_A_S = {"half": 8e14, "fp8": 1.6e15}  # reached by its tensor cores in practice
DENSE = {"qkv": (2048, 5120), "out": (4096, 2048)}

# Tiles to try besides those in use, by rows per tile: for the first and for the second product.
HALF_TILES: dict[int, tuple[tuple[Tile, ...], tuple[Tile, ...]]] = {
    16: (
        (
            Tile(64, 64, 4, 5, True),
            Tile(64, 64, 4, 8, True),
            Tile(64, 128, 4, 3, True),
            Tile(64, 128, 4, 5, True),
            Tile(64, 256, 4, 2, True),
            Tile(128, 64, 4, 4, True),
            Tile(128, 64, 8, 5, True),
            Tile(32, 128, 4, 4),
            Tile(64, 128, 4, 3),
        ),
        (
            Tile(64, 64, 4, 6, True),
            Tile(64, 128, 4, 3, True),
            Tile(64, 128, 4, 5, True),
            Tile(64, 256, 4, 3, True),
            Tile(128, 128, 4, 3, True),
            Tile(128, 128, 8, 4, True),
            Tile(64, 128, 4, 4),
        ),
    ),
    32: (
        (Tile(64, 64, 4, 5, True), Tile(64, 128, 4, 4, True), Tile(128, 64, 8, 4, True)),
        (Tile(64, 128, 4, 3, True), Tile(128, 64, 4, 5, True), Tile(128, 128, 8, 3, True)),
    ),
    64: (
        (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 64, 4, 3, True)),
        (Tile(128, 64, 4, 3), Tile(128, 128, 4, 3), Tile(128, 64, 8, 4), Tile(64, 128, 4, 4)),
    ),
    128: (
        (Tile(128, 64, 8, 4), Tile(64, 64, 8, 4), Tile(64, 64, 4, 4), Tile(128, 32, 8, 4)),
        (Tile(128, 64, 8, 3), Tile(128, 64, 4, 4), Tile(128, 128, 8, 3), Tile(64, 64, 4, 4)),
    ),
}
FP8_TILES: dict[int, tuple[tuple[Tile, ...], tuple[Tile, ...]]] = {
    16: (
        (
            Tile(128, GROUP, 4, 3, True),
            Tile(128, GROUP, 4, 5, True),
            Tile(128, GROUP, 8, 4, True),
            Tile(64, GROUP, 4, 3, True),
            Tile(64, GROUP, 4, 4, True),
            Tile(64, GROUP, 4, 6, True),
            Tile(64, GROUP, 4, 4),
        ),
        (
            Tile(64, GROUP, 4, 3, True),
            Tile(64, GROUP, 4, 6, True),
            Tile(128, GROUP, 4, 3, True),
            Tile(128, GROUP, 4, 5, True),
            Tile(128, GROUP, 8, 4, True),
        ),
    ),
    32: (
        (Tile(128, GROUP, 4, 3, True), Tile(128, GROUP, 8, 4, True), Tile(64, GROUP, 4, 4, True)),
        (Tile(64, GROUP, 4, 3, True), Tile(128, GROUP, 4, 4, True), Tile(128, GROUP, 8, 4, True)),
    ),
    64: (
        (Tile(128, GROUP, 4, 3), Tile(128, GROUP, 8, 4), Tile(128, GROUP, 8, 3, True), Tile(64, GROUP, 4, 4)),
        (Tile(128, GROUP, 4, 3), Tile(128, GROUP, 8, 4), Tile(64, GROUP, 4, 4)),
    ),
    128: (
        (Tile(128, GROUP, 8, 2), Tile(128, GROUP, 8, 4), Tile(64, GROUP, 8, 3), Tile(64, GROUP, 4, 3)),
        (Tile(128, GROUP, 8, 4), Tile(128, GROUP, 4, 3), Tile(64, GROUP, 4, 4)),
    ),
}


class Sizes(NamedTuple):
    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    chosen: int = 8


class Bench:
    def __init__(self, smoke: bool, seconds: float) -> None:
        self.smoke = smoke
        self.deadline = time.perf_counter() + seconds  # no more tiles are tried after this time
        self.device = torch.device("cpu" if smoke else "cuda")
        self.dtype = torch.float32 if smoke else torch.bfloat16
        self.sizes = Sizes(256, 128, 8, 2) if smoke else Sizes()
        self.lines: list[str] = []
        self.failed: list[str] = []
        torch.manual_seed(0)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale

    def us(self, name: str, calls: list[Callable[[], Any]]) -> float:
        """Mean microseconds per call; infinite if the calls fail."""

        def work() -> None:
            for call in calls:
                call()

        try:
            if self.smoke:
                work()
                return 1.0
            return statistics.median(replays_ms(captured(work, 1), repeats=7)) * 1000 / len(calls)
        except Exception as error:
            if self.smoke:
                raise
            self.failed.append(f"{name}: {type(error).__name__} {str(error).splitlines()[0][:70]}")
            torch.cuda.synchronize()
            return float("inf")

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)


def short(tile: Tile) -> str:
    return f"{tile.cols}×{tile.depth} w{tile.warps} s{tile.stages}{' swap' if tile.swap else ''}"


class Layer(NamedTuple):
    router: Tensor
    gate_up: Tensor | BlockQuantized
    down: Tensor | BlockQuantized


def make_layer(bench: Bench, form: str) -> Layer:
    hidden, inner, experts, _ = bench.sizes
    router = bench.random(experts, hidden, scale=hidden**-0.5)
    made: list[Tensor | BlockQuantized] = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        weights = [bench.random(outputs, inputs, scale=inputs**-0.5) for _ in range(experts)]
        if form == "fp8":
            blocks = [quantize_blocks(weight) for weight in weights]
            made.append(
                BlockQuantized(
                    torch.stack([b.values.view(torch.uint8) for b in blocks]).view(FP8),
                    torch.stack([b.scales for b in blocks]),
                )
            )
        else:
            made.append(torch.stack(weights))
    return Layer(router, *made)


def reference(bench: Bench, layer: Layer, x: Tensor, logits: Tensor) -> Tensor:
    shares, taken = route_reference(logits, bench.sizes.chosen, True)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(bench.sizes.experts):
        token, nth = (taken == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = _product(x[token], layer.gate_up, expert, halves=2).chunk(2, dim=1)
            said = _product(F.silu(gate) * up, layer.down, expert)
            out.index_add_(0, token, said.float() * shares[token, nth, None])
    return out


def check(bench: Bench, layer: Layer, x: Tensor, plan: ExpertTiling) -> float:
    """The smallest cosine of a token between the result and the reference."""
    logits = F.linear(x.float(), layer.router.float())  # fp32, so that no two experts tie
    options: dict[str, Any] = {"chosen": bench.sizes.chosen, "normalize": True, "act": "silu"}
    got = run_experts(x, logits, layer.gate_up, layer.down, **options, plan=plan)
    again = run_experts(x, logits, layer.gate_up, layer.down, **options, plan=plan)
    if not torch.equal(got, again):
        bench.failed.append(f"{len(x)} tokens: two runs differ")
    return float(F.cosine_similarity(got.float(), reference(bench, layer, x, logits)).min())


def floor_us(bench: Bench, layer: Layer, xs: list[Tensor], form: str) -> float:
    hidden, inner, _, chosen = bench.sizes
    each = 3 * hidden * inner * (1 if form == "fp8" else 2)
    touched = [len(route_reference(F.linear(x, layer.router), chosen, True)[1].unique()) for x in xs]
    read = statistics.mean(touched) * each / BYTES_A_S
    return max(read, 6 * len(xs[0]) * chosen * hidden * inner / FLOPS_A_S[form]) * 1e6


class Parts(NamedTuple):
    """Inputs and outputs of the products for one set of tokens."""

    x: Tensor
    early: GroupQuantized | None
    routes: Routes
    plain: Tensor
    grouped: GroupQuantized | None
    said: Tensor


def parts_of(bench: Bench, layer: Layer, x: Tensor, rows: int, form: str) -> Parts:
    hidden, inner, _, chosen = bench.sizes
    slots, fp8 = len(x) * chosen, form == "fp8"
    plain = bench.random(slots, inner)
    return Parts(
        x,
        quantize_groups(x) if fp8 else None,
        route(F.linear(x, layer.router), chosen, True, rows),
        plain,
        quantize_groups(plain) if fp8 else None,
        torch.empty((slots, hidden), dtype=x.dtype, device=x.device),
    )


def best_plan(
    bench: Bench, layer: Layer, xs: list[Tensor], rows: int, form: str, used: ExpertTiling
) -> ExpertTiling:
    """The fastest candidate with this number of rows per tile, by the time of each product."""
    ups, downs = (FP8_TILES if form == "fp8" else HALF_TILES)[rows]
    if rows == used.rows:
        ups, downs = (used.up, *ups), (used.down, *downs)
    chosen, silu, name = bench.sizes.chosen, ACTIVATION_CODES["silu"], f"{form} {len(xs[0])}×{rows}"
    sets = [parts_of(bench, layer, x, rows, form) for x in xs]
    first: dict[tuple[Tile, bool], float] = {}
    wide = form == "fp8" and rows >= 64  # wide tiles always quantise their rows early
    for tile in dict.fromkeys(ups):
        if bench.late() and first:
            break
        for early in (True,) if wide else (False, True) if form == "fp8" else (False,):

            def up(part: Parts, tile: Tile = tile, early: bool = early) -> None:
                into = part.plain if form != "fp8" or tile.cols < GROUP else part.grouped
                rows_in = part.early if early else part.x
                expert_matmul(rows_in, layer.gate_up, into, part.routes, rows, tile, chosen, silu)

            label = f"{name} up {short(tile)} {'early' if early else ''}"
            first[tile, early] = bench.us(label, [lambda part=part, up=up: up(part) for part in sets])
    second: dict[tuple[Tile, bool], float] = {}
    for tile in dict.fromkeys(downs):
        if bench.late() and second:
            break
        for early in (False, True) if form == "fp8" else (False,):

            def down(part: Parts, tile: Tile = tile, early: bool = early) -> None:
                given = part.grouped if early else part.plain
                expert_matmul(given, layer.down, part.said, part.routes, rows, tile, chosen, None)

            label = f"{name} down {short(tile)} {'early' if early else ''}"
            second[tile, early] = bench.us(label, [lambda part=part, down=down: down(part) for part in sets])
    passing = (
        bench.us("quantise", [lambda part=part: quantize_groups(part.x) for part in sets])
        if form == "fp8"
        else 0
    )

    def total(up: tuple[Tile, bool], down: tuple[Tile, bool]) -> float:
        return first[up] + second[down] + (passing if up[1] else 0)

    pairs = [
        (up, down) for up in first for down in second if form != "fp8" or down[1] == (up[0].cols == GROUP)
    ]
    up, down = min(pairs, key=lambda pair: total(*pair))
    shown = [
        " | ".join(
            f"{short(tile)}{' early' if early else ''} {times[tile, early]:.0f}" for tile, early in order
        )
        for times in (first, second)
        for order in [sorted(times, key=lambda key: times[key])[:3]]
    ]
    bench.say(f"    rows {rows}: up {shown[0]} || down {shown[1]}")
    return ExpertTiling(rows, up[0], down[0], up[1])


def block(bench: Bench, form: str, counts: list[int], *, only_used: bool) -> None:
    layer, sizes = make_layer(bench, form), bench.sizes
    shape = ExpertShape(sizes.experts, sizes.chosen, sizes.inner, True)
    mlp = SparseMLP(*layer, shape, "silu")
    bench.say(
        f"{form}: tokens | least cosine | library µs | kernels µs | best µs (plan) | floor µs | "
        "route (ordered, counted) | sum"
    )
    for tokens in counts:
        xs = [bench.random(tokens, sizes.hidden) for _ in range(SETS)]
        used = expert_tiling_for(tokens, sizes.chosen, sizes.experts, fp8=form == "fp8")
        try:
            near = check(bench, layer, xs[0][:2048], used)
        except Exception as error:
            bench.failed.append(f"{form} {tokens}: {type(error).__name__} {str(error).splitlines()[0][:80]}")
            near = float("nan")
        ours = bench.us(f"{form} {tokens} block", [partial(mlp, x) for x in xs])
        library = float("nan")
        if form == "half" and not bench.smoke:
            language.set_kernel_devices()
            library = bench.us(f"{tokens} library", [partial(mlp, x) for x in xs])
            language.set_kernel_devices("cuda")
        logits = [F.linear(x, layer.router) for x in xs]
        routes = [partial(route, one, sizes.chosen, True, used.rows) for one in logits]
        routing = bench.us("route", routes)
        apart = [bench.us(f"route {way}", routes) for way in _routing_ways(tokens * sizes.chosen)]
        best, plan = ours, used
        if not only_used:
            nearby = {used.rows, max(16, used.rows // 2)} if tokens > 128 else {used.rows}
            for rows in [] if bench.late() else sorted(nearby):
                found = best_plan(bench, layer, xs, rows, form, used)
                took = bench.us(
                    f"{form} {tokens} {found}", [partial(mlp_by, bench, layer, x, found) for x in xs]
                )
                if took < best:
                    best, plan = took, found
        said = f"{plan.rows}: {short(plan.up)}{' early' if plan.early else ''} / {short(plan.down)}"
        least = floor_us(bench, layer, xs, form)
        bench.say(
            f"  {tokens:>5} | {near:.5f} | {library:.0f} | {ours:.0f} | {best:.0f} ({said}) | {least:.0f} | "
            f"{routing:.1f} ({', '.join(f'{each:.1f}' for each in apart)}) | {_sum_us(bench, tokens):.1f}"
        )


def _routing_ways(slots: int) -> Iterator[str]:
    """Force each routing method that supports this many slots in turn, and yield its name."""
    limit = kernels._MAX_ORDERED_SLOTS
    try:
        for way, most in {"ordered": limit, "counted": 0}.items():
            if way == "counted" or slots <= most:
                kernels._MAX_ORDERED_SLOTS = most
                yield way
    finally:
        kernels._MAX_ORDERED_SLOTS = limit


def mlp_by(bench: Bench, layer: Layer, x: Tensor, plan: ExpertTiling) -> Tensor:
    return run_experts(
        x,
        F.linear(x, layer.router),
        layer.gate_up,
        layer.down,
        chosen=bench.sizes.chosen,
        normalize=True,
        act="silu",
        plan=plan,
    )


def _sum_us(bench: Bench, tokens: int) -> float:
    hidden, chosen = bench.sizes.hidden, bench.sizes.chosen
    said, out = bench.random(tokens * chosen, hidden), bench.random(tokens, hidden)
    return bench.us("sum", [lambda: kernels.sum_expert_outputs(said, None, out, chosen)] * SETS)


def dense(bench: Bench, counts: list[int], **_: Any) -> None:
    bench.say("dense: product, tokens | bf16 µs | fp8 by rows µs | fp8 in blocks µs | cosine of blocks")
    for name, (inputs, outputs) in DENSE.items():
        inputs, outputs = (256, 128) if bench.smoke else (inputs, outputs)
        weights = [bench.random(outputs, inputs, scale=inputs**-0.5) for _ in range(SETS)]
        rows, blocks = [Fp8Linear(w, None) for w in weights], [quantize_blocks(w) for w in weights]
        for tokens in counts:
            x = bench.random(tokens, inputs)
            times = [
                bench.us(f"{name} {tokens} bf16", [partial(F.linear, x, w) for w in weights]),
                bench.us(f"{name} {tokens} rows", [partial(r, x) for r in rows]),
                bench.us(f"{name} {tokens} blocks", [partial(block_matmul, x, b) for b in blocks]),
            ]
            near = F.cosine_similarity(block_matmul(x, blocks[0]).float(), F.linear(x, weights[0]).float())
            said = " | ".join(f"{one:.1f}" for one in times)
            bench.say(f"  {name} {tokens:>5} | {said} | {float(near.min()):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="half,fp8,dense")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--seconds", type=float, default=400, help="time limit for trying other tiles")
    parser.add_argument("--save", metavar="PATH")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.smoke, options.seconds)
    if options.smoke:
        allow_loaded_bounds()
        language.set_kernel_devices("cpu")
    counts = [3, 40] if options.smoke else [int(count) for count in options.tokens.split(",")]
    began = time.perf_counter()
    with torch.inference_mode():
        for name in options.only.split(","):
            try:
                if name == "dense":
                    dense(bench, counts)
                else:
                    block(bench, name, counts, only_used=options.defaults)
            except Exception as error:
                if options.smoke:
                    raise
                bench.failed.append(f"{name}: {type(error).__name__} {error}"[:200])
            if not options.smoke:
                torch.cuda.empty_cache()
    print(f"took {time.perf_counter() - began:.0f} s; {len(bench.failed)} did not run")
    for line in bench.failed[:12]:
        print("  ", line)
    if options.save:
        device = "no GPU" if options.smoke else torch.cuda.get_device_name()
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        head = f"# Experts\n\n{date.today()} · {device} · {versions}\n"
        Path(options.save).write_text(head + "\n```\n" + "\n".join(bench.lines) + "\n```\n")


if __name__ == "__main__":
    main()
