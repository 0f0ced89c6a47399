"""Adapters on the layers and tables of a model. Each line of a batch, a token or a pooled row, may have one.

`AdapterSites` knows every layer that an adapter may change. A layer keeps the adapters of all slots beside
its weight, from the first one that changes it on. `AdapterState` says which slot each line of the current
step has; while it says nothing, a layer is its plain self.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES
from penstock.kernels.language import use_kernel
from penstock.kernels.lora import (
    MAX_PARTS,
    LineTiles,
    LowRank,
    apply_reference,
    expand_,
    rank_bucket,
    replace_,
    shrink,
)
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.adapter_lines import LinePlan, plan_lines
from penstock.layers.linear import LinearLayer
from penstock.types import Ints
from penstock.weights.adapters import ModuleWeights, PartWeights, TableWeights

LineKind = Literal["tokens", "outputs", "rows"]
_ALL_ROWS = slice(None)
_IDENTITY_ROWS = 1024  # of the identity matrix that a weight is read with at a time


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


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a step, for all lines that its layers and heads read."""

    state: AdapterState
    rank: int
    tokens: AdapterLines
    rows: AdapterLines | None = None  # of what heads read: pooled rows, or the rows that sample
    outputs: AdapterLines | None = None  # of the tokens that are left behind the last attention
    row_slots: Ints | None = None  # [rows], on the CPU; None in a graph

    def use(self, kind: LineKind) -> None:
        """Say which lines the layers are given from here on."""
        self.state.lines, self.state.rank = getattr(self, kind), self.rank

    def use_runs(self, slots: Ints, lengths: Ints) -> None:
        """Say that the layers are given other lines: runs with a slot each."""
        lines = AdapterLines.send(plan_lines(slots, lengths), self.tokens.slots.device)
        self.state.lines, self.state.rank = lines, self.rank

    def stop(self) -> None:
        self.state.lines = None

    def of_outputs(self) -> StepAdapters:
        """Those of a batch that has only its output tokens."""
        return self if self.outputs is None else replace(self, tokens=self.outputs, outputs=None)

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


class SiteRows(NamedTuple):
    """Outputs of a layer that another layout of the model's checkpoints has as a module of its own."""

    site: str
    begin: int
    end: int


