"""Turns plans into the tensors of batches.

Each `…_arrays` function lists the arrays of one part of a plan. The function after it takes the same arrays
back in the same order, as tensors on the device. In between, one copy sends all arrays to the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kvcache.store import KVCache
from penstock.layers.adapter_lines import LinePlan, plan_lines, slots_per_tile
from penstock.layers.adapter_state import AdapterLines, AdapterState, StepAdapters
from penstock.layers.batch import (
    Batch,
    CarryTensors,
    KeyLimitTensors,
    KVAccess,
    OutputTokens,
    PagedRuns,
    PagedTensors,
    reads_in_place,
)
from penstock.layers.images import ImageBatch
from penstock.layers.labels import LabelTensors
from penstock.pooling.build import VariantTensors
from penstock.runner.base import BLOCK_SIZE
from penstock.scoring.pairs import PairTensors
from penstock.types import (
    GeneratePlan,
    ImagePlan,
    Ints,
    KeyLimits,
    KVPlan,
    PagedPlan,
    PoolPlan,
    StepPlan,
    Variant,
)

Sent = Iterator[Tensor]


class OutputPlan(NamedTuple):
    """The tokens whose final hidden states the pooler reads, if it does not read all."""

    tokens: Ints  # [output tokens]
    cu_lengths: Ints  # [rows + 1], of output tokens
    lengths: Ints  # [rows]


class AdapterPlan(NamedTuple):
    """The adapters of a step: the slot of each of its rows, and their largest rank."""

    state: AdapterState
    rank: int  # bucket of the largest rank
    row_slots: Ints  # [rows]; -1: none

    def of_tokens(self, plan: StepPlan, tile_lines: int | None = None) -> LinePlan:
        return plan_lines(self.row_slots, plan.lengths, tile_lines)

    def tile_slots(self, plan: StepPlan) -> int:
        return slots_per_tile(self.row_slots, plan.lengths)

    def of_outputs(self, outputs: OutputPlan) -> LinePlan:
        return plan_lines(self.row_slots, outputs.lengths)

    def of_rows(self, rows: Ints | None = None, tile_lines: int | None = None) -> LinePlan:
        """The adapters of one line for each row, or for each of some rows."""
        slots = self.row_slots if rows is None else self.row_slots[rows]
        return plan_lines(slots, np.ones_like(slots), tile_lines)


class AdapterInputs:
    """The adapters of a step that is not replayed: the arrays to send, and the tensors that they become."""

    def __init__(
        self,
        adapters: AdapterPlan,
        plan: StepPlan,
        outputs: OutputPlan | None = None,
        rows: Ints | None = None,
    ) -> None:
        """`rows`: the rows that heads read; None: all rows."""
        self.adapters = adapters
        self.tokens = adapters.of_tokens(plan)
        self.tile_slots = adapters.tile_slots(plan)
        self.rows = adapters.of_rows(rows)
        self.outputs = None if outputs is None else adapters.of_outputs(outputs)

    def arrays(self) -> list[Ints]:
        plans = (self.tokens, self.rows) if self.outputs is None else (self.tokens, self.rows, self.outputs)
        return [array for plan in plans for array in plan.arrays()]

    def take(self, sent: Sent) -> StepAdapters:
        return StepAdapters(
            self.adapters.state,
            self.adapters.rank,
            AdapterLines.take(self.tokens, sent),
            AdapterLines.take(self.rows, sent),
            None if self.outputs is None else AdapterLines.take(self.outputs, sent),
            self.adapters.row_slots,
            self.tile_slots,
        )


def pool_arrays(
    plan: PoolPlan, outputs: OutputPlan | None, adapters: AdapterInputs | None = None
) -> list[Ints]:
    arrays = [plan.token_ids, plan.positions]
    if plan.type_ids is not None:
        arrays.append(plan.type_ids)
    arrays += (plan.cu_lengths, plan.lengths)
    if plan.skip is not None:
        arrays.append(plan.skip)
    if adapters is not None:
        arrays += adapters.arrays()
    if plan.kv is not None:
        arrays += _kv_arrays(plan.kv)
    if plan.limits is not None:
        arrays += (plan.limits.tokens, plan.limits.cu_lengths, plan.limits.keys, plan.limits.cu_keys)
    if outputs is not None:
        arrays += outputs
    if plan.rope_positions is not None:
        arrays.append(plan.rope_positions)
    return arrays


def pool_batch(
    plan: PoolPlan,
    outputs: OutputPlan | None,
    cache: KVCache | None,
    sent: Sent,
    adapters: AdapterInputs | None = None,
) -> Batch:
    token_ids, positions = next(sent), next(sent)
    type_ids = None if plan.type_ids is None else next(sent)
    cu_lengths, lengths = next(sent), next(sent)
    return Batch(  # arguments are evaluated in order: they take tensors in the order of `pool_arrays`
        token_ids=token_ids,
        positions=positions,
        type_ids=type_ids,
        cu_lengths=cu_lengths,
        lengths=lengths,
        skip=None if plan.skip is None else next(sent),
        adapters=None if adapters is None else adapters.take(sent),
        kv=None if plan.kv is None else _kv_access(plan.kv, cache, sent),
        limits=None if plan.limits is None else _key_limits(plan.limits, sent),
        output_tokens=None if outputs is None else _output_tokens(outputs, sent),
        rope_positions=None if plan.rope_positions is None else next(sent).view(3, -1),
        groups=plan.groups,
        max_length=plan.max_length,
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
        reuses_buffers=token_ids.is_cuda,
    )


def generation_arrays(plan: GeneratePlan, adapters: AdapterInputs | None = None) -> list[Ints]:
    arrays = [plan.token_ids, plan.positions, plan.cu_lengths, plan.lengths]
    if adapters is not None:
        arrays += adapters.arrays()
    arrays += _kv_arrays(plan.kv)
    arrays += (plan.paged.block_tables, plan.paged.num_keys)
    if plan.rope_positions is not None:
        arrays.append(plan.rope_positions)
    return arrays


def generation_batch(
    plan: GeneratePlan, cache: KVCache | None, sent: Sent, adapters: AdapterInputs | None = None
) -> Batch:
    token_ids, positions, cu_lengths, lengths = next(sent), next(sent), next(sent), next(sent)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        type_ids=None,
        cu_lengths=cu_lengths,
        lengths=lengths,
        skip=None,
        adapters=None if adapters is None else adapters.take(sent),
        kv=_kv_access(plan.kv, cache, sent, plan.paged),
        rope_positions=None if plan.rope_positions is None else next(sent).view(3, -1),
        groups=plan.groups,
        max_length=plan.max_length,
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
        is_generation=True,
        reuses_buffers=token_ids.is_cuda,
    )


def image_arrays(images: ImagePlan | None, layout: Sequence[Ints]) -> list[Ints]:
    """`layout`: further arrays that the vision tower needs for the images that run."""
    if images is None:
        return []
    running = [images.cu_patches, images.write_slots, *layout] if images.num_images else []
    return [images.tokens, images.read_slots, *running]


class ImageTensors(NamedTuple):
    """An `ImagePlan` on the device."""

    tokens: Tensor  # int32 [image tokens]
    read_slots: Tensor  # int32 [image tokens]
    write_slots: Tensor | None  # int32 [features that are written]; None: no image runs
    batch: ImageBatch | None

    @classmethod
    def take(cls, images: ImagePlan, num_layout: int, patches: Tensor, sent: Sent) -> ImageTensors:
        """`patches`: the patches of all images that run, uint8 [patches · values]."""
        tokens, read_slots = next(sent), next(sent)
        if not images.num_images:
            return cls(tokens, read_slots, None, None)
        cu_patches, write_slots = next(sent), next(sent)
        batch = ImageBatch(
            patches.view(images.num_patches, -1),
            images.grids,
            cu_patches,
            images.groups,
            max_patches=len(images.patches[-1]),
            layout=tuple(next(sent) for _ in range(num_layout)),
        )
        return cls(tokens, read_slots, write_slots, batch)


def variant_arrays(variants: tuple[Variant, ...]) -> list[Ints]:
    arrays: list[Ints] = []
    for variant in variants:
        if (index := _pooler_index(variant)) is not None:
            arrays.append(index)
        if variant.pairs is not None:
            arrays += variant.pairs.arrays()
        if variant.labels is not None:
            arrays += variant.labels.arrays()
    return arrays


def variant_tensors(variants: tuple[Variant, ...], sent: Sent) -> list[VariantTensors]:
    return [
        VariantTensors(
            None if _pooler_index(variant) is None else next(sent),
            None if variant.pairs is None else PairTensors.take(variant.pairs, sent),
            None if variant.labels is None else LabelTensors.take(variant.labels, sent),
        )
        for variant in variants
    ]


def _pooler_index(variant: Variant) -> Ints | None:
    """The rows or tokens that the pooler selects. A `PairPlan` or `LabelPlan` lists what it reads."""
    if variant.labels is not None:
        return None
    return variant.index if variant.pairs is None else variant.tokens


def _kv_arrays(kv: KVPlan) -> list[Ints]:
    arrays = [
        kv.cu_keys,
        kv.new_key_at,
        kv.cached_key_at,
        kv.read_slots,
        kv.write_tokens,
        kv.write_slots,
        kv.token_slots,
    ]
    if kv.carry is not None:
        arrays += (kv.carry.rows, kv.carry.slots, kv.carry.resumed)
    return arrays


def _kv_access(kv: KVPlan, cache: KVCache | None, sent: Sent, paged: PagedPlan | None = None) -> KVAccess:
    if cache is None:
        raise ValueError("a plan that uses the KV cache needs a runner that has one")
    cu_keys = next(sent)
    index = [next(sent) for _ in range(6)]
    if not reads_in_place(cache.store):  # torch operations need int64, kernels take int32
        index = [tensor.long() for tensor in index]
    new_key_at, cached_key_at, read_slots, write_tokens, write_slots, token_slots = index
    return KVAccess(
        cache.store,
        cu_keys,
        kv.max_keys,
        read_slots=read_slots,
        token_slots=token_slots,
        new_key_at=new_key_at,
        cached_key_at=cached_key_at,
        write_tokens=write_tokens,
        write_slots=write_slots,
        carry=None if kv.carry is None else CarryTensors(cache.sums, next(sent), next(sent), next(sent)),
        paged=None if paged is None else _paged_tensors(paged, sent),
    )


def _paged_tensors(paged: PagedPlan, sent: Sent) -> PagedTensors:
    tables = next(sent).view(paged.num_rows, paged.max_blocks)
    runs = None if paged.offsets is None or tables.is_cuda else _paged_runs(paged.offsets)
    return PagedTensors(paged.num_rows, tables, next(sent), BLOCK_SIZE, runs)


def _paged_runs(offsets: Ints) -> PagedRuns:
    """The runs of rows of one sequence. `offsets`: the number of earlier rows of each row's sequence."""
    firsts = np.flatnonzero(offsets == 0)
    counts = np.diff(firsts, append=len(offsets))
    width = int(counts.max(initial=1))
    rows = firsts[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
    flat_indices = np.repeat(np.arange(len(firsts)) * width, counts) + offsets
    return PagedRuns(torch.from_numpy(rows), torch.from_numpy(flat_indices))


def _key_limits(limits: KeyLimits, sent: Sent) -> KeyLimitTensors:
    tokens, cu_lengths, keys, cu_keys = next(sent), next(sent), next(sent), next(sent)
    return KeyLimitTensors(
        tokens.long(), cu_lengths, keys.long(), cu_keys, limits.max_length, limits.max_keys
    )


def _output_tokens(outputs: OutputPlan, sent: Sent) -> OutputTokens:
    return OutputTokens(next(sent), next(sent), next(sent), int(outputs.lengths.max()))
