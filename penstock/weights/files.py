"""Opens the files of a checkpoint: names, file offsets and values of their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.checkpoint.files import PICKLES
from penstock.checkpoint.tensors import LENGTH_BYTES, header_bytes
from penstock.errors import ModelLoadError
from penstock.weights.bulk import Part
from penstock.weights.dtypes import DTYPES
from penstock.weights.pickles import converted, load_pickle

Ranges = tuple[tuple[int, int], ...]  # (begin, end) along the leading axes of a tensor


class StoredTensor(NamedTuple):
    """A tensor of an open file."""

    file: TensorFile
    key: str  # name in the file
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: PyTorch does not have the stored format
    offset: int  # bytes from the beginning of the file
    size: int  # bytes

    @property
    def part(self) -> Part:
        return Part(self.file.path, self.offset, self.size)

    def parts(self, ranges: Ranges) -> list[Part]:
        """The bytes of a part of the tensor, in memory order. There is one run of bytes for each index of the
        axes before the last cut axis. (): the whole tensor."""
        if not ranges or not self.size:
            return [self.part]
        starts, width = [self.offset], self.size // self.shape[0]  # bytes of one index of the axis
        for axis, (begin, end) in enumerate(ranges[:-1]):
            starts = [start + index * width for start in starts for index in range(begin, end)]
            width //= self.shape[axis + 1]
        begin, end = ranges[-1]
        return [Part(self.file.path, start + begin * width, (end - begin) * width) for start in starts]

    def read(self) -> Tensor:
        """The tensor, mapped from the file into memory."""
        return self.file.read(self.key)


class TensorFile(Protocol):
    path: Path
    tensors: list[StoredTensor]
    is_seekable: bool  # the file has the bytes of each tensor in memory layout, at `offset`

    def read(self, key: str) -> Tensor: ...


def open_file(path: Path) -> TensorFile:
    """Open a safetensors file, or a pickle, which is converted to safetensors if the cache is writable."""
    if path.suffix not in PICKLES:
        return SafetensorsFile(path)
    cached = converted(path)
    return PickledFile(path) if cached is None else SafetensorsFile(cached)


class SafetensorsFile:
    is_seekable = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._opened: Any = safe_open(str(path), framework="pt", device="cpu")  # also checks the header
            self.tensors = self._read_header()
        except FileNotFoundError:
            raise ModelLoadError(f"{path} is missing, but the index of the weights names it") from None
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from None

    def read(self, key: str) -> Tensor:
        try:
            tensor: Tensor = self._opened.get_tensor(key)
        except SafetensorError as error:
            raise ModelLoadError(f"tensor {key!r} in {self.path} cannot be read: {error}") from None
        return tensor

    def _read_header(self) -> list[StoredTensor]:
        stored = header_bytes(self.path)
        header = msgspec.json.decode(stored)
        header.pop("__metadata__", None)
        first = LENGTH_BYTES + len(stored)
        return [self._tensor(key, entry, first) for key, entry in header.items()]

    def _tensor(self, key: str, entry: dict[str, Any], first: int) -> StoredTensor:
        begin, end = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        return StoredTensor(self, key, tuple(entry["shape"]), dtype, first + begin, end - begin)


class PickledFile:
    """A pickle that could not be converted."""

    is_seekable = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = load_pickle(path)
        self.tensors = [
            StoredTensor(self, name, tuple(tensor.shape), tensor.dtype, 0, tensor.numel() * tensor.itemsize)
            for name, tensor in self._values.items()
        ]

    def read(self, key: str) -> Tensor:
        return self._values[key]
