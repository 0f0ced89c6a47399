"""The KV cache on the device, addressed by slot: block × block size + offset."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class KVStore:
    def __init__(
        self, layers: int, slots: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, slots, kv_heads, dim)
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))

    def clear(self) -> None:
        """Lose all keys and values. On a CPU this frees their memory until it is written again."""
        shape, dtype, device = self.keys.shape, self.keys.dtype, self.keys.device
        del self.keys, self.values
        self.keys, self.values = (_zeros(shape, dtype, device) for _ in range(2))

    @staticmethod
    def bytes_per_slot(layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value [n, kv heads, dim] into the slots [n]."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)


class KVCache(NamedTuple):
    """What rows keep between steps."""

    store: KVStore
    sums: Tensor  # [blocks, hidden] fp32: running sums of rows that are pooled over several steps


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, pages that were never written take no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
