"""Changes that adapters make to the rows of an embedding table: low-rank updates, or replaced rows."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.lora import LowRank, expand_, rank_bucket
from penstock.layers.adapter_state import AdapterSlots
from penstock.weights.adapters import TableWeights


class AdaptedTable:
    """Applies the changes that adapters make to the rows of an embedding table."""

    def __init__(self, weight: Tensor, room: AdapterSlots) -> None:
        self.weight = weight  # [rows, width]
        self.rows, self.width = weight.shape
        self.room = room
        self.state = room.state
        self.dtype, self.device = weight.dtype, weight.device
        self.ranks: list[int] = []
        self._down: Tensor | None = None  # [slots, rows, max rank]
        self._low: LowRank | None = None
        # For each slot and row, the index of the new row in `_new`; -1: the row is not replaced.
        self._index: Tensor | None = None  # int32 [slots, rows]
        self._new: Tensor | None = None  # [slots, replaced, width]

    @property
    def is_active(self) -> bool:
        return self.state.lines is not None and (self._low is not None or self._new is not None)

    def change_(self, embedded: Tensor, ids: Tensor | None) -> Tensor:
        """Change embedded rows [tokens, width] in place. `ids` are their indices; None: all 0."""
        lines = self.state.lines
        if lines is None or (self._low is None and self._new is None):
            return embedded
        count = len(lines.slots)  # padding tokens may follow
        slots = lines.slots.long()
        rows = torch.zeros_like(slots) if ids is None else ids[:count].long()
        if self._new is not None and self._index is not None:
            self._replace_rows(embedded[:count], slots, rows)
        if self._low is None or self._down is None:
            return embedded
        if use_kernel(embedded):
            order = lines.tiled.order.long()
            at = slots.index_select(0, order).clamp_min_(0) * self.rows + rows.index_select(0, order)
            rank = min(self.state.rank, self._down.shape[-1])
            low = self._down.flatten(0, 1).index_select(0, at)[:, :rank].contiguous()
            return expand_(embedded, low, self._low, lines.tiled)
        for slot, own in lines.by_slot():
            if slot >= 0 and (rank := self.ranks[slot]):
                low = self._down[slot, :, :rank].index_select(0, rows.index_select(0, own))
                embedded.index_add_(0, own, low @ self._low.up[slot, :, :rank].t())
        return embedded

    def _replace_rows(self, embedded: Tensor, slots: Tensor, rows: Tensor) -> None:
        assert self._index is not None and self._new is not None
        known = slots.clamp_min(0)
        at = self._index.flatten().index_select(0, known * self.rows + rows)
        at = torch.where(slots < 0, -1, at)
        new = self._new.flatten(0, 1).index_select(0, known * self._new.shape[1] + at.clamp_min(0))
        embedded.copy_(torch.where(at[:, None] >= 0, new, embedded))

    def write(self, slot: int, weights: TableWeights) -> bool:
        """Write an adapter to a slot. Return whether memory was allocated."""
        grew = self.reserve(weights)
        if self._low is not None:
            self._write_low(self._low, slot, weights)
        if self._new is not None:
            self._write_rows(self._new, slot, weights)
        return grew

    def reserve(self, weights: TableWeights) -> bool:
        """Allocate memory for an adapter in any slot. Return whether any was needed."""
        grew = self._reserve_low() if weights.rank else False
        return grew | (self._reserve_rows(len(weights.rows)) if weights.rows is not None else False)

    def clear(self, slot: int) -> None:
        """Clear a slot, so that it has no adapter on this table."""
        if self._low is not None and self.ranks[slot]:
            self.ranks[slot] = 0
            self._low.ranks[slot].fill_(0)
        if self._index is not None:
            self._index[slot].fill_(-1)

    def _reserve_low(self) -> bool:
        if self._low is not None:
            return False
        slots, rank = self.room.num_slots, rank_bucket(self.room.max_rank)
        self.ranks = [0] * slots
        self._down = torch.zeros((slots, self.rows, rank), dtype=self.dtype, device=self.device)
        up = torch.zeros((slots, self.width, rank), dtype=self.dtype, device=self.device)
        ranks = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self._low = LowRank(up, up, ranks, (self.width,))  # A is not multiplied: A x is one row of `_down`
        return True

    def _reserve_rows(self, count: int) -> bool:
        slots = self.room.num_slots
        if self._index is None:
            self._index = torch.full((slots, self.rows), -1, dtype=torch.int32, device=self.device)
        if self._new is not None and self._new.shape[1] >= count:
            return False
        larger = torch.zeros((slots, count, self.width), dtype=self.dtype, device=self.device)
        if self._new is not None:
            larger[:, : self._new.shape[1]] = self._new
        self._new = larger
        return True

    def _write_low(self, low: LowRank, slot: int, weights: TableWeights) -> None:
        assert self._down is not None
        if weights.down is not None and weights.up is not None:
            self._down[slot, :, : weights.rank].copy_(weights.down, non_blocking=True)
            low.up[slot, :, : weights.rank].copy_(weights.up, non_blocking=True)
        self.ranks[slot] = weights.rank
        low.ranks[slot].fill_(weights.rank)

    def _write_rows(self, new: Tensor, slot: int, weights: TableWeights) -> None:
        assert self._index is not None
        self._index[slot].fill_(-1)
        if weights.rows is not None and weights.indices is not None:
            count = len(weights.rows)
            new[slot, :count].copy_(weights.rows, non_blocking=True)
            numbers = torch.arange(count, dtype=torch.int32, device=self.device)
            self._index[slot].index_copy_(0, weights.indices.to(self.device), numbers)
