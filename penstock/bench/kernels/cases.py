"""A kernel benchmark: a kernel and its reference on the same inputs, and the minimum work they require.

To add a kernel, write a function that yields cases and register it in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.layers.batch import Batch
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import Ints, PoolingParams, Request


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    kernel: str
    shape: str
    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    moved_bytes: int  # inputs read once, outputs written once
    flops: int  # in matrix products; 0: only bytes count
    int8: bool = False  # whether the products are int8


@dataclass(frozen=True, slots=True)
class Place:
    """The device and dtype on which cases run."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(sum(shape))
        values = torch.randn(shape, generator=generator) * scale
        return values.to(self.device, self.dtype)


def size(*tensors: Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def ragged(lengths: list[int], place: Place) -> Batch:
    """A batch with rows of these lengths, in the layout of the engine."""
    tokens = np.ones(sum(lengths), dtype=np.int32)
    request = Request("bench", tokens, np.array(lengths, dtype=np.int32), PoolingParams())
    plan = build_plan([ScheduledRows(request, np.arange(len(lengths), dtype=np.int32))])

    def tensor(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(place.device)

    values: dict[str, Any] = {
        "token_ids": tensor(plan.token_ids),
        "positions": tensor(plan.positions),
        "type_ids": None,
        "cu_lengths": tensor(plan.cu_lengths),
        "lengths": tensor(plan.lengths),
        "totals": tensor(plan.lengths),
        "skip": None,
        "groups": plan.groups,
        "max_length": plan.max_length,
        "num_tokens": plan.num_tokens,
        "num_rows": plan.num_rows,
    }
    return Batch(**{field.name: values[field.name] for field in fields(Batch) if field.name in values})


def mixed_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Row lengths like those of natural texts, with a median near 35 and a long tail; about `tokens` in
    total."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(rng.lognormal(3.55, 0.8), 4, 512)))
    return lengths
