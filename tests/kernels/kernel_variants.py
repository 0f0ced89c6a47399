"""Print, as JSON, the kernel variants that eager steps of natural texts launch but warm-up does not compile.

Needs no GPU: launches only record for which argument types and alignments Triton would compile. It changes
torch for the whole process, so a test runs it in a process of its own:
`python -m tests.kernels.kernel_variants`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks import host_cost
from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels import launch
from penstock.layers.build import LayerBuilder
from penstock.pooling.build import Pooler
from penstock.runner import warmup
from penstock.runner.model_runner import ModelRunner
from penstock.runner.staging import Staging
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import PoolingParams, PoolPlan, Request

METHODS = {"BERT-base": "cls", "Qwen3-0.6B": "last"}


def sent_as_slices(staging: Staging, arrays: list[Any]) -> Any:
    """Send arrays as to a device: they become slices of one buffer, so most of them are not aligned."""
    sizes = [len(array) for array in arrays]
    return torch.from_numpy(np.concatenate(arrays)).split_with_sizes(sizes)


def class_of(value: Any, is_unspecialized: bool) -> str:
    """The class of an argument for which Triton compiles a variant."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{'' if is_unspecialized or value.data_ptr() % 16 == 0 else ', not aligned'}"
    if type(value) is int and not is_unspecialized:
        return "1" if value == 1 else "16 n" if value % 16 == 0 else "int"
    return type(value).__name__


def natural_plan(draw: np.random.Generator, rows: int) -> PoolPlan:
    shares = []
    for number, length in enumerate(draw.lognormal(np.log(64), 1.0, rows).astype(int).clip(1, 512).tolist()):
        request = Request(str(number), np.ones(length, np.int32), np.array([length], np.int32))
        shares.append(ScheduledRows(request, np.zeros(1, np.int32)))
    return build_plan(shares)


def runner_of(name: str) -> ModelRunner:
    make, config = host_cost.MODELS[name]
    model = make(LayerBuilder(host_cost.Zeros()), config | {"num_hidden_layers": 2}, None)  # type: ignore[arg-type, operator]
    spec = SimpleNamespace(
        pooling=PoolingSpec((METHODS[name],), normalize=True),
        config={},
        sparse=None,
        late=None,
        multi_vector=None,
        score=None,
    )
    runner = ModelRunner(model, Pooler(spec, {}, []), torch.device("cpu"), 2)  # type: ignore[arg-type]
    runner.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    runner._pads_steps = False
    return runner


def main() -> None:
    host_cost.take_launches()
    Staging.send = sent_as_slices  # type: ignore[assignment, method-assign]
    variants: dict[str, None] = {}

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> host_cost.Nothing:
        types = [class_of(*each) for each in zip(args, kernel._unspecialized, strict=False)]
        variants[f"{kernel.fn.__name__} {types} {sorted(constants.items())}"] = None
        return host_cost.Nothing()

    launch.Kernel.run = note  # type: ignore[method-assign]
    found: dict[str, list[str]] = {}
    for name in METHODS:
        variants.clear()
        runner, draw = runner_of(name), np.random.default_rng(0)
        for length in warmup.KERNEL_LENGTHS:
            runner.forward(warmup._plan(1, length, PoolingParams()))
        num_compiled = len(variants)
        for rows in (1, 2, 3, 5, 8, 16, 20, 32, 40, 64, 100):
            for _ in range(6):
                runner.forward(natural_plan(draw, rows))
        found[name] = list(variants)[num_compiled:]
        assert num_compiled > 3, "nothing was launched: this proves nothing"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
