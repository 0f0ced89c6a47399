"""Host time of an eager step in µs: the launches of the model and the plan of the step.

Needs no GPU: launches do nothing and products only allocate their output, so only Penstock's host work is
measured. The models have all their layers, but narrow ones, because host time does not depend on the width.

python benchmarks/host_cost.py [--rounds N] [--save FILE.json] [--against FILE.json]
"""

# ruff: noqa: E402 — the lines before the imports decide what the imported modules define

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

torch.cuda.is_available = lambda: True  # so that the kernels are defined
torch.Tensor.is_cuda = True  # type: ignore[assignment, method-assign, misc]

from penstock.kernels import gate_up, language, launch, norm
from penstock.kernels.attention import flash_attention
from penstock.layers import build
from penstock.layers.attention import attend_fused
from penstock.layers.batch import Batch
from penstock.layers.build import LayerBuilder
from penstock.layers.linear import Linear
from penstock.models.decoder import qwen3
from penstock.models.encoder import bert, roberta
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Budget, ScheduledRows, Scheduler
from penstock.scheduler.vector_cache import VectorCache
from penstock.types import PoolingParams, Request, Task

gate_up.num_programs = lambda device: 0  # there is no device to query
TOKENS = 4096
LENGTHS = [2, 2, 70, 70]
BERT = {
    "hidden_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 192,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
XLMR = BERT | {
    "hidden_size": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 256,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
}
QWEN3 = {
    "hidden_size": 64,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 192,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "is_causal": True,
}
MODELS = {"BERT-base": (bert, BERT), "XLM-R-large": (roberta, XLMR), "Qwen3-0.6B": (qwen3, QWEN3)}


class Zeros:
    """A weight source of zeros."""

    dtype, device = torch.bfloat16, torch.device("cpu")

    def fuse(self, names: list[str], outputs: Any, inputs: int | None = None) -> torch.Tensor:
        rows = outputs * len(names) if isinstance(outputs, int) else sum(outputs)
        return self.take("", *((rows,) if inputs is None else (rows, inputs)))

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def prefix_of(self, name: str) -> str:
        return ""

    def has(self, name: str) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the models here are not expected to ask for {name!r}")


class Nothing:
    """A compiled kernel whose launch accepts any arguments and does nothing."""

    packed_metadata, function = (1,), 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    launch = "".format  # implemented in C, like the real launch

    @property
    def run(self) -> Nothing:
        return self


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def added_product(
    bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1])) if out is None else out


def bare_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[1])) if out is None else out


def take_launches() -> None:
    launch.Kernel.run = lambda self, *args, **options: Nothing()  # type: ignore[method-assign]
    launch.current_device_and_stream = lambda: (0, 0)  # type: ignore[assignment]
    F.linear = product  # type: ignore[assignment]
    torch.mm = bare_product  # type: ignore[assignment]
    torch.addmm = torch._addmm_activation = added_product  # type: ignore[assignment, misc]
    language.set_kernel_devices("cuda", "cpu")
    build.make_linear = lambda weight, bias, act, quantization: Linear(weight, bias, act)


