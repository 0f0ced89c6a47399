"""The ragged batch that the model reads: device tensors, made from a plan before the first launch."""

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

MAX_HEAD_DIM = 128  # largest head size that Penstock's attention kernels are tuned for


def reads_in_place(store: KVStore) -> bool:
    """Whether an attention kernel reads cached keys from their slots, so that they are not gathered first."""
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
    runs: PagedRuns | None = None  # set on a CPU if sequences have several rows


@dataclass(frozen=True, slots=True, eq=False)
class CarryTensors:
    """A `CarryPlan` on the device, with the running sums of all rows that run in several steps."""

    sums: Tensor  # [blocks, hidden] fp32
    rows: Tensor  # int [rows that carry]
    slots: Tensor  # int [rows that carry]
    resumed: Tensor  # int [rows that carry]

    def add(self, sums: Tensor) -> Tensor:
        """Add the sums of earlier steps to those of this step [rows, hidden], and store the totals."""
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
    new_key_at: Tensor  # int [tokens]; this and the next three are for `write_and_gather` only
    cached_key_at: Tensor  # int [cached]
    write_tokens: Tensor  # int [written]
    write_slots: Tensor  # int [written]
    carry: CarryTensors | None = None
    paged: PagedTensors | None = None  # None: not a generation step

    def write_target(self, layer: int, *, capped: bool) -> KVCacheWrite | None:
        """Where the rotation kernel may write keys and values; None if attention has to write them."""
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
        """Write what later steps need, and return keys and values with the cached ones, as `gather` does."""
        if len(self.write_slots):
            tokens = self.write_tokens
            slots = self.write_slots.long()
            self.store.write(layer, slots, key.index_select(0, tokens), value.index_select(0, tokens))
        return self.gather(layer, key, value)

    def gather(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values row by row, with cached ones before the step's own."""
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
    cu_lengths: Tensor  # int32 [rows + 1], cumulative numbers of output tokens
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
    groups: tuple[LengthGroup, ...]  # rows of equal length, on the CPU
    max_length: int
    num_tokens: int
    num_rows: int
    kv: KVAccess | None = None
    adapters: StepAdapters | None = None  # None: no row has an adapter
    limits: KeyLimitTensors | None = None  # rows whose tokens attend only to leading tokens
    images: ImageTokens | None = None  # tokens with features of the vision tower; None: no images
    rope_positions: Tensor | None = None  # int32 [3, tokens]: time, down, across; None: `positions`
    is_generation: bool = False  # attention is causal, even if it is bidirectional for pooling
    reuses_buffers: bool = False  # all layers write to the same scratch buffers
    output_tokens: OutputTokens | None = None  # None: hidden states of all tokens are read
    scratch: StepScratch = field(default_factory=StepScratch, init=False)

    def scratch_buffers(self, widths: tuple[int, ...], like: Tensor) -> tuple[Tensor | None, ...]:
        """Return a buffer [tokens, width] for each width.

        All layers that request the same widths get the same buffers, because an allocation costs the host as
        much as a launch. If an entry is None, as for a width of 0, the layer allocates its own.
        """
        if not self.reuses_buffers:
            return (None,) * len(widths)
        if (buffers := self.scratch.buffers.get(widths)) is None:
            made = (like.new_empty((self.num_tokens, width)) if width else None for width in widths)
            buffers = self.scratch.buffers[widths] = tuple(made)
        return buffers

    def is_scratch(self, x: Tensor) -> bool:
        """Whether `x` is a scratch buffer, to which the next layer writes too."""
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
        """Reduce the last layer's attention output and residual to the output tokens.

        All computation after attention is per token.
        """
        if self.output_tokens is None:
            return context, hidden
        if self.adapters is not None:
            self.adapters.use("outputs")
        tokens = self.output_tokens.tokens
        return context.index_select(0, tokens), hidden.index_select(0, tokens)

    def output_batch(self) -> Batch:
        """Reduce the batch to its output tokens, for the pooler.

        Ids and positions remain those of all tokens. Pooling methods that read them run with all tokens.
        """
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
        """Reduce the batch to its first rows, which must end with a group.

        The batch has no KV cache. If it has output tokens, it has one for each row.
        """
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
