"""Reads low-rank adapters in two layouts: torch's parametrisation and PEFT's.

torch's parametrisation stores adapters next to the weights that they change. A weight `x.weight` is stored as
`x.parametrizations.weight.original`, with `….0.lora_A` and `….0.lora_B` for all adapters at once. Reading a
tensor merges at most one of these adapters, or returns all of them. PEFT stores each adapter in its own
folder, as `base_model.model.x.lora_A.weight` and `….lora_B.weight`; `merged.py` merges PEFT adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.adapters import PREFIX, LoraSpec, of_task
from penstock.errors import ModelLoadError
from penstock.weights.stream import WeightSource


class PartWeights(NamedTuple):
    """The weights of an adapter for one layer, in host memory."""

    down: Tensor | None = None  # [rank, inputs]
    up: Tensor | None = None  # [outputs, rank], multiplied by the scale
    gain: Tensor | None = None  # fp32 [outputs], DoRA: factor on the layer's output
    shift: Tensor | None = None  # fp32 [outputs], DoRA: added to that product
    weight: Tensor | None = None  # [outputs, inputs], replaces the layer's weight
    bias: Tensor | None = None  # [outputs], goes with `weight`

    @property
    def rank(self) -> int:
        return 0 if self.down is None else len(self.down)


class TableWeights(NamedTuple):
    """The weights of an adapter for an embedding table, in host memory."""

    down: Tensor | None = None  # [table rows, rank]
    up: Tensor | None = None  # [width, rank], multiplied by the scale
    indices: Tensor | None = None  # int64 [replaced], table rows to replace
    rows: Tensor | None = None  # [replaced, width], their new values

    @property
    def rank(self) -> int:
        return 0 if self.up is None else self.up.shape[1]


ModuleWeights = dict[str, PartWeights | TableWeights]  # an adapter, by module name of the model


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
        """[count, rows, rank] and [count, rank, columns]; their product is added to the weight."""
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


def read_lora_file(spec: LoraSpec) -> dict[str, Tensor]:
    """The tensors of an adapter, by name without PEFT's prefix."""
    try:
        tensors = load_file(spec.file)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{spec.file} cannot be read: {error}", param="lora_path") from None
    found = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return of_task(found, spec.task) if spec.task else found


def low_rank_pair(spec: LoraSpec, module: str, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A [rank, inputs] and scale · B [outputs, rank] of a module, fp32."""
    down, up = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
    return down.float(), up.float() * spec.targets[module].scale
