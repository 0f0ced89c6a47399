"""Buffers between host and device: all integers of a step go in with one copy, all results come
out with one. On a CPU both are views and cost nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.core import Array, Ints


class Staging:
    """A ring of pinned buffers, one more than there are steps in flight, so that none is overwritten
    while its copy may still run."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._rings = 0 if device.type == "cpu" else depth + 1
        self._inbound: list[Tensor | None] = [None] * self._rings
        self._outbound: list[Tensor | None] = [None] * self._rings
        self._turn = 0

    def send(self, arrays: Mapping[str, Ints | None]) -> dict[str, Tensor]:
        """Named int32 arrays on the device; absent ones are left out."""
        present = {name: array for name, array in arrays.items() if array is not None}
        if self.device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in present.items()}
        self._turn = (self._turn + 1) % self._rings
        total = sum(len(array) for array in present.values())
        pinned = self._grown(self._inbound, total, torch.int32)
        np.concatenate(list(present.values()), out=pinned[:total].numpy())
        flat = pinned[:total].to(self.device, non_blocking=True)
        parts = flat.split([len(array) for array in present.values()])
        return dict(zip(present, parts, strict=True))

    def fetch(self, tensors: list[Tensor]) -> list[Array]:
        """Host arrays that hold the tensors once the device has passed this point."""
        if self.device.type == "cpu":
            return [tensor.contiguous().numpy() for tensor in tensors]
        if not tensors:
            return []
        raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        flat = raw[0] if len(raw) == 1 else torch.cat(raw)
        pinned = self._grown(self._outbound, len(flat), torch.uint8)[: len(flat)]
        pinned.copy_(flat, non_blocking=True)
        arrays = []
        for piece, tensor in zip(pinned.split([len(part) for part in raw]), tensors, strict=True):
            arrays.append(piece.view(tensor.dtype).view(tensor.shape).numpy())
        return arrays

    def _grown(self, ring: list[Tensor | None], size: int, dtype: torch.dtype) -> Tensor:
        buffer = ring[self._turn]
        if buffer is None or len(buffer) < size:
            room = 1 << max(size - 1, 4095).bit_length()
            buffer = ring[self._turn] = torch.empty(room, dtype=dtype, pin_memory=True)
        return buffer
