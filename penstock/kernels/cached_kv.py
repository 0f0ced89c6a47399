"""The KV cache of one layer as kernels read it: keys and values by slot, in the model's dtype or fp8.

In fp8 each head of a token has its own scale. Kernels multiply attention scores by the scales of keys and
attention weights by the scales of values, so no tensor is dequantised in memory. The helpers below are for
kernels that compute in fp16, to which fp8 converts without rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import jit, tl


class LayerCache(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor  # [slots, kv heads, dim]
    values: Tensor  # [slots, kv heads, dim]
    key_scales: Tensor | None = None  # fp32 [slots, kv heads]; None: not quantised
    value_scales: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales of keys and of values; empty if they are not quantised."""
        return () if self.key_scales is None or self.value_scales is None else self[2:]  # type: ignore[return-value]


def read_slots(cached: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Read the keys or values of these slots and dequantise them, [*slots, kv heads, dim]."""
    if scales is None:
        return cached[slots]
    values = cached.view(torch.uint8)[slots].view(cached.dtype)
    return (values.float() * scales[slots][..., None]).to(dtype)


@jit()
def queries_in_fp16(query: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Queries [n, dim] as values · factors, with fp16 values of at most 1 and fp32 factors [n]."""
    wide = query.to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
    return (wide / factor[:, None]).to(tl.float16), factor


@jit()
def split_scales(scales: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scales as 2^log · rest, with whole logs and rests from 1 to 2; and 2^-log. A scale of NaN has a rest of
    NaN."""
    exponent = scales.to(tl.int32, bitcast=True) >> 23
    power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), scales * power, power


@jit()
def unpack_pairs(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The even and the odd components, in fp16, of fp8 values that were read as pairs (uint16)."""
    even = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    odd = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd
