"""The adapter slot of each line of the current step. Adapted layers read it."""

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
    # Slot, begin and end in `tiled.order`, on the CPU; None in a graph, which is replayed for other steps.
    groups: tuple[tuple[int, int, int], ...] | None

    @classmethod
    def take(cls, plan: LinePlan, sent: Iterator[Tensor]) -> AdapterLines:
        """Make lines from a plan whose arrays were sent to the device, in the same order."""
        slots, order, tiles = next(sent), next(sent), next(sent)
        return cls(slots, LineTiles(order, tiles.view(-1, 3), plan.tile_lines), plan.groups)

    @classmethod
    def send(cls, plan: LinePlan, device: torch.device) -> AdapterLines:
        """Send a plan separately from the other integers of a step."""
        return cls.take(plan, iter([torch.from_numpy(array).to(device) for array in plan.arrays()]))

    def by_slot(self) -> list[tuple[int, Tensor]]:
        """Return the lines of each slot."""
        assert self.groups is not None
        order = self.tiled.order.long()
        return [(slot, order[begin:end]) for slot, begin, end in self.groups]


class AdapterState:
    """The adapters of the lines that the model's layers process next."""

    def __init__(self) -> None:
        self.lines: AdapterLines | None = None  # None: no line has an adapter
        self.rank = 0  # rank bucket that no adapter of the step exceeds
        self.tile_slots = MANY_SLOTS  # of these lines; see `slots_per_tile`


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step, for all lines that its layers and heads read."""

    state: AdapterState
    rank: int
    tokens: AdapterLines
    rows: AdapterLines | None = None  # lines that heads read: pooled rows, or rows that sample
    outputs: AdapterLines | None = None  # output tokens, the only lines after the last attention
    row_slots: Ints | None = None  # [rows], on the CPU; None in a graph
    tile_slots: int = MANY_SLOTS  # of `tokens`; see `slots_per_tile`

    def use(self, kind: LineKind) -> None:
        """Set which lines the layers process from now on."""
        self.state.lines, self.state.rank = getattr(self, kind), self.rank
        self.state.tile_slots = self.tile_slots if kind == "tokens" else MANY_SLOTS

    def use_runs(self, slots: Ints, lengths: Ints) -> None:
        """Set other lines for the layers to process: runs of `lengths` lines, each with one slot."""
        lines = AdapterLines.send(plan_lines(slots, lengths), self.tokens.slots.device)
        self.state.lines, self.state.rank, self.state.tile_slots = lines, self.rank, MANY_SLOTS

    def stop(self) -> None:
        self.state.lines = None

    def of_outputs(self) -> StepAdapters:
        """Return the adapters for a batch that is reduced to its output tokens."""
        if self.outputs is None:
            return self
        return replace(self, tokens=self.outputs, outputs=None, tile_slots=MANY_SLOTS)

    def distinct_slots(self) -> tuple[Ints, Tensor]:
        """Return the distinct slots of the step, and each row's index into them, int64 [rows]."""
        assert self.row_slots is not None
        slots, of_row = np.unique(self.row_slots, return_inverse=True)
        return slots, torch.from_numpy(of_row).to(self.tokens.slots.device)


@contextmanager
def adapting(adapters: StepAdapters | None) -> Iterator[None]:
    """A context in which a model and its heads run with the adapters of a step, beginning with its tokens."""
    if adapters is None:
        yield
        return
    adapters.use("tokens")
    try:
        yield
    finally:
        adapters.stop()


class AdapterSlots:
    """The size of the slots of all adapted layers, and the state that selects the slots of a step."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.state = AdapterState()

    def grow(self, num_slots: int, max_rank: int) -> None:
        """Increase the number and rank of slots to at least these. Call it before any slot is written."""
        self.num_slots, self.max_rank = max(self.num_slots, num_slots), max(self.max_rank, max_rank)
