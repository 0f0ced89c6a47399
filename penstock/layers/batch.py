"""The ragged batch as the model sees it: device tensors, made from a plan before the first launch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention import write_kv_cache
from penstock.kernels.language import use_kernel
from penstock.kernels.rotary import KVCacheWrite
from penstock.kvcache.store import KVStore
from penstock.types import LengthGroup

_WIDEST = 128  # of the heads that our kernels are tuned for


def read_in_place(store: KVStore) -> bool:
    """Whether attention reads remembered keys where they lie, by a kernel, instead of gathering them."""
    halves = store.keys.dtype in (torch.bfloat16, torch.float16)
    return halves and store.keys.shape[-1] <= _WIDEST and use_kernel(store.keys)


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
    read_slots: Tensor  # int [remembered]
    token_slots: Tensor  # int [tokens]; -1: not kept
    new_at: Tensor  # int64 [tokens]; this and the next three are for `recall` alone
    old_at: Tensor  # int64 [remembered]
    write_tokens: Tensor  # int64 [kept]
    write_slots: Tensor  # int64 [kept]
    carry_rows: Tensor  # int [cut]
    carry_slots: Tensor  # int [cut]
    carry_old: Tensor  # int [cut]
    paged: Paged | None = None  # leading rows that read memory where it lies

    def keeps(self, layer: int, *, capped: bool) -> KVCacheWrite | None:
        """Where keys and values of this step go, where whoever makes them may put them there himself."""
        if not use_kernel(self.store.keys) or (
            self.paged is None and (capped or not read_in_place(self.store))
        ):
            return None
        return KVCacheWrite(self.store.keys[layer], self.store.values[layer], self.token_slots)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Leave the keys and values of a step in which every token is kept."""
        if use_kernel(self.store.keys):
            write_kv_cache(key, value, self.store.keys[layer], self.store.values[layer], self.token_slots)
        else:
            self.store.write(layer, self.write_slots, key, value)

    def recall(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what later steps need, and put remembered keys and values before the step's own."""
        if len(self.write_slots):
            kept = self.write_tokens
            slots = self.write_slots.long()
            self.store.write(layer, slots, key.index_select(0, kept), value.index_select(0, kept))
        return self.remembered(layer, key, value)

    def remembered(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Remembered keys and values before the step's own, row by row."""
        if not len(self.read_slots):
            return key, value
        old_key, old_value = self.store.read(layer, self.read_slots)
        total = len(self.read_slots) + len(self.new_at)
        keys = key.new_empty((total, *key.shape[1:]))
        values = value.new_empty((total, *value.shape[1:]))
        old_at, new_at = self.old_at.long(), self.new_at.long()
        keys.index_copy_(0, old_at, old_key).index_copy_(0, new_at, key)
        values.index_copy_(0, old_at, old_value).index_copy_(0, new_at, value)
        return keys, values

    def carry(self, sums: Tensor) -> Tensor:
        """Add the sums of earlier steps to those of this one [rows, hidden], and keep the totals."""
        if not len(self.carry_rows):
            return sums
        rows, slots = self.carry_rows.long(), self.carry_slots.long()
        before = self.sums.index_select(0, slots) * self.carry_old[:, None]
        sums = sums.index_add(0, rows, before)
        self.sums.index_copy_(0, slots, sums.index_select(0, rows))
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
class Needed:
    """The tokens whose last states somebody reads, row by row."""

    tokens: Tensor  # int32 [needed]
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
    skip: Tensor | None  # int32 [rows], leading tokens left out of pooling
    groups: tuple[LengthGroup, ...]  # rows of equal length, known on the CPU
    max_length: int
    num_tokens: int
    num_rows: int
    memory: Memory | None = None
    adapters: Tensor | None = None  # int32 [rows], -1: none; None: no row has one
    limits: Limits | None = None  # of rows that attend to their leading tokens only
    generates: bool = False  # no token sees one after it, whatever the model does otherwise
    shares: bool = False  # layers write to the same places one after another
    needed: Needed | None = None  # which tokens' states are read; None: all of them
    routes: dict[object, Any] = field(default_factory=dict, init=False)  # what layers need not find out again

    def places(self, widths: tuple[int, ...], like: Tensor) -> tuple[Tensor | None, ...]:
        """A place [tokens, width] for each of these, the same for all layers of the step that ask for the
        same widths: to come by memory costs the host as much as a launch. None, for a width of 0 too: whoever
        writes makes one."""
        if not self.shares:
            return (None,) * len(widths)
        if (found := self.routes.get(widths)) is None:
            made = (like.new_empty((self.num_tokens, width)) if width else None for width in widths)
            found = self.routes[widths] = tuple(made)
            self.routes.setdefault("places", set()).update(id(place) for place in found if place is not None)
        places: tuple[Tensor | None, ...] = found
        return places

    def lasts(self, x: Tensor) -> bool:
        """Whether it is such a place, so that the next layer has the same."""
        return id(x) in self.routes.get("places", ())

    def finished(self, context: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the last layer's attention and of what it is added to, the rows that somebody reads: no other
        token sees what comes behind."""
        if self.needed is None:
            return context, hidden
        tokens = self.needed.tokens
        return context.index_select(0, tokens), hidden.index_select(0, tokens)

    def narrowed(self) -> Batch:
        """The batch of the tokens that are read alone, which is what a pooler has to do with. Ids and
        positions stay those of the whole run: methods that look at them are given all tokens."""
        if (needed := self.needed) is None:
            return self
        return replace(
            self,
            cu_lengths=needed.cu_lengths,
            lengths=needed.lengths,
            skip=None,
            groups=(),
            max_length=needed.max_length,
            num_tokens=len(needed.tokens),
            needed=None,
        )

    @property
    def totals(self) -> Tensor:
        """int32 [rows], tokens of each row with those of earlier steps."""
        return self.lengths if self.memory is None else self.memory.cu_keys.diff()
