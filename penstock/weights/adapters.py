"""Reads low-rank adapters that torch's parametrisation stores next to the weights they change.

A weight `x.weight` is stored as `x.parametrizations.weight.original`, with `….0.lora_A` and `….0.lora_B`
for all adapters at once. One adapter, or none, is merged as a tensor is read; or all are returned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.weights.stream import WeightSource


@dataclass(frozen=True, slots=True)
class Adapter:
    """One of `count` adapters: weight + scale · B A, and scale · A B for embedding tables."""

    number: int
    count: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """All adapters of a checkpoint, chosen per request."""

    count: int
    rank: int
    scale: float


class MergedSource(WeightSource):
    """Presents a parametrised checkpoint under plain names."""

    def __init__(self, inner: WeightSource, adapter: Adapter | None) -> None:
        super().__init__(inner.dtype, inner.device)
        self._inner = inner
        self._adapter = adapter

    def has(self, name: str) -> bool:
        return self._inner.has(name) or self._inner.has(_part_name(name, "original"))

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        if self._inner.has(name):
            return self._inner.read(name, shape)
        weight = self._inner.read(_part_name(name, "original"), shape)
        if self._adapter is None:
            return weight
        return weight.float() + self._adapter.scale * self._change(name, shape, self._adapter)

    def prefix_of(self, *names: str) -> str:
        return self._inner.prefix_of(*names, *(_part_name(name, "original") for name in names))

    def check_all_read(self, ignored_tensors: Iterable[str]) -> None:
        self._inner.check_all_read(ignored_tensors)

    def close(self) -> None:
        self._inner.close()

    def has_adapters(self, name: str) -> bool:
        return self._inner.has(_part_name(name, "0.lora_A"))

    def adapters(self, name: str, shape: Sequence[int], adapters: AdapterSet) -> tuple[Tensor, Tensor]:
        """[count, rows, rank] and [count, rank, columns]; the change is their product."""
        return self._parts(name, shape, adapters.count, adapters.rank)

    def _change(self, name: str, shape: Sequence[int], adapter: Adapter) -> Tensor:
        left, right = self._parts(name, shape, adapter.count, adapter.rank)
        return left[adapter.number].float() @ right[adapter.number].float()

    def _parts(self, name: str, shape: Sequence[int], count: int, rank: int) -> tuple[Tensor, Tensor]:
        rows, columns = shape
        if "embeddings." in name:
            left = self._inner.read(_part_name(name, "0.lora_A"), (count, rows, rank))
            right = self._inner.read(_part_name(name, "0.lora_B"), (count, rank, columns))
        else:
            left = self._inner.read(_part_name(name, "0.lora_B"), (count, rows, rank))
            right = self._inner.read(_part_name(name, "0.lora_A"), (count, rank, columns))
        return left, right


def _part_name(name: str, part: str) -> str:
    """The name of one part of a parametrised tensor."""
    owner, _, parameter = name.rpartition(".")
    return f"{owner}.parametrizations.{parameter}.{part}"
