"""Residual + normalisation in one pass: x + residual is read once, and written only where it goes on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import jit, power_of_2, tl, warps_for
from penstock.kernels.quantize import Quantized, empty_quantized, store_quantized


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, rms: bool
) -> tuple[Tensor, Tensor]:
    """(x + residual, the same normalised), both [tokens, width]."""
    total = x + residual
    if rms:
        return total, F.rms_norm(total, weight.shape, weight, eps)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


@jit()
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
    """KEEP 1 writes the sum to `total`, 2 the normalised sum, 0 nothing; `out` is fp8 with QUANTIZE."""
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
    """As the reference, for contiguous [tokens, width]. The sum is written over `x`, and with `keep` False
    not at all: then the first of the two is worthless."""
    out = torch.empty_like(x)
    _launch_add_norm(x, residual, weight, bias, (out, x), eps, rms, keep=int(keep), quantize=False)
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
    """(x + residual, the same normalised in fp8), the first over `x`; with `post` the first of the two is
    normalised as well."""
    out = empty_quantized(x.shape[0], x.shape[1], x.device)
    _launch_add_norm(x, residual, weight, bias, out, eps, rms, keep=2 if post else 1, quantize=True)
    return x, out


def _launch_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: tuple[Tensor, Tensor],  # and its scales, where it has them
    eps: float,
    rms: bool,
    *,
    keep: int,
    quantize: bool,
) -> None:
    assert x.is_contiguous() and residual.is_contiguous()
    tokens, width = x.shape
    block = power_of_2(width)
    if tokens:
        _add_norm[(tokens,)](
            x,
            residual,
            weight,
            weight if bias is None else bias,
            x,
            *out,
            eps,
            WIDTH=width,
            BLOCK=block,
            RMS=rms,
            BIAS=bias is not None,
            KEEP=keep,
            QUANTIZE=quantize,
            num_warps=warps_for(block),
        )


def norm_add_norm_reference(
    x: Tensor, residual: Tensor, before: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x) by `before` + residual, the same normalised by `weight`), both [tokens, width]."""
    total = F.rms_norm(x, before.shape, before, eps) + residual
    return total, F.rms_norm(total, weight.shape, weight, eps)


@jit()
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


def norm_add_norm(
    x: Tensor, residual: Tensor, before: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As the reference, for contiguous [tokens, width]. The sum is written over `x`."""
    out = torch.empty_like(x)
    _launch_norm_add_norm(x, residual, before, weight, (out, x), eps, quantize=False)
    return x, out


def norm_add_norm_quantized(
    x: Tensor, residual: Tensor, before: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Quantized]:
    """The same with the second of the two in fp8."""
    out = empty_quantized(x.shape[0], x.shape[1], x.device)
    _launch_norm_add_norm(x, residual, before, weight, out, eps, quantize=True)
    return x, out


def _launch_norm_add_norm(
    x: Tensor,
    residual: Tensor,
    before: Tensor,
    weight: Tensor,
    out: tuple[Tensor, Tensor],  # and its scales, where it has them
    eps: float,
    *,
    quantize: bool,
) -> None:
    assert x.is_contiguous() and residual.is_contiguous()
    tokens, width = x.shape
    block = power_of_2(width)
    if tokens:
        _norm_add_norm[(tokens,)](
            x,
            residual,
            before,
            weight,
            x,
            *out,
            eps,
            WIDTH=width,
            BLOCK=block,
            QUANTIZE=quantize,
            num_warps=warps_for(block),
        )
