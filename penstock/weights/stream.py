"""Reads tensors of a checkpoint one at a time, by name.

A model takes the tensors that it needs from a `WeightSource`. A missing tensor, one of another shape, and one
that was never read are errors that name it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.files import weight_files
from penstock.errors import ModelLoadError

_FP8 = torch.float8_e4m3fn
_SCALES = "_scale_inv"  # ends the name of an fp8 tensor's scales


class WeightSource(ABC):
    """Returns tensors in the model's dtype and on its device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def has(self, name: str) -> bool: ...

    @abstractmethod
    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """Read the tensor `name`, which must have this shape."""

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise if the tensor `name` is known to be missing or to have another shape. Reads no values."""
        return

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The stored shape of the tensor `name`; None if it is missing or not known."""
        return None

    @abstractmethod
    def prefix_of(self, *names: str) -> str:
        """The prefix, such as "bert.", of the first of `names` that the checkpoint has."""

    @abstractmethod
    def check_all_read(self, ignored_tensors: Iterable[str]) -> None:
        """Raise if a tensor was never read, unless its name contains one of `ignored_tensors`."""

    def read_fp8(self, name: str, shape: Sequence[int]) -> Tensor:
        """Read a tensor that is stored in fp8, without its scales."""
        tensor = self.read(name, shape)
        if tensor.dtype != _FP8:
            raise ModelLoadError(f"tensor {name!r} has scales, but is stored as {tensor.dtype}, not {_FP8}")
        return tensor

    def take(self, name: str, *shape: int) -> Tensor:
        return self.read_plain(name, shape).to(dtype=self.dtype, device=self.device)

    def fuse(self, names: Sequence[str], rows: int | Sequence[int], *rest: int) -> Tensor:
        """Several tensors concatenated along the first axis, of `rows` rows each, or one count for each."""
        sizes = [rows] * len(names) if isinstance(rows, int) else list(rows)
        for name, size in zip(names, sizes, strict=True):
            self.check(name, (size, *rest))  # before the memory for all of them is allocated
        out = torch.empty((sum(sizes), *rest), dtype=self.dtype, device=self.device)
        for part, name, size in zip(out.split(sizes), names, sizes, strict=True):
            part.copy_(self.read_plain(name, (size, *rest)))
        return out

    def read_plain(self, name: str, shape: Sequence[int]) -> Tensor:
        """As `read`, for a tensor without scales."""
        tensor = self.read(name, shape)
        if tensor.dtype == _FP8 or not tensor.is_floating_point():
            stored = "in fp8" if tensor.dtype == _FP8 else f"as {tensor.dtype}"
            raise ModelLoadError(
                f"tensor {name!r} is stored {stored}, but quantization_config in config.json does not cover "
                "it or this model cannot use it"
            )
        return tensor


class SafetensorsSource(WeightSource):
    """Reads `model.safetensors` or the shards in its index, without loading whole files."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        self._shards = [self._open(file) for file in _files(folder)]
        self._tensors = {_modern(key): (shard, key) for shard in self._shards for key in shard.keys()}  # noqa: SIM118
        self._unread = set(self._tensors)

    @staticmethod
    def _open(file: Path) -> safe_open:
        try:
            return safe_open(str(file), framework="pt", device="cpu")
        except FileNotFoundError:
            raise ModelLoadError(f"{file} is missing, but model.safetensors.index.json names it") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is not a readable safetensors file: {error}") from None

    def has(self, name: str) -> bool:
        return name in self._tensors

    def check(self, name: str, shape: Sequence[int]) -> None:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}, which this model needs")
        stored = self.shape_of(name) or ()
        if stored != tuple(shape):
            raise ModelLoadError(
                f"tensor {name!r} has shape {list(stored)}, but config.json asks for {list(shape)}"
            )

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        if name not in self._tensors:
            return None
        shard, key = self._tensors[name]
        return tuple(shard.get_slice(key).get_shape())

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        self.check(name, shape)
        shard, key = self._tensors[name]
        try:
            tensor: Tensor = shard.get_tensor(key)
        except SafetensorError as error:
            raise ModelLoadError(f"tensor {name!r} in {self._folder} cannot be read: {error}") from None
        self._unread.discard(name)
        return tensor

    def prefix_of(self, *names: str) -> str:
        for name in names:
            if found := [key[: -len(name)] for key in self._tensors if key.endswith(name)]:
                return min(found, key=len)
        raise ModelLoadError(f"{self._folder} has no tensor that ends in {names[0]!r}")

    def check_all_read(self, ignored_tensors: Iterable[str]) -> None:
        marks = tuple(ignored_tensors)
        unread = sorted(name for name in self._unread if not any(mark in name for mark in marks))
        if unread:
            shown = ", ".join(unread[:8]) + (f" and {len(unread) - 8} more" if len(unread) > 8 else "")
            raise ModelLoadError(
                f"{self._folder} has tensors that this architecture does not use: {shown}; "
                "check architectures in config.json"
            )


class DummySource(WeightSource):
    """Seeded random tensors of any shape, to run and time an architecture without weights."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def read_fp8(self, name: str, shape: Sequence[int]) -> Tensor:
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

    def check_all_read(self, ignored_tensors: Iterable[str]) -> None:
        return None


def open_weights(
    folder: Path, load_format: str, seed: int, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    if load_format == "dummy":
        return DummySource(seed, dtype, device)
    return SafetensorsSource(folder, dtype, device)


def _files(folder: Path) -> list[Path]:
    if files := weight_files(folder):
        return files
    if (folder / "pytorch_model.bin").is_file():
        raise ModelLoadError(
            f"{folder} has only pytorch_model.bin, a pickle, which is not supported; convert it to "
            "model.safetensors"
        )
    raise ModelLoadError(
        f"{folder} has no model.safetensors; use --load-format dummy to run with random weights"
    )


def _modern(name: str) -> str:
    """Rename the gamma and beta of old BERT checkpoints to weight and bias."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith("LayerNorm" + old):
            return name[: -len(old)] + new
    return name
