"""PEFT adapters on small seeded checkpoints, with PEFT as the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from torch import nn

from penstock.types import PoolingParams, Request, Task
from tests.helpers import ints
from tests.parity.encoders import Opened, opened
from tests.parity.reference import Vectors

FIRST_ID = 10  # id of the first adapter that a test loads


def write_adapter(base: nn.Module, folder: Path, seed: int = 0, **options: Any) -> nn.Module:
    """Write an adapter with random weights; returns the base model with the adapter."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    model: Any = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings)).eval()
    draw = torch.Generator().manual_seed(100 + seed)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=draw)
        elif "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(str(folder))
    adapted: nn.Module = model
    return adapted


@contextmanager
def opened_with(folder: Path, adapters: Sequence[Path], **options: Any) -> Iterator[Opened]:
    """Open a checkpoint in an engine with these adapters. Their ids start at `FIRST_ID`."""
    overrides = options.pop("overrides", None)
    with opened(
        folder, overrides, enable_lora=True, **({"max_loras": 4, "max_lora_rank": 16} | options)
    ) as engine:
        for number, adapter in enumerate(adapters):
            engine.engine.core.load_adapter(FIRST_ID + number, str(adapter), adapter.name).result(60)
        yield engine


def ask(
    engine: Opened, rows: Sequence[Sequence[int]], adapters: Sequence[int], task: Task, **more: Any
) -> Vectors:
    """Send one request. `adapters` has the index of each row's adapter, -1 for none."""
    request = Request(
        f"{task}-{id(rows)}-{id(adapters)}",
        ints([token for row in rows for token in row]),
        ints([len(row) for row in rows]),
        PoolingParams(task, normalize=False),
        adapters=ints([-1 if each < 0 else FIRST_ID + each for each in adapters]),
        **more,
    )
    return engine.engine.submit(request).result(60).values  # type: ignore[return-value]


def reference(
    base: nn.Module,
    adapted: Sequence[nn.Module],
    rows: Sequence[Sequence[int]],
    adapters: Sequence[int],
    read: Callable[[nn.Module, Sequence[Sequence[int]]], Any],
) -> Vectors:
    """Run each row alone through its model."""
    found = [
        read(base if each < 0 else adapted[each], [row]) for row, each in zip(rows, adapters, strict=True)
    ]
    return np.concatenate([np.asarray(each[0] if isinstance(each, list) else each) for each in found])
