"""A linear layer with the weights of LoRA adapters for all slots.

Adapter weights are allocated when the first adapter changes the layer. A step without adapters runs the base
layer, with its fused epilogue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES
from penstock.kernels.language import use_kernel
from penstock.kernels.lora import (
    LARGE_TILE,
    MAX_PARTS,
    SMALL_TILE,
    LineTiles,
    LowRank,
    apply_reference,
    expand_,
    expand_gated,
    rank_bucket,
    replace_,
    shrink,
)
from penstock.kernels.lora_linear import LoraLinear
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.layers.adapter_state import AdapterLines, AdapterSlots
from penstock.layers.linear import Linear, LinearLayer
from penstock.layers.parallel import ModuleShare
from penstock.weights.adapters import PartWeights

FUSES_PRODUCTS = True  # False: separate launches for the product and its adapters, for measurements
# The smallest number of lines that was measured. Fewer do not fill the multiprocessors with tiles of 128.
MIN_FUSED_LINES = 2048
SumOverRanks = Callable[[Tensor], Tensor]
_ALL_ROWS = slice(None)
_IDENTITY_ROWS = 1024  # rows of the identity matrix that are multiplied at a time to read a weight


def plain_form(layer: LinearLayer) -> LinearLayer:
    """Return the layer without its activation. Both share the weight."""
    plain: Any = copy(layer)
    if hasattr(plain, "fuses_activation"):
        plain.fuses_activation, plain.op, plain.algorithm = True, "none", ""
    plain.act, plain.kernel, plain.gelu = None, None, False
    return plain  # type: ignore[no-any-return]


def base_weight(layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Read a layer's weight as fp32 [outputs, inputs], whatever form it is stored in."""
    plain: Any = plain_form(layer)
    weight = getattr(plain, "weight", None)
    if isinstance(weight, Tensor) and weight.layout is torch.strided and weight.dtype == dtype:
        return weight.float()
    if isinstance(bias := getattr(plain, "bias", None), Tensor):
        plain.bias = torch.zeros_like(bias)  # adding and subtracting the bias would round the weight
    parts = []
    for first in range(0, layer.in_features, _IDENTITY_ROWS):
        count = min(_IDENTITY_ROWS, layer.in_features - first)
        rows = torch.zeros((count, layer.in_features), dtype=dtype, device=device)
        rows[:, first : first + count].fill_diagonal_(1)
        parts.append(plain(rows).float())
    return torch.cat(parts).t()


