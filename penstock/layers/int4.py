"""Linear layers with 4-bit weights, for devices with kernels. On others, weights are dequantised at load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.activation import ACTIVATION_CODES, bias_act_
from penstock.kernels.int4 import (
    HALF_RANGE,
    INT4_TILES,
    PackedInt4,
    can_pack,
    dequantize_int4,
    int4_matmul,
    pack_int4,
)
from penstock.kernels.language import is_precompiling, use_kernel
from penstock.kernels.quantize import Activations, dequantize
from penstock.layers.activation import activation
from penstock.weights.quantized import IntGroups

MAX_KERNEL_ROWS = 64  # with more rows, dequantising the weight for the matrix library is faster


class WeightScratch:
    """Memory for one dequantised weight, shared by all layers of a model, which run one after another.

    It is allocated while the model is built, so that its address does not change after a graph is captured.
    """

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def reserve(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        if self.values is None or len(self.values) < size:
            self.values = None  # free the smaller tensor first
            self.values = torch.empty(size, dtype=dtype, device=device)

    def take(self, rows: int, cols: int) -> Tensor:
        assert self.values is not None
        return self.values[: rows * cols].view(rows, cols)


class Int4Linear:
    """A linear layer with 4-bit weights. `order` permutes inputs into the weight's order, group by group."""

    def __init__(
        self,
        weight: PackedInt4,
        bias: Tensor | None,
        act: str,
        dtype: torch.dtype,
        scratch: WeightScratch,
        order: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.outputs, weight.inputs
        self.weight = weight
        self.bias = bias
        self.dtype = dtype
        self.order = order
        self.scratch = scratch
        self.act = None if act == "identity" else activation(act)
        self.kernel = act if act in ACTIVATION_CODES else None
        scratch.reserve(self.out_features * self.in_features, dtype, weight.packed.device)

    def __call__(self, x: Activations, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = dequantize(x, self.dtype)
        if self.order is not None:
            x = x.index_select(1, self.order)
        if self.kernel is not None and use_kernel(x):
            out = bias_act_(self._product(x, None), self.bias, self.kernel)
        else:
            out = self._product(x, self.bias)
            out = out if self.act is None else self.act(out)
        return out if residual is None else out + residual

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if is_precompiling():  # compile every variant that a step may use
            for _, tile in INT4_TILES:
                int4_matmul(x[: tile.rows], self.weight, bias, tile)
            dequantize_int4(self.weight, self.scratch.take(self.out_features, self.in_features))
        if len(x) <= MAX_KERNEL_ROWS:
            return int4_matmul(x, self.weight, bias)
        weight = dequantize_int4(self.weight, self.scratch.take(self.out_features, self.in_features))
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def supports_int4(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply 4-bit weights here. Not on a GPU in fp32, because it would round the rows."""
    return use_kernel(torch.empty(0, device=device)) and (device.type == "cpu" or dtype != torch.float32)


def join_int4(parts: Sequence[IntGroups]) -> tuple[PackedInt4, Tensor | None] | None:
    """Pack weights as one, concatenated along the outputs. Return it with the order that its inputs need.

    None if the weights do not fit together, or no kernel can read them.
    """
    first = parts[0]
    inputs, groups = first.codes.shape[1], len(first.scales)
    for part in parts:
        if part.bits != 4 or len(part.scales) != groups or not can_pack(inputs, groups):
            return None
        if not _have_same_order(part, first):
            return None
    codes = torch.cat([part.codes for part in parts])
    order = None
    if first.group_of is not None:
        if (torch.bincount(first.group_of, minlength=groups) != inputs // groups).any():
            return None
        order = first.group_of.argsort(stable=True)
        codes = codes[:, order]
    dtypes = {part.scales.dtype for part in parts}
    dtype = first.scales.dtype if len(dtypes) == 1 else torch.float32
    scales = torch.cat([part.scales.to(dtype) for part in parts], dim=1)
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts], dim=1)
    if zeros is not None and bool((zeros == HALF_RANGE).all()):
        zeros = None  # GPTQ stores them for symmetric weights too
    return pack_int4(codes, scales, zeros), order


def _have_same_order(part: IntGroups, other: IntGroups) -> bool:
    if part.group_of is None or other.group_of is None:
        return part.group_of is other.group_of
    return torch.equal(part.group_of, other.group_of)


def _zeros(part: IntGroups) -> Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full(part.scales.shape, HALF_RANGE, dtype=torch.uint8, device=part.scales.device)
