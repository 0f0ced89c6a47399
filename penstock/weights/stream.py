"""Reads tensors of a checkpoint one at a time, by name.

A model reads the tensors that it needs from a `WeightSource`. A missing tensor, a wrong shape and a tensor
that was never read are errors that name the tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.checkpoint.files import first_names, weight_files
from penstock.errors import ModelLoadError
from penstock.weights.bulk import BulkReader
from penstock.weights.files import Ranges, StoredTensor, open_file

_FP8 = torch.float8_e4m3fn
_SCALES = "_scale_inv"  # suffix of the name of an fp8 tensor's scales
_MAX_CONVERTED_BYTES = 256 << 20  # limit of tensors that are in memory in two dtypes at the same time


class Wanted(NamedTuple):
    """A tensor that a model needs, or a part of it."""

    name: str
    shape: tuple[int, ...]  # stored shape
    ranges: Ranges = ()  # indices to read along the leading axes; (): the whole tensor

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of the part to read."""
        sizes = tuple(end - begin for begin, end in self.ranges)
        return sizes + tuple(self.shape[len(sizes) :])

    def part_of(self, whole: Tensor) -> Tensor:
        """The part to read, cut from the stored tensor."""
        return whole[tuple(slice(begin, end) for begin, end in self.ranges)] if self.ranges else whole


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

    def names(self) -> Iterable[str]:
        """The names of all tensors; empty if every name exists, as with dummy weights."""
        return ()

    def check_tied(self, vocabulary: int, heads: Sequence[str]) -> None:
        """Refuse an adapter whose changes would separate the word table from a head (one of these names) that
        shares its weight."""
        return

    @abstractmethod
    def prefix_of(self, *names: str) -> str:
        """The prefix, such as "bert.", of the first of `names` that the checkpoint has."""

    @abstractmethod
    def check_all_read(self, ignored_tensors: Iterable[str]) -> list[str]:
        """Raise if a tensor was never read, unless its name contains one of `ignored_tensors`. Returns the
        names of the ignored tensors."""

    def read_fp8(self, name: str, shape: Sequence[int]) -> Tensor:
        """Read a tensor that is stored in fp8, without its scales."""
        tensor = self.read(name, shape)
        _check_format(name, tensor.dtype, is_fp8=True)
        return tensor

    def take(self, name: str, *shape: int) -> Tensor:
        return self.read_plain(name, shape).to(dtype=self.dtype, device=self.device)

    def fuse(self, names: Sequence[str], rows: int | Sequence[int], *rest: int) -> Tensor:
        """Concatenate tensors along the first axis. `rows`: rows of each tensor, one number for all or one
        per tensor."""
        sizes = [rows] * len(names) if isinstance(rows, int) else list(rows)
        return self.join([Wanted(name, (size, *rest)) for name, size in zip(names, sizes, strict=True)])

    def join(self, wanted: Sequence[Wanted]) -> Tensor:
        """Concatenate tensors, or parts of tensors, along the first axis."""
        for tensor in wanted:
            self.check(tensor.name, tensor.shape)  # before the memory for all of them is allocated
        shapes = [tensor.part_shape for tensor in wanted]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        self.fill(out, wanted)
        return out

    def skip(self, name: str, shape: Sequence[int]) -> None:
        """Count a tensor as read without reading it, because another process reads it."""
        self.read(name, shape)

    def fill(self, out: Tensor, wanted: Sequence[Wanted]) -> None:
        """Read tensors into the contiguous `out`, one after another, and convert them to its dtype. Tensors
        stored in fp8 are not converted: `out` must be fp8 for these, and only for these."""
        flat, end = out.view(-1), 0
        read = self.read_fp8 if out.dtype == _FP8 else self.read_plain
        for tensor in wanted:
            shape = tensor.part_shape
            begin, end = end, end + math.prod(shape)
            flat[begin:end].view(shape).copy_(tensor.part_of(read(tensor.name, tensor.shape)))

    def close(self) -> None:
        """Free the resources for reading. Tensors that were read stay valid."""
        return

    def read_plain(self, name: str, shape: Sequence[int]) -> Tensor:
        """Like `read`, for a tensor that is not quantised."""
        tensor = self.read(name, shape)
        _check_format(name, tensor.dtype, is_fp8=False)
        return tensor


