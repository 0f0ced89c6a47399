"""Key and value memory on the device, addressed by slot: block × block size + offset."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.language import fused

_WIDEST = 128  # of the heads that our kernels are tuned for


class KVStore:
    def __init__(
        self, layers: int, slots: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.zeros((layers, slots, kv_heads, dim), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def paged(self) -> bool:
        """Whether attention reads remembered keys where they lie, by a kernel, instead of gathering them."""
        halves = self.keys.dtype in (torch.bfloat16, torch.float16)
        return halves and self.keys.shape[-1] <= _WIDEST and fused(self.keys)

    @staticmethod
    def bytes_per_slot(layers: int, kv_heads: int, dim: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value [n, kv heads, dim] into the slots [n]."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)
