"""Activations in fp8, with one scale per row, so that a row's result does not depend on its batch.

A kernel that computes rows for an fp8 product stores them with `store_quantized` while they are in registers.
`quantize_rows` is a separate pass for other rows.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import jit, next_power_of_2, num_warps_for, tl, use_kernel, wait_for_inputs

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest value of e4m3
_MIN_MAGNITUDE = 1e-12  # prevents a scale of 0 for a row of zeros


class Quantized(NamedTuple):
    """Rows equal to values · scales."""

    values: Tensor  # fp8 [rows, width]
    scales: Tensor  # fp32 [rows, 1]


Activations: TypeAlias = Tensor | Quantized  # the input of a linear layer, [tokens, width]


def dequantize(x: Activations, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows as a tensor. Quantised rows are converted to `dtype`, others stay as they are."""
    return x if isinstance(x, Tensor) else (x.values.float() * x.scales).to(dtype)


def empty_quantized(rows: int, width: int, device: torch.device) -> Quantized:
    return Quantized(
        torch.empty((rows, width), dtype=FP8, device=device),
        torch.empty((rows, 1), dtype=torch.float32, device=device),
    )


def quantize_rows_reference(x: Tensor) -> Quantized:
    """Scale each row [rows, width] so that its largest value becomes `FP8_MAX`."""
    wide = x.float()
    largest = wide.abs().amax(dim=1, keepdim=True).clamp_min(_MIN_MAGNITUDE)
    return Quantized((wide * (FP8_MAX / largest)).to(FP8), largest / FP8_MAX)


def scaled_matmul_reference(
    x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x Wᵀ + b of the dequantised operands, rounded once."""
    wide = None if bias is None else bias.float()
    return F.linear(dequantize(x), dequantize(weight), wide).to(dtype)


@jit()
def store_quantized(
    value: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Quantise and store one whole row. `value` is fp32, and 0 past the end of the row."""
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
    scaled = value * (448.0 / largest)
    tl.store(values + row * WIDTH + cols, scaled.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, largest / 448.0)


@jit(unspecialized=("stride",), overlaps=True)
def _quantize_rows(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(x + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    store_quantized(value, values, scales, row, cols, inside, WIDTH)


def quantize_rows(x: Tensor) -> Quantized:
    """Compute `quantize_rows_reference`, with the kernel if the device supports it; rows may be strided."""
    if not use_kernel(x):
        return quantize_rows_reference(x)
    rows, width = x.shape
    assert x.stride(1) == 1
    out = empty_quantized(rows, width, x.device)
    block = next_power_of_2(width)
    if rows:
        _quantize_rows[(rows,)](
            x, *out, x.stride(0), WIDTH=width, BLOCK=block, num_warps=num_warps_for(block)
        )
    return out
