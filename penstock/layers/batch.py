"""The ragged batch as the model sees it: device tensors, made from a plan before the first launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core import LengthGroup
from penstock.kvcache.store import KVStore


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """`core.PagedPlan` on the device."""

    rows: int
    tables: Tensor  # int32 [rows, width]
    keys: Tensor  # int32 [rows]
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What a step reads of earlier ones and leaves for later ones; the plan says which."""

    store: KVStore
    sums: Tensor  # [blocks, hidden] fp32: running sums of rows that go on over steps
    cu_keys: Tensor  # int32 [rows + 1]
    max_keys: int
    new_at: Tensor  # int64 [tokens]
    old_at: Tensor  # int64 [remembered]
    read_slots: Tensor  # int64 [remembered]
    write_tokens: Tensor  # int64 [kept]
    write_slots: Tensor  # int64 [kept]
    carry_rows: Tensor  # int64 [cut]
    carry_slots: Tensor  # int64 [cut]
    carry_old: Tensor  # int64 [cut]
    paged: Paged | None = None  # leading rows that read memory where it lies

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Leave the keys and values of a step in which every token is kept."""
        self.store.write(layer, self.write_slots, key, value)

    def recall(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what later steps need, and put remembered keys and values before the step's own."""
        if len(self.write_slots):
            kept = self.write_tokens
            self.store.write(layer, self.write_slots, key.index_select(0, kept), value.index_select(0, kept))
        return self.remembered(layer, key, value)

    def remembered(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Remembered keys and values before the step's own, row by row."""
        if not len(self.read_slots):
            return key, value
        old_key, old_value = self.store.read(layer, self.read_slots)
        total = len(self.read_slots) + len(self.new_at)
        keys = key.new_empty((total, *key.shape[1:]))
        values = value.new_empty((total, *value.shape[1:]))
        keys.index_copy_(0, self.old_at, old_key).index_copy_(0, self.new_at, key)
        values.index_copy_(0, self.old_at, old_value).index_copy_(0, self.new_at, value)
        return keys, values

    def carry(self, sums: Tensor) -> Tensor:
        """Add the sums of earlier steps to those of this one [rows, hidden], and keep the totals."""
        if not len(self.carry_rows):
            return sums
        before = self.sums.index_select(0, self.carry_slots) * self.carry_old[:, None]
        sums = sums.index_add(0, self.carry_rows, before)
        self.sums.index_copy_(0, self.carry_slots, sums.index_select(0, self.carry_rows))
        return sums


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """`core.KeyLimits` on the device."""

    tokens: Tensor  # int64 [tokens of these rows]
    cu_lengths: Tensor  # int32 [these rows + 1]
    keys: Tensor  # int64 [keys of these rows]
    cu_keys: Tensor  # int32 [these rows + 1]
    max_length: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    type_ids: Tensor | None  # int32 [tokens]; None: all zero
    cu_lengths: Tensor  # int32 [rows + 1]
    lengths: Tensor  # int32 [rows], tokens of each row in this step
    skip: Tensor | None  # int32 [rows], leading tokens left out of pooling
    groups: tuple[LengthGroup, ...]  # rows of equal length, known on the CPU
    max_length: int
    num_tokens: int
    num_rows: int
    memory: Memory | None = None
    adapters: Tensor | None = None  # int32 [rows], -1: none; None: no row has one
    limits: Limits | None = None  # of rows that attend to their leading tokens only
    generates: bool = False  # no token sees one after it, whatever the model does otherwise

    @property
    def totals(self) -> Tensor:
        """int32 [rows], tokens of each row with those of earlier steps."""
        return self.lengths if self.memory is None else self.memory.cu_keys.diff()
