"""The cost of LoRA adapters on one GPU: tokens per second with 1, 8 and 64 adapters mixed in each batch.

    python benchmarks/gpu_lora.py FOLDER [FOLDER…] [--rank 16] [--targets default|attention|all]
        [--variant fused|separate] [--shapes 64x32 64x256 128x128] [--save]

Folders need only a configuration and a tokenizer; weights and adapters are random. Each shape of step runs in
alternating rounds: on a model without LoRA support, on one with LoRA support but no adapters, and with
adapters. The table has medians, and ratios to the first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from penstock import Engine
from penstock.engine.loop import EngineCore
from penstock.layers import adapted_linear
from penstock.layers.lora import AdapterSites
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolPlan, Request

SHAPES = ((64, 32), (64, 256), (128, 128))
COUNTS = (1, 8, 64)
DEFAULT = ("query", "value", "q_proj", "v_proj")  # PEFT's default targets for these models
ATTENTION = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "o_proj", "Wqkv", "qkv_proj")
ROUNDS, STEPS = 7, 40


def write_adapter(folder: Path, sites: AdapterSites, rank: int, targets: str, seed: int) -> None:
    """A random adapter in PEFT's layout."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (layer, part) in sites.layers.items():
        chosen = {"default": DEFAULT, "attention": ATTENTION}.get(targets)
        if chosen is not None and name.rpartition(".")[2] not in chosen:
            continue
        pair = (rank, layer.in_features), (layer.part_size(part), rank)
        for letter, shape in zip("AB", pair, strict=True):
            values = 0.02 * torch.randn(shape, generator=draw)
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def plan_of(rows: int, length: int, first_id: int, count: int) -> PoolPlan:
    """A step whose rows use `count` adapters in turn; 0: no adapters."""
    tokens = np.random.default_rng(0).integers(1000, 20000, rows * length).astype(np.int32)
    request = Request("bench", tokens, np.full(rows, length, dtype=np.int32))
    if count:
        request.adapters = (first_id + np.arange(rows) % count).astype(np.int32)
    return build_plan([ScheduledRows(request, np.arange(rows, dtype=np.int32))])


def tokens_per_s(core: EngineCore, plan: PoolPlan) -> float:
    """Run steps back to back, with as many in flight as the engine allows."""
    in_flight: deque[Callable[[], object]] = deque()
    began = time.perf_counter()
    for _ in range(STEPS):
        if len(in_flight) >= core.depth:
            in_flight.popleft()()
        in_flight.append(core.runner.launch(plan).result)
    for wait in in_flight:
        wait()
    return STEPS * plan.num_tokens / (time.perf_counter() - began)


def measure(folder: str, rank: int, targets: str, shapes: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    options = {"device": "cuda", "load_format": "dummy", "enable_generation": False}
    lora = {"enable_lora": True, "max_loras": max(COUNTS), "max_lora_rank": rank}
    with tempfile.TemporaryDirectory() as temporary, Engine(folder, **options) as plain:  # noqa: SIM117
        with Engine(folder, **options, **lora) as adapted:
            cores = plain.local.engine.core, adapted.local.engine.core
            sites: AdapterSites = cores[1].runner.model.adapter_sites
            first_id = 1000
            began = time.perf_counter()
            for number in range(max(COUNTS)):
                place = Path(temporary) / str(number)
                write_adapter(place, sites, rank, targets, number)
                cores[1].load_adapter(first_id + number, str(place), place.name).result(600)
            loaded_s = (time.perf_counter() - began) / max(COUNTS)
            for rows, length in shapes:
                cases = [(cores[0], plan_of(rows, length, first_id, 0))]
                cases += [(cores[1], plan_of(rows, length, first_id, count)) for count in (0, *COUNTS)]
                for core, plan in cases:  # compile, copy the adapters, capture
                    for _ in range(8):
                        core.runner.launch(plan).result()
                rates: list[list[float]] = [[] for _ in cases]
                for _ in range(ROUNDS):
                    for own, (core, plan) in zip(rates, cases, strict=True):
                        own.append(tokens_per_s(core, plan))
                medians = [statistics.median(own) for own in rates]
                shares = " | ".join(f"{median / medians[0]:.3f}" for median in medians[1:])
                name = Path(folder).name
                yield f"| {name} | {rows} × {length} | {medians[0] / 1000:,.0f} | {shares} |"
            yield f"| {Path(folder).name} | an adapter written and loaded in {loaded_s:.2f} s | | | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", choices=("default", "attention", "all"), default="default")
    parser.add_argument("--variant", choices=("fused", "separate"), default="fused")
    parser.add_argument("--shapes", nargs="+", default=[f"{rows}x{length}" for rows, length in SHAPES])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    adapted_linear.FUSES_PRODUCTS = options.variant == "fused"
    shapes = tuple((int(rows), int(length)) for rows, length in (each.split("x") for each in options.shapes))
    lines = [
        "| model | step | no adapters, thousand tokens/s | none in the batch | 1 adapter | 8 | 64 |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for folder in options.folders:
        for line in measure(folder, options.rank, options.targets, shapes):
            print(line, flush=True)  # immediately: the time on a lent machine may end
            lines.append(line)
    if options.save:
        name = torch.cuda.get_device_name()
        versions = f"Python {platform.python_version()} · torch {torch.__version__}"
        about = (
            f"rank {options.rank}, targets {options.targets}, {ROUNDS} alternating rounds of {STEPS} steps"
        )
        head = f"# LoRA adapters\n\n{date.today()} · {name} · {versions} · {about}\n\n"
        command = "`python benchmarks/gpu_lora.py FOLDER… --save`\n\n"
        target = Path(__file__).parent / "results" / "lora.md"
        target.parent.mkdir(exist_ok=True)
        target.write_text(head + command + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
