"""The KV cache on the device, addressed by slot: block × block size + offset.

In fp8, each head of each token has its own scale. So values stay in range, and tokens do not depend on each
other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cached_kv import LayerCache, read_slots
from penstock.kernels.quantize import FP8, quantize_rows_reference


class KVStore:
    def __init__(
        self, layers: int, slots: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`dtype` is the model's dtype or `FP8`."""
        self._shape, self._dtype, self._device = (layers, slots, kv_heads, dim), dtype, device
        self._allocate()

    def _allocate(self) -> None:
        shape, dtype, device = self._shape, self._dtype, self._device
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))
        self.key_scales = self.value_scales = None
        if self.is_quantized:
            self.key_scales, self.value_scales = (_zeros(shape[:-1], torch.float32, device) for _ in range(2))

    @property
    def is_quantized(self) -> bool:
        return self._dtype is FP8

    @property
    def nbytes(self) -> int:
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def clear(self) -> None:
        """Drop all keys and values. On a CPU, this frees their memory until it is written again."""
        del self.keys, self.values, self.key_scales, self.value_scales
        self._allocate()

    @staticmethod
    def bytes_per_slot(layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
        scale_bytes = torch.float32.itemsize if dtype is FP8 else 0
        return 2 * layers * kv_heads * (dim * dtype.itemsize + scale_bytes)

    def layer(self, number: int) -> LayerCache:
        if self.key_scales is None or self.value_scales is None:
            return LayerCache(self.keys[number], self.values[number])
        scales = self.key_scales[number], self.value_scales[number]
        return LayerCache(self.keys[number], self.values[number], *scales)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [n, kv heads, dim] to the slots [n]."""
        cache = self.layer(layer)
        for into, scales, new in (
            (cache.keys, cache.key_scales, key),
            (cache.values, cache.value_scales, value),
        ):
            if scales is None:
                into.index_copy_(0, slots, new)
                continue
            quantized = quantize_rows_reference(new.reshape(-1, new.shape[-1]))
            # index_copy_ does not support fp8 on every device.
            into.view(torch.uint8).index_copy_(0, slots, quantized.values.view(torch.uint8).view(new.shape))
            scales.index_copy_(0, slots, quantized.scales.view(new.shape[:-1]))

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Read keys and values of these slots. Quantised ones are converted to `dtype`."""
        cache = self.layer(layer)
        key = read_slots(cache.keys, cache.key_scales, slots, dtype)
        return key, read_slots(cache.values, cache.value_scales, slots, dtype)


class KVCache(NamedTuple):
    """State that rows keep between steps."""

    store: KVStore
    sums: Tensor  # [blocks, hidden] fp32: running sums of rows that are pooled over several steps


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU, pages that were never written take no memory."""
    if device.type != "cpu":
        return torch.zeros((*shape, dtype.itemsize), dtype=torch.uint8, device=device).view(dtype).squeeze(-1)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