def clock(run: Callable[[], object], rounds: int) -> float:
    """Microseconds per call: the 10th percentile, because other processes can only add time."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - began)
    return sorted(times)[len(times) // 10] / 1000


def ints(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


def batch_of(lengths: list[int]) -> Batch:
    request = Request("", np.zeros(sum(lengths), dtype=np.int32), np.array(lengths, dtype=np.int32))
    plan = build_plan([ScheduledRows(request, np.arange(len(lengths), dtype=np.int32))])
    tokens, rows = plan.num_tokens, plan.num_rows
    return Batch(
        token_ids=ints(tokens),
        positions=ints(tokens),
        type_ids=None,
        cu_lengths=ints(rows + 1),
        lengths=ints(rows),
        skip=None,
        groups=plan.groups,
        max_length=plan.max_length,
        num_tokens=tokens,
        num_rows=rows,
        reuses_buffers=True,
    )


@torch.inference_mode()
def models(rounds: int) -> dict[str, float]:
    found = {}
    for name, (make, config) in MODELS.items():
        model = make(LayerBuilder(Zeros()), config, None)  # type: ignore[arg-type]
        batch = batch_of(LENGTHS)
        found[f"{name}, one step"] = clock(lambda model=model, batch=batch: model(replace(batch)), rounds)
    return found


@torch.inference_mode()
def parts(rounds: int) -> dict[str, float]:
    """Each launch in a layer of XLM-R-large."""
    batch, rounds = batch_of(LENGTHS), rounds * 20
    model = roberta(LayerBuilder(Zeros()), XLMR, None)  # type: ignore[arg-type]
    layer = model.layers[0]
    hidden, wide, qkv = (Zeros().take("", sum(LENGTHS), width) for width in (64, 256, 192))
    weight, own = hidden[0], qkv.view(len(qkv), 3, 16, 4).unbind(1)
    return {
        "linear": clock(lambda: layer.out(hidden), rounds),
        "linear with GELU": clock(lambda: layer.mlp.up(hidden), rounds),
        "linear back": clock(lambda: layer.mlp.down(wide), rounds),
        "add_norm": clock(
            lambda: norm.add_norm(hidden, hidden, weight, weight, 1e-5, rms=False, keep=False), rounds
        ),
        "flash_rows": clock(
            lambda: flash_attention(*own, batch.cu_lengths, max_length=70, scale=0.125, out=hidden), rounds
        ),
        "attention": clock(lambda: attend_fused(qkv, 16, batch), rounds),
        "layer": clock(lambda: layer(hidden, hidden, batch, None), rounds),
    }


def scores(rounds: int) -> dict[str, float]:
    """Steps of 4,096 tokens while 64 requests wait, each with a query and a document for late interaction."""
    rng, numbers = np.random.default_rng(0), count()
    params = PoolingParams(task=Task.SCORE, late=True)
    cache = VectorCache(1 << 16, documents=True, reuse=False)
    scheduler = Scheduler(Budget(TOKENS, 1024, 1 << 24), vector_cache=cache)
    spent: dict[str, list[int]] = {"joining": [], "filling a step": [], "its plan": [], "ending": []}

    def join() -> int:
        lengths = np.array([32, rng.integers(1900, 2030)], dtype=np.int32)
        ids = rng.integers(5, 250000, int(lengths.sum()), dtype=np.int32)
        keep = (ids % 10 > 0).astype(np.int32)  # as if punctuation were dropped
        pairs = np.zeros(1, dtype=np.int32)
        request = Request(str(next(numbers)), ids, lengths, params, token_mask=keep, pairs=pairs)
        began = time.perf_counter_ns()
        scheduler.add(request)
        return time.perf_counter_ns() - began

    for _ in range(64):
        join()
    for _ in range(rounds):
        at = [time.perf_counter_ns()]
        shares = scheduler.schedule()
        at.append(time.perf_counter_ns())
        build_plan(shares)
        at.append(time.perf_counter_ns())
        ended = [share.request for share in shares if scheduler.queue.find(share.request.id) is None]
        for request in ended:
            scheduler.finish(request, succeeded=True)
        at.append(time.perf_counter_ns())
        for name, began, end in zip(list(spent)[1:], at, at[1:], strict=False):
            spent[name].append(end - began)
        spent["joining"].append(sum(join() for _ in ended))
    found = {name: sorted(times)[len(times) // 10] / 1000 for name, times in spent.items()}
    return found | {"all four": sum(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    take_launches()
    found = {
        "model": models(options.rounds),
        "launch": parts(options.rounds),
        "plan": scores(options.rounds * 5),
    }
    before = json.loads(options.against.read_text()) if options.against else {}
    for stage, figures in found.items():
        for name, us in figures.items():
            was = before.get(stage, {}).get(name)
            print(f"{stage:8}{name:28}{us:10.1f}" + (f"{was:10.1f}{us / was:8.2f}" if was else ""))
    if options.save:
        options.save.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
