"""Buffers between host and device: one copy for all integers of a step, and one for all its results.

On a CPU both are views and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.types import Ints


class Ring:
    """Pinned buffers used in turn, one more than there are steps in flight, so that none is overwritten
    while its copy may still run. A step takes at most one."""

    def __init__(self, depth: int, dtype: torch.dtype, min_size: int = 4096) -> None:
        """Every buffer has at least `min_size` elements from its first use on, because growing it is slow."""
        self.dtype = dtype
        self.min_size = min_size
        self._buffers: list[Tensor | None] = [None] * (depth + 1)
        self._turn = 0

    def next(self, size: int) -> Tensor:
        """The next buffer, of at least `size` elements."""
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer is None or len(buffer) < size:
            capacity = 1 << (max(size, self.min_size) - 1).bit_length()
            buffer = self._buffers[self._turn] = _pinned(capacity, self.dtype)
        return buffer


def _pinned(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, pin_memory=torch.cuda.is_available())


class Staging:
    def __init__(self, device: torch.device, depth: int) -> None:
        self.device = device
        self._sent = Ring(depth, torch.int32, 1 << 16)
        self._placed = Ring(depth, torch.int32, 1 << 16)
        self._fetched = Ring(depth, torch.uint8, 1 << 20)

    def send(self, arrays: Sequence[Ints]) -> Sequence[Tensor]:
        """Send the arrays to the device in one copy. Returns tensors in the same order."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        if not arrays:
            return ()
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        pinned = self._sent.next(total)[:total]
        np.concatenate(arrays, out=pinned.numpy())
        return pinned.to(self.device, non_blocking=True).split_with_sizes(sizes)

    def send_with_bytes(
        self, arrays: Sequence[Ints], raw: Sequence[NDArray[np.uint8]]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Like `send`, with bytes in the same copy; these become one tensor, uint8 [bytes]."""
        if self.device.type == "cpu":
            flat = np.concatenate([piece.reshape(-1) for piece in raw]) if raw else np.zeros(0, np.uint8)
            return self.send(arrays), torch.from_numpy(flat)
        sizes = [len(array) for array in arrays]
        num_ints, num_bytes = sum(sizes), sum(piece.nbytes for piece in raw)
        pinned = self._sent.next(num_ints + -(-num_bytes // 4))
        np.concatenate(arrays, out=pinned[:num_ints].numpy())
        if raw:
            host = pinned[num_ints:].numpy().view(np.uint8)[:num_bytes]
            np.concatenate([piece.reshape(-1) for piece in raw], out=host)
        sent = pinned[: num_ints + -(-num_bytes // 4)].to(self.device, non_blocking=True)
        return sent[:num_ints].split_with_sizes(sizes), sent[num_ints:].view(torch.uint8)[:num_bytes]

    def pinned_ints(self, size: int) -> Tensor:
        """Host memory for integers that the caller writes in place and then copies as a whole."""
        return self._placed.next(size)[:size]

    def fetch(self, tensors: list[Tensor]) -> list[NDArray[Any]]:
        """Host arrays, which hold the tensors once the device has reached this point."""
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
        """Pinned bytes, which hold `flat`, uint8 [n], once the device has reached this point."""
        pinned = self._fetched.next(len(flat))[: len(flat)]
        return pinned.copy_(flat, non_blocking=True)
