"""Reads low-rank adapters, in two layouts. One adapter, or none, is merged as a tensor is read; or all are
returned.

torch's parametrisation stores them next to the weights they change: a weight `x.weight` is stored as
`x.parametrizations.weight.original`, with `….0.lora_A` and `….0.lora_B` for all adapters at once. PEFT stores
each adapter in a file of its own, as `base_model.model.x.lora_A.weight` and `….lora_B.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.adapters import PeftAdapter
from penstock.errors import ModelLoadError
from penstock.weights.stream import DummySource, WeightSource

_LAYERS = "layers."  # PEFT's names and the checkpoint's agree from here on


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

    def check_all_read(self, ignored_tensors: Iterable[str]) -> list[str]:
        return self._inner.check_all_read(ignored_tensors)

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


class PeftAdapters:
    """All adapters of a checkpoint that PEFT saved."""

    def __init__(self, adapters: Sequence[PeftAdapter], weights: WeightSource) -> None:
        """`weights` are those that the adapters change; adapters of random ones are random too."""
        self.adapters = tuple(adapters)
        self.rank = max(adapter.rank for adapter in adapters)
        self._random = weights if isinstance(weights, DummySource) else None
        self._tensors = [{} if self._random else _read_file(adapter) for adapter in adapters]

    def has(self, module: str) -> bool:
        """Whether an adapter changes this module's weight."""
        return any(module.rpartition(".")[2] in adapter.targets for adapter in self.adapters)

    def read(self, module: str, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """[adapters, outputs, rank] and [adapters, rank, inputs]; the change is their product. Adapters of a
        lower rank, and those that do not change this module, are filled with zeros."""
        up = torch.zeros((len(self.adapters), outputs, self.rank))
        down = torch.zeros((len(self.adapters), self.rank, inputs))
        for number, adapter in enumerate(self.adapters):
            if module.rpartition(".")[2] in adapter.targets:
                down[number, : adapter.rank] = self._take(number, module, "lora_A", (adapter.rank, inputs))
                up[number, :, : adapter.rank] = self._take(number, module, "lora_B", (outputs, adapter.rank))
                up[number] *= adapter.scale
        return up, down

    def check_all_read(self) -> None:
        for adapter, tensors in zip(self.adapters, self._tensors, strict=True):
            if tensors:
                raise ModelLoadError(
                    f"{adapter.file} has {len(tensors)} tensors that this model does not use: "
                    f"{', '.join(sorted(tensors)[:4])}",
                    param="model",
                )

    def _take(self, number: int, module: str, part: str, shape: tuple[int, int]) -> Tensor:
        if self._random is not None:
            return self._random.read(part, shape).float().cpu()
        name = f"{module[module.index(_LAYERS) :]}.{part}.weight"
        adapter = self.adapters[number]
        tensor = self._tensors[number].pop(name, None)
        if tensor is None or tensor.shape != shape:
            found = "none" if tensor is None else f"one of shape {list(tensor.shape)}"
            raise ModelLoadError(
                f"{adapter.file} needs a tensor {name!r} of shape {list(shape)}; it has {found}",
                param="model",
            )
        return tensor.float()


class PeftMergedSource(WeightSource):
    """A checkpoint with one adapter merged into its weights."""

    def __init__(self, inner: WeightSource, adapter: PeftAdapters) -> None:
        super().__init__(inner.dtype, inner.device)
        self._inner = inner
        self._adapter = adapter

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def check(self, name: str, shape: Sequence[int]) -> None:
        self._inner.check(name, shape)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        weight = self._inner.read(name, shape)
        module, _, kind = name.rpartition(".")
        if kind != "weight" or _LAYERS not in module or not self._adapter.has(module):
            return weight
        up, down = self._adapter.read(module, *shape)
        return weight.float() + (up[0] @ down[0]).to(weight.device)

    def prefix_of(self, *names: str) -> str:
        return self._inner.prefix_of(*names)

    def check_all_read(self, ignored_tensors: Iterable[str]) -> list[str]:
        self._adapter.check_all_read()
        return self._inner.check_all_read(ignored_tensors)


def _read_file(adapter: PeftAdapter) -> dict[str, Tensor]:
    """The tensors of an adapter by names from `layers.` on; others under their own names."""
    try:
        tensors = load_file(adapter.file)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{adapter.file} cannot be read: {error}", param="model") from None
    return {name[max(name.find(_LAYERS), 0) :]: tensor for name, tensor in tensors.items()}
