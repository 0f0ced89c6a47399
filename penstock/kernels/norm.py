"""Residual addition and normalisation in one pass; x + residual is written only if it is needed later."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import bind, jit, next_power_of_2, num_warps_for, tl, wait_for_inputs
from penstock.kernels.quantize import Quantized, empty_quantized, store_quantized


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool
) -> tuple[Tensor, Tensor]:
    """(x + residual, its normalisation), both [tokens, width]."""
    total = x + residual
    if rms:
        return total, F.rms_norm(total, weight.shape, weight, eps)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


@jit(overlaps=True)
def _add_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RMS: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    """Add and normalise one row. `total` gets the sum (KEEP 1), the normalised sum (2) or nothing (0).

    With QUANTIZE, `out` is fp8.
    """
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(x + at + cols, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + at + cols, mask=inside, other=0.0).to(tl.float32)
    if KEEP == 1:
        tl.store(total + at + cols, value.to(total.dtype.element_ty), mask=inside)
    if not RMS:
        mean = tl.sum(value, axis=0) / WIDTH
        value = tl.where(inside, value - mean, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    if KEEP == 2:
        tl.store(total + at + cols, value.to(total.dtype.element_ty), mask=inside)
    if QUANTIZE:
        store_quantized(value, out, scales, row, cols, inside, WIDTH)
    else:
        tl.store(out + at + cols, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def _bound_add_norm(width: int, rms: bool, bias: bool, keep: int, quantize: bool) -> Callable[..., Any]:
    """The kernel takes x, residual, weight and, where they exist, bias, out and the scales of out."""
    block = next_power_of_2(width)
    given = 4 if bias else 3
    written = (given, given + 1) if quantize else (given, 0) if keep else (0, 0)
    return bind(
        _add_norm,
        (0, 1, 2, given - 1, 0, *written),
        WIDTH=width,
        BLOCK=block,
        RMS=rms,
        BIAS=bias,
        KEEP=keep,
        QUANTIZE=quantize,
        num_warps=num_warps_for(block),
    )


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    keep: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm_reference` for contiguous [tokens, width]; `x` is overwritten with the sum.

    With `keep` False the sum is not written: both results are `x`, overwritten with the normalised sum.
    """
    assert x.is_contiguous() and residual.is_contiguous()
    tokens, width = x.shape
    weights = (weight,) if bias is None else (weight, bias)
    launch = _bound_add_norm(width, rms, bias is not None, int(keep), False)
    if not keep:
        if tokens:
            launch(tokens, x, residual, *weights, eps)
        return x, x
    out = torch.empty_like(x)
    if tokens:
        launch(tokens, x, residual, *weights, out, eps)
    return x, out


def add_norm_quantized(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    rms: bool,
    post: bool = False,
) -> tuple[Tensor, Quantized]:
    """Return x + residual and its normalisation in fp8; `x` is overwritten with the sum.

    With `post`, `x` is overwritten with the normalised sum instead.
    """
    assert x.is_contiguous() and residual.is_contiguous()
    tokens, width = x.shape
    out = empty_quantized(tokens, width, x.device)
    if tokens:
        launch = _bound_add_norm(width, rms, bias is not None, 2 if post else 1, True)
        launch(tokens, x, residual, weight, *(() if bias is None else (bias,)), *out, eps)
    return x, out


def norm_add_norm_reference(
    x: Tensor, residual: Tensor, before: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x, before) + residual, its rms_norm with `weight`), both [tokens, width]."""
    total = F.rms_norm(x, before.shape, before, eps) + residual
    return total, F.rms_norm(total, weight.shape, weight, eps)


@jit(overlaps=True)
def _norm_add_norm(
    x: tl.tensor,
    residual: tl.tensor,
    before: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(x + at + cols, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value *= tl.load(before + cols, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + at + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at + cols, value.to(total.dtype.element_ty), mask=inside)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZE:
        store_quantized(value, out, scales, row, cols, inside, WIDTH)
    else:
        tl.store(out + at + cols, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def _bound_norm_add_norm(width: int, quantize: bool) -> Callable[..., Any]:
    block = next_power_of_2(width)
    written = (4, 5) if quantize else (4, 0)
    return bind(
        _norm_add_norm,
        (0, 1, 2, 3, 0, *written),
        WIDTH=width,
        BLOCK=block,
        QUANTIZE=quantize,
        num_warps=num_warps_for(block),
    )


def norm_add_norm(
    x: Tensor, residual: Tensor, before: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `norm_add_norm_reference` for contiguous [tokens, width]; `x` is overwritten with the sum."""
    assert x.is_contiguous() and residual.is_contiguous()
    tokens, width = x.shape
    out = torch.empty_like(x)
    if tokens:
        _bound_norm_add_norm(width, False)(tokens, x, residual, before, weight, out, eps)
    return x, out


def norm_add_norm_quantized(
    x: Tensor, residual: Tensor, before: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Quantized]:
    """`norm_add_norm` with the second result in fp8."""
    assert x.is_contiguous() and residual.is_contiguous()
    tokens, width = x.shape
    out = empty_quantized(tokens, width, x.device)
    if tokens:
        _bound_norm_add_norm(width, True)(tokens, x, residual, before, weight, *out, eps)
    return x, out
