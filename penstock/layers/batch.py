"""The ragged batch as the model sees it: device tensors, made from a plan before the first launch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.attention import write_kv_cache
from penstock.kernels.language import use_kernel
from penstock.kernels.quantize import FP8
from penstock.kernels.rotary import KVCacheWrite
from penstock.kvcache.store import KVStore
from penstock.layers.adapter_state import StepAdapters
from penstock.layers.cpu_shapes import pad_rows
from penstock.layers.images import ImageTokens
from penstock.layers.scratch import StepScratch
from penstock.types import LengthGroup

MAX_HEAD_DIM = 128  # of the heads that our attention kernels are tuned for


def reads_in_place(store: KVStore) -> bool:
    """Whether attention reads cached keys from their slots, by a kernel, instead of gathering them first."""
    is_half = store.keys.dtype in (torch.bfloat16, torch.float16, FP8)
    return is_half and store.keys.shape[-1] <= MAX_HEAD_DIM and use_kernel(store.keys)


class PagedRuns(NamedTuple):
    """Runs of consecutive rows that read the same blocks, such as the rows of one sequence."""

    rows: Tensor  # int64 [runs, longest run]; shorter runs repeat their last row
    flat_indices: Tensor  # int64 [rows], flat index of each row in `rows`


@dataclass(frozen=True, slots=True, eq=False)
class PagedTensors:
    """A `PagedPlan` on the device."""

    num_rows: int
    block_tables: Tensor  # int32 [rows, max blocks]
    num_keys: Tensor  # int32 [rows]
    block_size: int
    runs: PagedRuns | None = None  # on a CPU, where sequences have several rows


@dataclass(frozen=True, slots=True, eq=False)
class CarryTensors:
    """A `CarryPlan` on the device, with the running sums of all rows that run over several steps."""

    sums: Tensor  # [blocks, hidden] fp32
    rows: Tensor  # int [rows that carry]
    slots: Tensor  # int [rows that carry]
    resumed: Tensor  # int [rows that carry]

    def add(self, sums: Tensor) -> Tensor:
        """Add the sums of earlier steps to those of this one [rows, hidden], and keep the totals."""
        rows, slots = self.rows.long(), self.slots.long()
        before = self.sums.index_select(0, slots) * self.resumed[:, None]
        sums = sums.index_add(0, rows, before)
        self.sums.index_copy_(0, slots, sums.index_select(0, rows))
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class KVAccess:
    """How a step reads and writes the KV cache: a `KVPlan` on the device."""

    store: KVStore
    cu_keys: Tensor  # int32 [rows + 1]
    max_keys: int
    read_slots: Tensor  # int [cached]
    token_slots: Tensor  # int [tokens]; -1: not written
    new_key_at: Tensor  # int [tokens]; this and the next three are for `write_and_gather` alone
    cached_key_at: Tensor  # int [cached]
    write_tokens: Tensor  # int [written]
    write_slots: Tensor  # int [written]
    carry: CarryTensors | None = None
    paged: PagedTensors | None = None  # of a generation step

    def write_target(self, layer: int, *, capped: bool) -> KVCacheWrite | None:
        """Where the kernel that makes keys and values may write them itself; None: attention writes them."""
        if not use_kernel(self.store.keys) or (
            self.paged is None and (capped or not reads_in_place(self.store))
        ):
            return None
        return KVCacheWrite(self.store.layer(layer), self.token_slots)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of a step that caches all its tokens."""
        if use_kernel(self.store.keys):
            write_kv_cache(key, value, self.store.layer(layer), self.token_slots)
        else:
            count = len(self.write_slots)  # padding tokens follow
            self.store.write(layer, self.write_slots, key[:count], value[:count])

    def write_and_gather(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write what later steps need, and put cached keys and values before the step's own."""
        if len(self.write_slots):
            tokens = self.write_tokens
            slots = self.write_slots.long()
            self.store.write(layer, slots, key.index_select(0, tokens), value.index_select(0, tokens))
        return self.gather(layer, key, value)

    def gather(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Cached keys and values before the step's own, row by row."""
        if not len(self.read_slots):
            return key, value
        cached_key, cached_value = self.store.read(layer, self.read_slots, key.dtype)
        total = len(self.read_slots) + len(self.new_key_at)
        keys = key.new_empty((total, *key.shape[1:]))
        values = value.new_empty((total, *value.shape[1:]))
        cached_at, new_at = self.cached_key_at.long(), self.new_key_at.long()
        count = len(new_at)  # padding tokens follow
        keys.index_copy_(0, cached_at, cached_key).index_copy_(0, new_at, key[:count])
        values.index_copy_(0, cached_at, cached_value).index_copy_(0, new_at, value[:count])
        return keys, values


@dataclass(frozen=True, slots=True, eq=False)
class KeyLimitTensors:
    """A `KeyLimits` on the device."""

    tokens: Tensor  # int64 [tokens of these rows]
    cu_lengths: Tensor  # int32 [these rows + 1]
    keys: Tensor  # int64 [keys of these rows]
    cu_keys: Tensor  # int32 [these rows + 1]
    max_length: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class OutputTokens:
    """The tokens whose final hidden states are read, row by row."""

    tokens: Tensor  # int32 [output tokens]
    cu_lengths: Tensor  # int32 [rows + 1], of these
    lengths: Tensor  # int32 [rows]
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    type_ids: Tensor | None  # int32 [tokens]; None: all zero
    cu_lengths: Tensor  # int32 [rows + 1]
    lengths: Tensor  # int32 [rows], tokens of each row in this step
    skip: Tensor | None  # int32 [rows], leading tokens that pooling leaves out
    groups: tuple[LengthGroup, ...]  # rows of equal length, known on the CPU
    max_length: int
    num_tokens: int
    num_rows: int
    kv: KVAccess | None = None
    adapters: StepAdapters | None = None  # None: no row has one
    limits: KeyLimitTensors | None = None  # rows whose tokens attend to the leading ones only
    images: ImageTokens | None = None  # tokens that take features of the vision tower; None: no row has any
    rope_positions: Tensor | None = None  # int32 [3, tokens], in time, down and across; None: `positions`
    is_generation: bool = False  # attention is causal, whatever the model does when it pools
    reuses_buffers: bool = False  # layers write to the same scratch buffers one after another
    output_tokens: OutputTokens | None = None  # None: the states of all tokens are read
    scratch: StepScratch = field(default_factory=StepScratch, init=False)

    def scratch_buffers(self, widths: tuple[int, ...], like: Tensor) -> tuple[Tensor | None, ...]:
        """A buffer [tokens, width] for each width. All layers of the step that ask for the same widths get
        the same buffers, because an allocation costs the host as much as a launch. None, also for a width
        of 0, means that the layer allocates its own."""
        if not self.reuses_buffers:
            return (None,) * len(widths)
        if (buffers := self.scratch.buffers.get(widths)) is None:
            made = (like.new_empty((self.num_tokens, width)) if width else None for width in widths)
            buffers = self.scratch.buffers[widths] = tuple(made)
        return buffers

    def is_scratch(self, x: Tensor) -> bool:
        """Whether `x` is a scratch buffer, so that the next layer writes to the same tensor."""
        return any(x is buffer for buffers in self.scratch.buffers.values() for buffer in buffers)

    def padded(self, size: int) -> Batch:
        """The batch with padding tokens after the last row. They belong to no row."""
        if size == self.num_tokens:
            return self
        return replace(
            self,
            token_ids=pad_rows(self.token_ids, size),
            positions=pad_rows(self.positions, size),
            type_ids=pad_rows(self.type_ids, size),
            rope_positions=_pad_columns(self.rope_positions, size),
        )

    def select_outputs(self, context: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last layer's attention and its residual, of the output tokens alone: what follows attention
        works on each token by itself."""
        if self.output_tokens is None:
            return context, hidden
        if self.adapters is not None:
            self.adapters.use("outputs")
        tokens = self.output_tokens.tokens
        return context.index_select(0, tokens), hidden.index_select(0, tokens)

    def output_batch(self) -> Batch:
        """The batch of the output tokens alone, as the pooler sees it. Ids and positions stay those of the
        whole run: methods that read them are given all tokens."""
        if (outputs := self.output_tokens) is None:
            return self
        return replace(
            self,
            cu_lengths=outputs.cu_lengths,
            lengths=outputs.lengths,
            skip=None,
            groups=(),
            max_length=outputs.max_length,
            num_tokens=len(outputs.tokens),
            output_tokens=None,
            adapters=None if self.adapters is None else self.adapters.of_outputs(),
        )

    def leading_rows(self, num_rows: int) -> Batch:
        """The first rows alone, which end where a group ends. Of a batch without KV cache, whose rows have
        one output token each if it names any."""
        groups = tuple(group for group in self.groups if group.first_row < num_rows)
        num_tokens = sum(group.num_rows * group.length for group in groups)
        outputs = self.output_tokens
        if outputs is not None:
            cu_lengths, lengths = outputs.cu_lengths[: num_rows + 1], outputs.lengths[:num_rows]
            outputs = OutputTokens(outputs.tokens[:num_rows], cu_lengths, lengths, outputs.max_length)
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            type_ids=None if self.type_ids is None else self.type_ids[:num_tokens],
            cu_lengths=self.cu_lengths[: num_rows + 1],
            lengths=self.lengths[:num_rows],
            groups=groups,
            max_length=max((group.length for group in groups), default=0),
            num_tokens=num_tokens,
            num_rows=num_rows,
            images=None,
            output_tokens=outputs,
        )

    @property
    def total_lengths(self) -> Tensor:
        """int32 [rows], tokens of each row including those of earlier steps."""
        return self.lengths if self.kv is None else self.kv.cu_keys.diff()


def patch_batch(
    cu_lengths: Tensor, groups: tuple[LengthGroup, ...], output_tokens: OutputTokens | None = None
) -> Batch:
    """A batch whose tokens are patches, for the layers of a vision tower. It has no token ids."""
    num_rows = sum(group.num_rows for group in groups)
    return Batch(
        token_ids=cu_lengths,
        positions=cu_lengths,
        type_ids=None,
        cu_lengths=cu_lengths,
        lengths=cu_lengths,
        skip=None,
        groups=groups,
        max_length=groups[-1].length,
        num_tokens=sum(group.num_rows * group.length for group in groups),
        num_rows=num_rows,
        output_tokens=output_tokens,
    )


def _pad_columns(positions: Tensor | None, size: int) -> Tensor | None:
    return None if positions is None else F.pad(positions, (0, size - positions.shape[1]))