class AdaptedLinear:
    """A layer, or several fused along their outputs, with the adapters of the current step."""

    def __init__(
        self,
        base: LinearLayer,
        act: str,
        sizes: Sequence[int],
        room: AdapterSlots,
        like: tuple[torch.dtype, torch.device],
        *,
        has_bias: bool,
        is_transposed: bool = False,
        shares: Sequence[ModuleShare] = (),
    ) -> None:
        """`base` applies the activation `act`. `sizes` are the numbers of outputs of the fused layers.

        With `is_transposed`, the checkpoint stores the weight as inputs × outputs. On one of several ranks,
        `shares` says which part of each fused layer `base` has.
        """
        assert len(sizes) <= MAX_PARTS
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base
        self.plain = plain_form(base)
        self.act = None if act == "identity" else activation(act)
        self.fused_act = act if act in ACTIVATION_CODES else None
        self.room = room
        self.state = room.state
        self.has_bias = has_bias
        self.is_transposed = is_transposed
        self.shares = tuple(shares) or tuple(ModuleShare.whole(size, base.in_features) for size in sizes)
        self.ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
        self.dtype, self.device = like
        # In a gated block: its activation, and whether the gate is first.
        self.gate: tuple[str, bool] | None = None
        self.rank_factor = 1  # number of adapted modules that one part may join
        # For each slot, the ranks of the parts; () if no adapter in the slot changes this layer.
        self.ranks: list[tuple[int, ...]] = []
        self.replaces: list[bool] = []  # for each slot, whether it replaces the whole weight
        self._low: LowRank | None = None
        self._whole: tuple[Tensor, Tensor, Tensor] | None = None  # weight, bias and flag of each slot
        self._fused: LoraLinear | None = None  # None: no adapters yet, or not supported

    @property
    def storage_rank(self) -> int:
        return rank_bucket(self.rank_factor * self.room.max_rank)

    def part_size(self, number: int) -> int:
        """The number of outputs of one of the fused layers that are computed here."""
        return self.ends[number] - (self.ends[number - 1] if number else 0)

    @property
    def is_active(self) -> bool:
        """Whether the current step has adapters, and any adapter on the device changes this layer."""
        return self.state.lines is not None and (self._low is not None or self._whole is not None)

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        lines, low = self.state.lines, self._low
        if lines is None or (low is None and self._whole is None):
            return self.base(x, residual, out)
        if not isinstance(x, Tensor):
            x = dequantize(x, self.dtype)
        fused = self._fused_product(x, lines) if self.gate is None else None
        if fused is not None and low is not None:
            y = fused(x, low, lines.slots, self.state.rank, out)
            return y if residual is None else y + residual
        y = self.plain(x, None, out)
        if use_kernel(y):
            y = self._with_kernels(y, x, lines)
        else:
            y = self._with_torch(y, x, lines)
        return y if residual is None else y + residual

    def gated(self, x: Activations, act: str, gate_first: bool, out: Tensor | None) -> Tensor | None:
        """Compute act(gate) · up if this layer computes both halves and a kernel can do the rest; otherwise
        return None. The layer must be active. `out` is for both halves."""
        lines, low = self.state.lines, self._low
        if lines is None or low is None or self._whole is not None or not use_kernel(low.up):
            return None
        if not isinstance(x, Tensor):
            x = dequantize(x, self.dtype)
        if self.gate == (act, gate_first) and (fused := self._fused_product(x, lines)) is not None:
            return fused(x, low, lines.slots, self.state.rank)
        both = self.plain(x, None, out)
        shrunk = shrink(x, low, lines.tiled, self.state.rank)
        return expand_gated(both, shrunk, low, lines.tiled, act, gate_first=gate_first)

    def _fused_product(self, x: Tensor, lines: AdapterLines) -> LoraLinear | None:
        """The product with the adapters inside, if it supports these lines and is faster; otherwise None.

        In all layers measured it was faster while x is read once. With more slots per tile, separate launches
        are faster.
        """
        fused = self._fused
        if fused is None or self._low is None or self._whole is not None or not FUSES_PRODUCTS:
            return None
        if len(x) < MIN_FUSED_LINES or not use_kernel(x):
            return None
        if self.state.tile_slots > fused.slots_per_pass(min(self.state.rank, self.storage_rank)):
            return None
        return fused if fused.serves(x, self._low, lines.slots, self.state.rank) else None

    def _make_fused(self) -> LoraLinear | None:
        plain = self.plain
        if type(plain) is not Linear or (self.act is not None and self.fused_act is None):
            return None
        if self.gate is not None:
            act, gate_first = self.gate
            return LoraLinear.of(plain.weight, plain.bias, self.ends, act, gate_first)
        return LoraLinear.of(plain.weight, plain.bias, self.ends, self.fused_act)

    def compile_kernels(self, rank: int, *, has_gain: bool) -> None:
        """Compile the kernels for steps with an adapter of this rank, so that no step waits for them."""
        width, parts = self.storage_rank, len(self.ends)
        pair = self._zeros(1, parts * width, self.in_features), self._zeros(1, self.out_features, width)
        scaled = torch.ones((1, self.out_features), device=self.device) if has_gain else None
        ranks = torch.zeros((1, parts), dtype=torch.int32, device=self.device)
        low = LowRank(*pair, ranks, self.ends, scaled, scaled)
        x, y = self._zeros(1, self.in_features), self._zeros(1, self.out_features)
        lines = torch.zeros((1, 3), dtype=torch.int32, device=self.device)
        for size in (SMALL_TILE, LARGE_TILE):
            tiled = LineTiles(lines[0, :1], lines, size)
            shrunk = shrink(x, low, tiled, rank)
            expand_(y, shrunk, low, tiled, self.fused_act)
            if self.gate is not None:
                expand_gated(y, shrunk, low, tiled, self.gate[0], gate_first=self.gate[1])
        # Not `self._fused`, which caches descriptors of the layer's own adapters and may be in use by a step.
        fused = self._make_fused()
        if fused is not None and fused.serves(x, low, lines[0, :1], rank):
            for cols in fused.column_choices(min(rank, width)):
                fused(x, low, lines[0, :1], rank, cols=cols)

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
        """Write an adapter to a slot. Return whether memory was allocated."""
        grew = self.reserve(parts)
        if self._low is not None:
            self._write_low(self._low, slot, parts)
        if self._whole is not None:
            self._write_whole(self._whole, slot, parts)
        return grew

    def reserve(self, parts: dict[int, PartWeights]) -> bool:
        """Allocate memory for an adapter in any slot. Return whether any was needed."""
        grew = False
        if any(part.down is not None for part in parts.values()):
            grew |= self._reserve_low(any(part.gain is not None for part in parts.values()))
        if any(part.weight is not None for part in parts.values()):
            grew |= self._reserve_whole()
        return grew

    def clear(self, slot: int) -> None:
        """Clear a slot, so that it has no adapter on this layer."""
        if self._low is not None and self.ranks[slot]:
            self.ranks[slot] = ()
            for values in (self._low.ranks, self._low.down, self._low.up):
                values[slot].zero_()
        if self._whole is not None and self.replaces[slot]:
            self.replaces[slot] = False
            self._whole[2][slot].fill_(0)

    def _reserve_low(self, has_gain: bool) -> bool:
        slots, rank, low = self.room.num_slots, self.storage_rank, self._low
        if low is not None and (low.gain is not None or not has_gain):
            return False
        if low is None:
            self.ranks = [()] * slots
            low = LowRank(
                self._zeros(slots, len(self.ends) * rank, self.in_features),
                self._zeros(slots, self.out_features, rank),
                torch.zeros((slots, len(self.ends)), dtype=torch.int32, device=self.device),
                self.ends,
            )
            self._fused = self._make_fused()
        if has_gain:
            gain = torch.ones((slots, self.out_features), device=self.device)
            low = low._replace(gain=gain, shift=torch.zeros_like(gain))
        self._low = low
        return True

    def _reserve_whole(self) -> bool:
        if self._whole is not None:
            return False
        slots = self.room.num_slots
        self.replaces = [False] * slots
        flags = torch.zeros(slots, dtype=torch.int32, device=self.device)
        weight = self._zeros(slots, self.out_features, self.in_features)
        self._whole = weight, self._zeros(slots, self.out_features), flags
        return True

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _write_low(self, low: LowRank, slot: int, parts: dict[int, PartWeights]) -> None:
        width = self.storage_rank
        for number, end in enumerate(self.ends):
            begin = self.ends[number - 1] if number else 0
            part = parts.get(number, PartWeights())
            if low.gain is not None and low.shift is not None:
                gain, shift = low.gain[slot, begin:end], low.shift[slot, begin:end]
                gain.fill_(1) if part.gain is None else gain.copy_(part.gain, non_blocking=True)
                shift.zero_() if part.shift is None else shift.copy_(part.shift, non_blocking=True)
            down, up = low.down[slot, number * width : (number + 1) * width], low.up[slot, begin:end]
            if part.down is not None and part.up is not None:
                down[: part.rank].copy_(part.down, non_blocking=True)
                up[:, : part.rank].copy_(part.up, non_blocking=True)
            down[part.rank :].zero_()  # the fused product does not read `ranks`
            up[:, part.rank :].zero_()
            low.ranks[slot, number].fill_(part.rank)
        ranks = tuple(parts[number].rank if number in parts else 0 for number in range(len(self.ends)))
        self.ranks[slot] = ranks if any(ranks) else ()

    def base_rows(self, number: int) -> Tensor:
        """Read the weight of one of the fused layers, fp32 in host memory."""
        begin = self.ends[number - 1] if number else 0
        return base_weight(self.base, self.dtype, self.device)[begin : self.ends[number]].cpu()

    def with_lengths(
        self,
        number: int,
        part: PartWeights,
        lengths: Tensor,
        rows: slice | Tensor = _ALL_ROWS,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> PartWeights:
        """Apply DoRA's lengths of the rows of W + B A to a part.

        W x and B are multiplied by length / |row|. The product includes the bias, which must not be scaled,
        so `shift` corrects it. `rows` are the rows that the part changes. `sum_over_ranks` is needed if a
        rank has only some of a row's inputs.
        """
        assert part.down is not None and part.up is not None
        begin, end = self.ends[number - 1] if number else 0, self.ends[number]
        weight = self.base_rows(number)[rows]
        changed = weight + part.up.float() @ part.down.float()
        if self.shares[number].is_summed:
            assert sum_over_ranks is not None
            gain = lengths.float() / sum_over_ranks(changed.square().sum(dim=1)).sqrt()
        else:
            gain = lengths.float() / changed.norm(dim=1)
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


def unwrap(layer: Any) -> Any:
    """Return the layer without its adapters."""
    return layer.base if isinstance(layer, AdaptedLinear) else layer


def current_form(layer: LinearLayer) -> LinearLayer:
    """Return the base layer, unless adapters change the layer in the current step."""
    return layer.base if isinstance(layer, AdaptedLinear) and not layer.is_active else layer
