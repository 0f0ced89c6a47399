"""Seeded inputs for layers: tensors, and batches without a scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.layers.batch import Batch, KeyLimitTensors
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import KeyLimits
from tests.helpers import ints, make_request


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ordered_batch(lengths: list[int], keys: list[int] | None = None) -> Batch:
    """A batch of rows sorted by length. `keys` follows that order, ascending among equal lengths."""
    request = make_request("a", sorted(lengths), key_limits=keys)
    plan = build_plan([ScheduledRows(request, ints(range(len(lengths))))])
    assert plan.slices[0].step_rows.tolist() == list(range(len(lengths)))
    return Batch(
        token_ids=torch.from_numpy(plan.token_ids),
        positions=torch.from_numpy(plan.positions),
        type_ids=None,
        cu_lengths=torch.from_numpy(plan.cu_lengths),
        lengths=torch.from_numpy(plan.lengths),
        skip=None,
        groups=plan.groups,
        max_length=plan.max_length,
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
        limits=None if plan.limits is None else _limits(plan.limits),
    )


def _limits(limits: KeyLimits) -> KeyLimitTensors:
    tokens, cu_lengths, keys, cu_keys = (
        torch.from_numpy(x) for x in (limits.tokens, limits.cu_lengths, limits.keys, limits.cu_keys)
    )
    return KeyLimitTensors(
        tokens.long(), cu_lengths, keys.long(), cu_keys, limits.max_length, limits.max_keys
    )
