"""Ranks as threads of one process: the arithmetic of tensor parallelism without torch.distributed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from penstock.weights.stream import DummySource
from tests.waiting import PATIENCE_S

T = TypeVar("T")


@dataclass(eq=False)
class _Meeting:
    """Tensors that the ranks of a group exchange, and the barrier that synchronises them."""

    size: int
    barrier: Barrier = field(init=False)
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size)
        self.tensors = [torch.empty(0)] * self.size


class ThreadGroup:
    """A `Group` whose ranks are threads."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._meeting.tensors[self.rank] = x.clone()
        self._meeting.barrier.wait(PATIENCE_S)
        found = list(self._meeting.tensors)
        self._meeting.barrier.wait(PATIENCE_S)
        return found

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._exchange(x)).sum(dim=0))

    def gather(self, x: Tensor) -> list[Tensor]:
        found = self._exchange(x)
        return found if self.rank == 0 else []

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._exchange(x)[0])


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` on each rank, and return the results by rank."""
    meeting = _Meeting(size)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ThreadGroup(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(run, rank) for rank in range(size)]]


class NamedSource(DummySource):
    """Random tensors whose values depend only on their names, so that every rank reads the same."""

    def __init__(self, without: Sequence[str] = (), scale: float = 0.2) -> None:
        super().__init__(0, torch.float32, torch.device("cpu"))
        self.without = without  # name parts of tensors that the checkpoint lacks
        self.scale = scale

    def has(self, name: str) -> bool:
        return not any(part in name for part in self.without)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(tuple(shape), generator=generator) * self.scale
        return 1 + values if "norm" in name.lower() and name.endswith("weight") else values