class AdapterSites:
    """Every layer and table of a model that an adapter may change, by the names of its modules."""

    def __init__(self, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self.state = AdapterState()
        self.layers: dict[str, tuple[AdaptedLinear, int]] = {}  # with the number of the part
        self.tables: dict[str, AdaptedTable] = {}
        self.aliases: dict[str, SiteRows] = {}  # names of the same modules in other layouts
        self.own: list[ModuleWeights] = []  # adapters of the checkpoint itself
        self.tied: set[str] = set()  # tables whose weight a head shares
        self.fixed: set[str] = set()  # modules that are used, but cannot be adapted
        self.ignored: tuple[str, ...] = ()  # parts of names of modules that the model leaves out

    def grow(self, num_slots: int, max_rank: int) -> None:
        """Have at least this room; before anything is written."""
        self.num_slots, self.max_rank = max(self.num_slots, num_slots), max(self.max_rank, max_rank)

    def share_table(self, weight: Tensor) -> None:
        """Note that a head has the weight of a table."""
        self.tied.update(name for name, table in self.tables.items() if table.weight is weight)

    def names(self) -> Iterable[str]:
        yield from self.layers
        yield from self.tables
        yield from self.aliases

    def add_aliases(self, names: Sequence[str], others: Sequence[str]) -> None:
        """Know modules by other names too: one for each, or several for the parts of one."""
        if any(name not in self.layers for name in names):
            return
        if len(names) > 1 and len(names) != len(others):
            return
        for number, other in enumerate(others):
            site = names[number] if len(names) == len(others) else names[0]
            layer, part = self.layers[site]
            size = layer.part_size(part)
            if len(names) < len(others):  # the parts of one are joined into a pair of higher rank
                layer.rank_factor = len(others)
                size //= len(others)
            begin = number * size if len(names) < len(others) else 0
            self.aliases[other] = SiteRows(site, begin, begin + size)

    def write(self, slot: int, weights: ModuleWeights) -> bool:
        """Put an adapter into a slot, in the order of the device's work. True: a layer took memory, so that
        graphs of steps with adapters no longer hold."""
        grew = False
        layers: dict[int, tuple[AdaptedLinear, dict[int, PartWeights]]] = {}
        for name, each in weights.items():
            if isinstance(each, TableWeights):
                grew |= self.tables[name].write(slot, each)
            else:
                layer, part = self.layers[name]
                layers.setdefault(id(layer), (layer, {}))[1][part] = each
        for layer, parts in layers.values():
            grew |= layer.write(slot, parts)
        written = {id(table) for name, table in self.tables.items() if name in weights}
        for layer, _ in self.layers.values():
            if id(layer) not in layers:
                layer.clear(slot)
        for table in self.tables.values():
            if id(table) not in written:
                table.clear(slot)
        return grew


def plain_form(layer: LinearLayer) -> LinearLayer:
    """The same layer without its activation; the two share their weight."""
    plain: Any = copy(layer)
    if hasattr(plain, "fuses_activation"):
        plain.fuses_activation, plain.op, plain.algorithm = True, "none", ""
    plain.act, plain.kernel, plain.gelu = None, None, False
    return plain  # type: ignore[no-any-return]


def base_weight(layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A layer's weight, fp32 [outputs, inputs], in whatever form it is kept."""
    plain: Any = plain_form(layer)
    weight, bias = getattr(plain, "weight", None), getattr(plain, "bias", None)
    if isinstance(weight, Tensor) and weight.layout is torch.strided and weight.dtype == dtype:
        return weight.float()
    parts = []
    for first in range(0, layer.in_features, _IDENTITY_ROWS):
        count = min(_IDENTITY_ROWS, layer.in_features - first)
        rows = torch.zeros((count, layer.in_features), dtype=dtype, device=device)
        rows[:, first : first + count].fill_diagonal_(1)
        product = plain(rows).float()
        parts.append(product if bias is None else product - bias.float())
    return torch.cat(parts).t()


class AdaptedLinear:
    """A layer, or several fused along their outputs, with the adapters of the step that runs now."""

    def __init__(
        self,
        base: LinearLayer,
        act: str,
        sizes: Sequence[int],
        sites: AdapterSites,
        like: tuple[torch.dtype, torch.device],
        *,
        has_bias: bool,
        is_transposed: bool = False,
    ) -> None:
        """`base` applies the activation `act`; `sizes` are the outputs of the fused layers. `is_transposed`:
        the checkpoint stores the weight as inputs × outputs."""
        assert len(sizes) <= MAX_PARTS
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base
        self.plain = plain_form(base)
        self.act = None if act == "identity" else activation(act)
        self.fused_act = act if act in ACTIVATION_CODES else None
        self.sites = sites
        self.state = sites.state
        self.has_bias = has_bias
        self.is_transposed = is_transposed
        self.ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
        self.dtype, self.device = like
        self.rank_factor = 1  # how many adapted modules may be joined in one part
        self.ranks: list[int] = []  # of the slots, once one has an adapter that changes this layer
        self.replaces: list[bool] = []  # whether a slot has a whole weight of its own
        self._low: LowRank | None = None
        self._whole: tuple[Tensor, Tensor, Tensor] | None = None  # weight, bias and flag of each slot

    @property
    def storage_rank(self) -> int:
        return rank_bucket(self.rank_factor * self.sites.max_rank)

    def part_size(self, number: int) -> int:
        """The outputs of one of the fused layers."""
        return self.ends[number] - (self.ends[number - 1] if number else 0)

    @property
    def is_active(self) -> bool:
        """Whether the step that runs now has adapters, and one of those on the device changes this layer."""
        return self.state.lines is not None and (self._low is not None or self._whole is not None)

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        lines = self.state.lines
        if lines is None or (self._low is None and self._whole is None):
            return self.base(x, residual, out)
        if not isinstance(x, Tensor):
            x = dequantize(x, self.dtype)
        y = self.plain(x, None, out)
        if use_kernel(y):
            y = self._with_kernels(y, x, lines)
        else:
            y = self._with_torch(y, x, lines)
        return y if residual is None else y + residual

    def _with_kernels(self, y: Tensor, x: Tensor, lines: AdapterLines) -> Tensor:
        if self._whole is not None:
            replace_(y, x, *self._whole, lines.tiled)
        if self._low is not None:
            low = shrink(x, self._low, lines.tiled, self.state.rank)
            expand_(y, low, self._low, lines.tiled, self.fused_act)
            if self.fused_act is not None:
                return y
        return y if self.act is None else self.act(y)

    def _with_torch(self, y: Tensor, x: Tensor, lines: AdapterLines) -> Tensor:
        groups = lines.by_slot()
        if self._whole is not None:
            weight, bias, _ = self._whole
            for slot, own in groups:
                if slot >= 0 and self.replaces[slot]:
                    y.index_copy_(0, own, F.linear(x.index_select(0, own), weight[slot], bias[slot]))
        if self._low is not None:
            apply_reference(y, x, self._low, groups, self.ranks)
        return y if self.act is None else self.act(y)

    def write(self, slot: int, parts: dict[int, PartWeights]) -> bool:
        """Put an adapter into a slot; whether that took memory."""
        grew = False
        if any(part.down is not None for part in parts.values()):
            grew |= self._reserve_low(any(part.gain is not None for part in parts.values()))
        if any(part.weight is not None for part in parts.values()):
            grew |= self._reserve_whole()
        if self._low is not None:
            self._write_low(self._low, slot, parts)
        if self._whole is not None:
            self._write_whole(self._whole, slot, parts)
        return grew

    def clear(self, slot: int) -> None:
        """Leave a slot without an adapter on this layer."""
        if self._low is not None and self.ranks[slot]:
            self.ranks[slot] = 0
            self._low.ranks[slot].fill_(0)
        if self._whole is not None and self.replaces[slot]:
            self.replaces[slot] = False
            self._whole[2][slot].fill_(0)

    def _reserve_low(self, has_gain: bool) -> bool:
        slots, rank, low = self.sites.num_slots, self.storage_rank, self._low
        if low is not None and (low.gain is not None or not has_gain):
            return False
        if low is None:
            self.ranks = [0] * slots
            low = LowRank(
                self._zeros(slots, len(self.ends) * rank, self.in_features),
                self._zeros(slots, self.out_features, rank),
                torch.zeros(slots, dtype=torch.int32, device=self.device),
                self.ends,
            )
        if has_gain:
            gain = torch.ones((slots, self.out_features), device=self.device)
            low = low._replace(gain=gain, shift=torch.zeros_like(gain))
        self._low = low
        return True

    def _reserve_whole(self) -> bool:
        if self._whole is not None:
            return False
        slots = self.sites.num_slots
        self.replaces = [False] * slots
        flags = torch.zeros(slots, dtype=torch.int32, device=self.device)
        weight = self._zeros(slots, self.out_features, self.in_features)
        self._whole = weight, self._zeros(slots, self.out_features), flags
        return True

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _write_low(self, low: LowRank, slot: int, parts: dict[int, PartWeights]) -> None:
        rank = max((part.rank for part in parts.values()), default=0)
        width = self.storage_rank
        for number, end in enumerate(self.ends):
            begin = self.ends[number - 1] if number else 0
            part = parts.get(number, PartWeights())
            down, up = low.down[slot, number * width :][:rank], low.up[slot, begin:end, :rank]
            if part.rank < rank:
                down.zero_()
                up.zero_()
            if low.gain is not None and low.shift is not None:
                gain, shift = low.gain[slot, begin:end], low.shift[slot, begin:end]
                gain.fill_(1) if part.gain is None else gain.copy_(part.gain, non_blocking=True)
                shift.zero_() if part.shift is None else shift.copy_(part.shift, non_blocking=True)
            if part.down is not None and part.up is not None:
                down[: part.rank].copy_(part.down, non_blocking=True)
                up[:, : part.rank].copy_(part.up, non_blocking=True)
        self.ranks[slot] = rank
        low.ranks[slot].fill_(rank)

    def base_rows(self, number: int) -> Tensor:
        """The weight of one of the fused layers, fp32 in host memory."""
        begin = self.ends[number - 1] if number else 0
        return base_weight(self.base, self.dtype, self.device)[begin : self.ends[number]].cpu()

    def with_lengths(
        self, number: int, part: PartWeights, lengths: Tensor, rows: slice = _ALL_ROWS
    ) -> PartWeights:
        """DoRA gives every row of W + B A its own length. So W x is multiplied by length / |row|, B too, and
        the bias, which is in the product already, is made up for. `rows` are those that the part changes."""
        assert part.down is not None and part.up is not None
        begin, end = self.ends[number - 1] if number else 0, self.ends[number]
        weight = self.base_rows(number)[rows]
        gain = lengths.float() / (weight + part.up.float() @ part.down.float()).norm(dim=1)
        bias = getattr(self.plain, "bias", None) if self.has_bias else None
        shift = torch.zeros_like(gain) if bias is None else (1 - gain) * bias[begin:end][rows].float().cpu()
        return part._replace(up=part.up * gain[:, None], gain=gain, shift=shift)

    def _write_whole(
        self, whole: tuple[Tensor, Tensor, Tensor], slot: int, parts: dict[int, PartWeights]
    ) -> None:
        weight, bias, flags = whole
        replaced = [part for part in parts.values() if part.weight is not None]
        if replaced and len(replaced) < len(self.ends):
            raise ValueError("an adapter replaces some of the layers that are fused, not all")
        begin = 0
        for number, end in enumerate(self.ends):
            if replaced and (own := parts[number].weight) is not None:
                weight[slot, begin:end].copy_(own, non_blocking=True)
                added = parts[number].bias
                bias[slot, begin:end].zero_() if added is None else bias[slot, begin:end].copy_(added)
            begin = end
        self.replaces[slot] = bool(replaced)
        flags[slot].fill_(int(bool(replaced)))


class AdaptedTable:
    """The change that adapters make to rows of an embedding table."""

    def __init__(self, weight: Tensor, sites: AdapterSites) -> None:
        self.weight = weight  # [rows, width]
        self.rows, self.width = weight.shape
        self.sites = sites
        self.state = sites.state
        self.dtype, self.device = weight.dtype, weight.device
        self.ranks: list[int] = []
        self._down: Tensor | None = None  # [slots, rows, max rank]
        self._low: LowRank | None = None
        # Where the new row of each row is in `_new`, of each slot; -1: it keeps the old one.
        self._index: Tensor | None = None  # int32 [slots, rows]
        self._new: Tensor | None = None  # [slots, replaced, width]

    @property
    def is_active(self) -> bool:
        return self.state.lines is not None and (self._low is not None or self._new is not None)

    def change_(self, embedded: Tensor, ids: Tensor | None) -> Tensor:
        """Change rows [tokens, width] of the table in place, at `ids`; None: all are row 0."""
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
        """Put an adapter into a slot; whether that took memory."""
        grew = self._write_low(slot, weights) if weights.rank or self._low is not None else False
        if weights.rows is not None or self._new is not None:
            grew |= self._write_rows(slot, weights)
        return grew

    def clear(self, slot: int) -> None:
        """Leave a slot without an adapter on this table."""
        if self._low is not None and self.ranks[slot]:
            self.ranks[slot] = 0
            self._low.ranks[slot].fill_(0)
        if self._index is not None:
            self._index[slot].fill_(-1)

    def _write_low(self, slot: int, weights: TableWeights) -> bool:
        slots, rank = self.sites.num_slots, rank_bucket(self.sites.max_rank)
        grew = self._low is None
        if self._low is None or self._down is None:
            self.ranks = [0] * slots
            self._down = torch.zeros((slots, self.rows, rank), dtype=self.dtype, device=self.device)
            up = torch.zeros((slots, self.width, rank), dtype=self.dtype, device=self.device)
            ranks = torch.zeros(slots, dtype=torch.int32, device=self.device)
            self._low = LowRank(up, up, ranks, (self.width,))  # nothing is shrunk: A x is a row of the table
        if weights.down is not None and weights.up is not None:
            self._down[slot, :, : weights.rank].copy_(weights.down, non_blocking=True)
            self._low.up[slot, :, : weights.rank].copy_(weights.up, non_blocking=True)
        self.ranks[slot] = weights.rank
        self._low.ranks[slot].fill_(weights.rank)
        return grew

    def _write_rows(self, slot: int, weights: TableWeights) -> bool:
        grew, count = False, 0 if weights.rows is None else len(weights.rows)
        if self._index is None:
            shape = (self.sites.num_slots, self.rows)
            self._index = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if self._new is None or self._new.shape[1] < count:
            wide = (self.sites.num_slots, count, self.width)
            larger = torch.zeros(wide, dtype=self.dtype, device=self.device)
            if self._new is not None:
                larger[:, : self._new.shape[1]] = self._new
            self._new, grew = larger, True
        self._index[slot].fill_(-1)
        if weights.rows is not None and weights.indices is not None:
            self._new[slot, :count].copy_(weights.rows, non_blocking=True)
            numbers = torch.arange(count, dtype=torch.int32, device=self.device)
            self._index[slot].index_copy_(0, weights.indices.to(self.device), numbers)
        return grew


def unwrap(layer: Any) -> Any:
    """The layer without its adapters."""
    return layer.base if isinstance(layer, AdaptedLinear) else layer


def current_form(layer: LinearLayer) -> LinearLayer:
    """The plain layer, unless the step that runs now has adapters that change it."""
    return layer.base if isinstance(layer, AdaptedLinear) and not layer.is_active else layer