class SafetensorsSource(WeightSource):
    """Reads a folder's weight files without loading whole files. Pickles are converted to safetensors.

    On a CPU, tensors are mapped from the files. For a GPU, `BulkReader` copies them to the device.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, reader: BulkReader | None = None
    ) -> None:
        super().__init__(dtype, device)
        self._folder = folder
        files = [open_file(file) for file in _files(folder)]
        self._tensors = {_modern(tensor.key): tensor for file in files for tensor in file.tensors}
        self._unread = set(self._tensors)
        if reader is None and device.type == "cuda" and all(file.is_seekable for file in files):
            reader = BulkReader(device)
        self._reader = reader

    def has(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def check(self, name: str, shape: Sequence[int]) -> None:
        if name not in self._tensors:
            raise ModelLoadError(f"{self._folder} has no tensor {name!r}, which this model needs")
        stored = self._tensors[name].shape
        if stored != tuple(shape):
            raise ModelLoadError(
                f"tensor {name!r} has shape {list(stored)}, but config.json asks for {list(shape)}"
            )

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._tensors[name].shape if name in self._tensors else None

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        self.check(name, shape)
        self._unread.discard(name)
        stored = self._tensors[name]
        if self._reader is None or stored.dtype is None:
            return stored.read()
        out = torch.empty(stored.shape, dtype=stored.dtype, device=self.device)
        self._reader.fill(out, [stored.part])
        return out

    def fill(self, out: Tensor, wanted: Sequence[Wanted]) -> None:
        if self._reader is None:
            super().fill(out, wanted)
            return
        pieces = []
        for tensor in wanted:
            self.check(tensor.name, tensor.shape)
            self._unread.discard(tensor.name)
            stored = self._tensors[tensor.name]
            if stored.dtype is not None:
                _check_format(tensor.name, stored.dtype, is_fp8=out.dtype == _FP8)
            pieces.append(_StoredPart(stored, tensor.ranges, math.prod(tensor.part_shape)))
        flat, end = out.view(-1), 0
        for dtype, group in groupby(pieces, lambda piece: piece.stored.dtype):
            for batch in _batches(group, None if dtype == out.dtype else _MAX_CONVERTED_BYTES):
                begin, end = end, end + sum(piece.num_values for piece in batch)
                self._fill(self._reader, flat[begin:end], dtype, batch)

    def _fill(
        self, reader: BulkReader, flat: Tensor, dtype: torch.dtype | None, pieces: Sequence[_StoredPart]
    ) -> None:
        """Fill `flat` with tensors that are all stored as `dtype`."""
        if dtype is None:
            raise ModelLoadError(
                f"tensor {pieces[0].stored.key!r} is stored in a format that PyTorch does not have"
            )
        parts = [part for piece in pieces for part in piece.stored.parts(piece.ranges)]
        if dtype == flat.dtype:
            reader.fill(flat, parts)
        else:
            stored = torch.empty(len(flat), dtype=dtype, device=flat.device)
            reader.fill(stored, parts)
            flat.copy_(stored)

    def skip(self, name: str, shape: Sequence[int]) -> None:
        self.check(name, shape)
        self._unread.discard(name)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def prefix_of(self, *names: str) -> str:
        for name in names:
            if found := [key[: -len(name)] for key in self._tensors if key.endswith(name)]:
                return min(found, key=len)
        raise ModelLoadError(f"{self._folder} has no tensor that ends in {names[0]!r}")

    def check_all_read(self, ignored_tensors: Iterable[str]) -> list[str]:
        marks = tuple(ignored_tensors)
        unread = sorted(name for name in self._unread if not any(mark in name for mark in marks))
        if unread:
            raise ModelLoadError(
                f"{self._folder} has tensors that this architecture does not use: {first_names(unread)}; "
                "check architectures in config.json"
            )
        return sorted(self._unread)


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

    def check_all_read(self, ignored_tensors: Iterable[str]) -> list[str]:
        return []


def open_weights(
    folder: Path, load_format: str, seed: int, dtype: torch.dtype, device: torch.device
) -> WeightSource:
    if load_format == "dummy":
        return DummySource(seed, dtype, device)
    return SafetensorsSource(folder, dtype, device)


def _files(folder: Path) -> list[Path]:
    if files := weight_files(folder):
        return files
    raise ModelLoadError(
        f"{folder} has no model.safetensors and no pytorch_model.bin; use --load-format dummy to run with "
        "random weights"
    )


class _StoredPart(NamedTuple):
    """A stored tensor, or a part of it."""

    stored: StoredTensor
    ranges: Ranges
    num_values: int  # values to read

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.stored.size // max(1, math.prod(self.stored.shape))


def _batches(pieces: Iterable[_StoredPart], max_bytes: int | None) -> Iterator[list[_StoredPart]]:
    """Batches of consecutive tensors with at most `max_bytes` together, or a single larger tensor."""
    batch: list[_StoredPart] = []
    held = 0
    for piece in pieces:
        if batch and max_bytes is not None and held + piece.num_bytes > max_bytes:
            yield batch
            batch, held = [], 0
        batch.append(piece)
        held += piece.num_bytes
    if batch:
        yield batch


def _check_format(name: str, stored: torch.dtype, *, is_fp8: bool) -> None:
    """Refuse quantised values where plain ones are expected, and other dtypes where fp8 is expected."""
    if is_fp8 and stored != _FP8:
        raise ModelLoadError(f"tensor {name!r} has scales, but is stored as {stored}, not {_FP8}")
    if not is_fp8 and (stored == _FP8 or not stored.is_floating_point):
        form = "in fp8" if stored == _FP8 else f"as {stored}"
        raise ModelLoadError(
            f"tensor {name!r} is stored {form}, but quantization_config in config.json does not cover "
            "it or this model cannot use it"
        )


def _modern(name: str) -> str:
    """Rename the gamma and beta of old BERT checkpoints to weight and bias."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith("LayerNorm" + old):
            return name[: -len(old)] + new
    return name
