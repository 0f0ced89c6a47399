"""Buffers between host and device: all integers of a step go in with one copy, all results come
out with one. On a CPU both are views and cost nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.types import Array, Ints


class Ring:
    """Pinned buffers used in turn, one more than there are steps in flight, so that none is overwritten
    while its copy may still run. A step takes at most one."""

    def __init__(self, depth: int, dtype: torch.dtype, least: int = 4096) -> None:
        """`least` elements are held from the first use on: to make a larger buffer is slow."""
        self.dtype = dtype
        self.least = least
        self._buffers: list[Tensor | None] = [None] * (depth + 1)
        self._turn = 0

    def next(self, size: int) -> Tensor:
        """The next buffer, of at least so many elements."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is None or len(buffer) < size:
            room = 1 << (max(size, self.least) - 1).bit_length()
            buffer = self._buffers[self._turn] = _pinned(room, self.dtype)
        return buffer


def _pinned(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, pin_memory=torch.cuda.is_available())


class Staging:
    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._sent = Ring(depth, torch.int32, 1 << 16)
        self._placed = Ring(depth, torch.int32, 1 << 16)
        self._fetched = Ring(depth, torch.uint8, 1 << 20)

    def send(self, arrays: Mapping[str, Ints | None]) -> dict[str, Tensor]:
        """Named int32 arrays on the device; absent ones are left out."""
        present = {name: array for name, array in arrays.items() if array is not None}
        if self.device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in present.items()}
        if not present:
            return {}
        total = sum(len(array) for array in present.values())
        pinned = self._sent.next(total)[:total]
        np.concatenate(list(present.values()), out=pinned.numpy())
        flat = pinned.to(self.device, non_blocking=True)
        parts = flat.split_with_sizes([len(array) for array in present.values()])
        return dict(zip(present, parts, strict=True))

    def slot(self, size: int) -> Tensor:
        """Host memory for integers that are written in place and then copied as a whole."""
        return self._placed.next(size)[:size]

    def fetch(self, tensors: list[Tensor]) -> list[Array]:
        """Host arrays that hold the tensors once the device has passed this point."""
        if self.device.type == "cpu":
            return [tensor.contiguous().numpy() for tensor in tensors]
        if not tensors:
            return []
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)  # so that all are aligned
        raw = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in order]
        flat = self.fetch_bytes(raw[0] if len(raw) == 1 else torch.cat(raw))
        arrays = {}
        for i, piece in zip(order, flat.split([len(part) for part in raw]), strict=True):
            arrays[i] = piece.view(tensors[i].dtype).view(tensors[i].shape).numpy()
        return [arrays[i] for i in range(len(tensors))]

    def fetch_bytes(self, flat: Tensor) -> Tensor:
        """Pinned bytes that hold `flat`, uint8 [n], once the device has passed this point."""
        pinned = self._fetched.next(len(flat))[: len(flat)]
        return pinned.copy_(flat, non_blocking=True)
