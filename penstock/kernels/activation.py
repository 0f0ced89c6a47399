"""Kernels between the two matrix products of a feed-forward block: bias and activation, or act(gate) · up.

GELU is exact if the model's GELU is; the matrix library's epilogue has only the tanh approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.language import bind, cdiv, jit, next_power_of_2, num_warps_for, tl, wait_for_inputs
from penstock.kernels.quantize import Quantized, empty_quantized, store_quantized

# Activation names of `layers.activation` → the code that kernels use.
ACTIVATION_CODES = {
    "gelu": 0,
    "gelu_new": 1,
    "gelu_pytorch_tanh": 1,
    "silu": 2,
    "swish": 2,
    "relu": 3,
    "quick_gelu": 4,
}
_BLOCK = 1024


def act_reference(x: Tensor, act: str) -> Tensor:
    match ACTIVATION_CODES[act]:
        case 0:
            return F.gelu(x)
        case 1:
            return F.gelu(x, approximate="tanh")
        case 2:
            return F.silu(x)
        case 4:
            return x * torch.sigmoid(1.702 * x)
        case _:
            return F.relu(x)


def bias_act_reference(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(x + bias), [tokens, width]."""
    return act_reference(x if bias is None else x + bias, act)


def gated_activation_reference(x: Tensor, act: str, gate_first: bool) -> Tensor:
    """act(gate) · up, where `x` has both halves side by side: [tokens, 2 · width] → [tokens, width]."""
    first, second = x.chunk(2, dim=-1)
    gate, up = (first, second) if gate_first else (second, first)
    return act_reference(gate, act) * up


@jit()
def activate(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    if KIND == 0:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 1:  # 0.5 · (1 + tanh(u)) is sigmoid(2u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if KIND == 2:
        return x * tl.sigmoid(x)
    if KIND == 4:
        return x * tl.sigmoid(1.702 * x)
    return tl.maximum(x, 0.0)


@jit(overlaps=True)
def _bias_act(
    x: tl.tensor,
    bias: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    wait_for_inputs()
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    cols = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    at = x + (program // parts).to(tl.int64) * WIDTH + cols
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, activate(value, KIND).to(x.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def _bound_bias_act(width: int, act: str, bias: bool) -> Callable[..., Any]:
    return bind(
        _bias_act,
        (0, 1 if bias else 0),
        WIDTH=width,
        BLOCK=_BLOCK,
        KIND=ACTIVATION_CODES[act],
        BIAS=bias,
        num_warps=4,
    )


def bias_act_(x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """Compute `bias_act_reference` in place; `x` is contiguous."""
    tokens, width = x.shape
    assert x.is_contiguous()
    if tokens:
        launch = _bound_bias_act(width, act, bias is not None)
        launch(tokens * cdiv(width, _BLOCK), x, *(() if bias is None else (bias,)))
    return x


@jit(overlaps=True)
def _bias_act_quantized(
    x: tl.tensor,
    bias: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(x + row * WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    store_quantized(activate(value, KIND), values, scales, row, cols, inside, WIDTH)


@lru_cache(maxsize=256)
def _bound_bias_act_quantized(width: int, act: str, bias: bool) -> Callable[..., Any]:
    block = next_power_of_2(width)
    return bind(
        _bias_act_quantized,
        WIDTH=width,
        BLOCK=block,
        KIND=ACTIVATION_CODES[act],
        BIAS=bias,
        num_warps=num_warps_for(block),
    )


def bias_act_quantized(x: Tensor, bias: Tensor | None, act: str) -> Quantized:
    """Compute `bias_act_reference` with fp8 output; `x` is contiguous and not modified."""
    tokens, width = x.shape
    assert x.is_contiguous()
    out = empty_quantized(tokens, width, x.device)
    if tokens:
        launch = _bound_bias_act_quantized(width, act, bias is not None)
        launch(tokens, x, x if bias is None else bias, *out)
    return out


@jit(overlaps=True)
def _gated_activation(
    x: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATE_FIRST: tl.constexpr,
) -> None:
    wait_for_inputs()
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    cols = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < WIDTH
    token = (program // parts).to(tl.int64)
    first = tl.load(x + token * (2 * WIDTH) + cols, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + token * (2 * WIDTH) + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    value = activate(first, KIND) * second if GATE_FIRST else activate(second, KIND) * first
    tl.store(out + token * WIDTH + cols, value.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=256)
def _bound_gated_activation(width: int, act: str, gate_first: bool) -> Callable[..., Any]:
    return bind(
        _gated_activation,
        WIDTH=width,
        BLOCK=_BLOCK,
        KIND=ACTIVATION_CODES[act],
        GATE_FIRST=gate_first,
        num_warps=4,
    )


def gated_activation(x: Tensor, act: str, gate_first: bool) -> Tensor:
    """Compute `gated_activation_reference`; `x` is contiguous."""
    tokens, both = x.shape
    width = both // 2
    assert x.is_contiguous()
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        _bound_gated_activation(width, act, gate_first)(tokens * cdiv(width, _BLOCK), x, out)
    return out


@jit(overlaps=True)
def _gated_activation_quantized(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GATE_FIRST: tl.constexpr,
) -> None:
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    first = tl.load(x + row * (2 * WIDTH) + cols, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * (2 * WIDTH) + WIDTH + cols, mask=inside, other=0.0).to(tl.float32)
    value = activate(first, KIND) * second if GATE_FIRST else activate(second, KIND) * first
    store_quantized(value, values, scales, row, cols, inside, WIDTH)


@lru_cache(maxsize=256)
def _bound_gated_activation_quantized(width: int, act: str, gate_first: bool) -> Callable[..., Any]:
    block = next_power_of_2(width)
    return bind(
        _gated_activation_quantized,
        WIDTH=width,
        BLOCK=block,
        KIND=ACTIVATION_CODES[act],
        GATE_FIRST=gate_first,
        num_warps=num_warps_for(block),
    )


def gated_activation_quantized(x: Tensor, act: str, gate_first: bool) -> Quantized:
    """Compute `gated_activation_reference` with fp8 output; `x` is contiguous."""
    tokens, both = x.shape
    width = both // 2
    assert x.is_contiguous()
    out = empty_quantized(tokens, width, x.device)
    if tokens:
        _bound_gated_activation_quantized(width, act, gate_first)(tokens, x, *out)
    return out
