"""Tensors out of a checkpoint, one at a time, by name.

A model is built by taking what it needs from a `WeightSource`; whatever nobody took is an error at
the end, as is a tensor that is missing or of another shape, each with its name.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelLoadError

_FP8 = torch.float8_e4m3fn
_SCALES = "_scale_inv"  # how the name of an fp8 tensor's scales ends


class WeightSource(ABC):
    """Gives tensors in the dtype and on the device that the model runs with."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """The tensor of this name, which must have this shape."""

    @abstractmethod
    def prefix_of(self, *names: str) -> str:
        """What stands before the first of `names` that is in this checkpoint, such as "bert."."""

    @abstractmethod
    def finish(self, ignored_tensors: Iterable[str]) -> None:
        """Check that all was taken but names that contain one of `ignored_tensors`."""

    def packed(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor that is stored in fp8, as it is stored."""
        tensor = self.read(name, shape)
        if tensor.dtype != _FP8:
            raise ModelLoadError(f"tensor {name!r} has scales but is {tensor.dtype}, not {_FP8}")
        return tensor

    def take(self, name: str, *shape: int) -> Tensor:
        return self.plain(name, shape).to(dtype=self.dtype, device=self.device)

    def fuse(self, names: Sequence[str], rows: int | Sequence[int], *rest: int) -> Tensor:
        """Several tensors joined along the first axis; `rows` is the size there of all or of each."""
        sizes = [rows] * len(names) if isinstance(rows, int) else list(rows)
        out = torch.empty((sum(sizes), *rest), dtype=self.dtype, device=self.device)
        for part, name, size in zip(out.split(sizes), names, sizes, strict=True):
            part.copy_(self.plain(name, (size, *rest)))
        return out

    def plain(self, name: str, shape: Sequence[int]) -> Tensor:
        """As `read`, of a tensor whose values stand for themselves."""
        tensor = self.read(name, shape)
        if tensor.dtype == _FP8:
            raise ModelLoadError(
                f"tensor {name!r} is stored in fp8, which config.json does not say or this model cannot use"
            )
        return tensor


class SafetensorsSource(WeightSource):
    """Reads `model.safetensors`, or the shards that its index names, without loading them whole."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._shards = [self._open(file) for file in _files(folder)]
        self._where = {_modern(key): (shard, key) for shard in self._shards for key in shard.keys()}  # noqa: SIM118
        self._left = set(self._where)

    @staticmethod
    def _open(file: Path) -> safe_open:
        try:
            return safe_open(str(file), framework="pt", device="cpu")
        except FileNotFoundError:
            raise ModelLoadError(f"{file} is named by the index but is not there") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is not a readable safetensors file: {error}") from None

    def has(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        if name not in self._where:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}, which this model needs")
        shard, key = self._where[name]
        try:
            tensor: Tensor = shard.get_tensor(key)
        except SafetensorError as error:
            raise ModelLoadError(f"tensor {name!r} in {self._folder} cannot be read: {error}") from None
        if tuple(tensor.shape) != tuple(shape):
            raise ModelLoadError(
                f"tensor {name!r} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}"
            )
        self._left.discard(name)
        return tensor

    def prefix_of(self, *names: str) -> str:
        for name in names:
            if found := [key[: -len(name)] for key in self._where if key.endswith(name)]:
                return min(found, key=len)
        raise ModelLoadError(f"{self._folder} has no tensor that ends in {names[0]!r}")

    def finish(self, ignored_tensors: Iterable[str]) -> None:
        marks = tuple(ignored_tensors)
        left = sorted(name for name in self._left if not any(mark in name for mark in marks))
        if left:
            shown = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
            raise ModelLoadError(
                f"{self._folder} has tensors that this architecture does not use: {shown}; "
                "config.json may name the wrong architecture"
            )


class DummySource(WeightSource):
    """Seeded random tensors of any shape, so that an architecture can be run and timed without weights."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def packed(self, name: str, shape: Sequence[int]) -> Tensor:
        out = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        return out.normal_(0.0, 1.0, generator=self._generator).to(_FP8)

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith(_SCALES):
            return torch.full(tuple(shape), 0.02, dtype=torch.float32, device=self.device)
        if name.endswith("bias"):
            return torch.zeros(tuple(shape), dtype=self.dtype, device=self.device)
        if "norm" in name.lower() or "ln" in name.lower():
            return torch.ones(tuple(shape), dtype=self.dtype, device=self.device)
        out = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        return out.normal_(0.0, 0.02, generator=self._generator)

    def prefix_of(self, *names: str) -> str:
        return ""

    def finish(self, ignored_tensors: Iterable[str]) -> None:
        return None


def open_weights(
    folder: Path, load_format: str, seed: int, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    if load_format == "dummy":
        return DummySource(seed, dtype, device)
    return SafetensorsSource(folder, dtype, device)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return [folder / name for name in names]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a weight index: {error}") from None
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / "pytorch_model.bin").is_file():
        raise ModelLoadError(
            f"{folder} has only pytorch_model.bin, a pickle; convert it to model.safetensors first"
        )
    raise ModelLoadError(f"{folder} has no model.safetensors; use --load-format dummy to run without weights")


def _modern(name: str) -> str:
    """Old BERT checkpoints call a norm's parameters gamma and beta."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith("LayerNorm" + old):
            return name[: -len(old)] + new
    return name
