"""The KV cache of one layer as kernels read it: keys and values by slot, in the model's dtype or fp8.

In fp8 each head of a token has its own scale. Kernels multiply attention scores by the scales of keys and
attention weights by the scales of values, so no tensor is dequantised in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
