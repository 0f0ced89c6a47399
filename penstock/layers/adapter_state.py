"""The adapter slot of each line of the current step, which layers with adapters read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.lora import LineTiles
from penstock.layers.adapter_lines import MANY_SLOTS, LinePlan, plan_lines
from penstock.types import Ints

LineKind = Literal["tokens", "outputs", "rows"]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLines:
    """The adapter slots of some lines, on the device."""

    slots: Tensor  # int32 [lines]; -1: none
    tiled: LineTiles
    # Slots with their part of `tiled.order`, on the CPU; None in a graph, which is replayed for any step.
    groups: tuple[tuple[int, int, int], ...] | None

    @classmethod
    def take(cls, plan: LinePlan, sent: Iterator[Tensor]) -> AdapterLines:
        """A plan whose arrays were sent to the device, in their order."""
        slots, order, tiles = next(sent), next(sent), next(sent)
        return cls(slots, LineTiles(order, tiles.view(-1, 3), plan.tile_lines), plan.groups)

    @classmethod
    def send(cls, plan: LinePlan, device: torch.device) -> AdapterLines:
        """A plan that is not among what a step sends."""
        return cls.take(plan, iter([torch.from_numpy(array).to(device) for array in plan.arrays()]))

    def by_slot(self) -> list[tuple[int, Tensor]]:
        """The lines of each slot."""
        assert self.groups is not None
        order = self.tiled.order.long()
        return [(slot, order[begin:end]) for slot, begin, end in self.groups]


class AdapterState:
    """The adapters of the lines that the layers of a model are given next."""

    def __init__(self) -> None:
        self.lines: AdapterLines | None = None  # None: no line has one
        self.rank = 0  # a bucket that no adapter of the step exceeds
        self.tile_slots = MANY_SLOTS  # of the lines; see `slots_per_tile`


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step, for all lines that its layers and heads read."""

    state: AdapterState
    rank: int
    tokens: AdapterLines
    rows: AdapterLines | None = None  # of what heads read: pooled rows, or the rows that sample
    outputs: AdapterLines | None = None  # of the tokens that are left behind the last attention
    row_slots: Ints | None = None  # [rows], on the CPU; None in a graph
    tile_slots: int = MANY_SLOTS  # of the tokens; see `slots_per_tile`

    def use(self, kind: LineKind) -> None:
        """Say which lines the layers are given from here on."""
        self.state.lines, self.state.rank = getattr(self, kind), self.rank
        self.state.tile_slots = self.tile_slots if kind == "tokens" else MANY_SLOTS

    def use_runs(self, slots: Ints, lengths: Ints) -> None:
        """Say that the layers are given other lines: runs with a slot each."""
        lines = AdapterLines.send(plan_lines(slots, lengths), self.tokens.slots.device)
        self.state.lines, self.state.rank, self.state.tile_slots = lines, self.rank, MANY_SLOTS

    def stop(self) -> None:
        self.state.lines = None

    def of_outputs(self) -> StepAdapters:
        """Those of a batch that has only its output tokens."""
        if self.outputs is None:
            return self
        return replace(self, tokens=self.outputs, outputs=None, tile_slots=MANY_SLOTS)

    def distinct_slots(self) -> tuple[Ints, Tensor]:
        """The slots of the step, and which of them each row has, int64 [rows]."""
        assert self.row_slots is not None
        slots, of_row = np.unique(self.row_slots, return_inverse=True)
        return slots, torch.from_numpy(of_row).to(self.tokens.slots.device)


@contextmanager
def adapting(adapters: StepAdapters | None) -> Iterator[None]:
    """Run a model and its heads with the adapters of a step, its tokens first."""
    if adapters is None:
        yield
        return
    adapters.use("tokens")
    try:
        yield
    finally:
        adapters.stop()


class AdapterSlots:
    """The slots that every adapted layer has room for, and what says which of them a step uses."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.state = AdapterState()

    def grow(self, num_slots: int, max_rank: int) -> None:
        """Have at least this room; before anything is written."""
        self.num_slots, self.max_rank = max(self.num_slots, num_slots), max(self.max_rank, max_rank)
