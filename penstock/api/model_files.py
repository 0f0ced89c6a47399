"""What a model's files say about it, for dialects that describe models by their files."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import msgspec

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".onnx")
_MAX_HEADER_BYTES = 64 << 20
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model: its own and those of its modules."""

    num_bytes: int
    digest: str  # of the names and sizes of all files
    modified: datetime
    format: str  # weight format, such as safetensors; "" if there are no weights
    num_parameters: int | None  # None: the format does not say
    dtype: str  # of most parameters, such as F32; "" if unknown

    @property
    def parameter_size(self) -> str:
        """The number of parameters in short form, such as 22.7M."""
        if self.num_parameters is None:
            return ""
        for size, unit in _UNITS:
            if self.num_parameters >= size:
                return f"{self.num_parameters / size:.1f}{unit}"
        return str(self.num_parameters)


@lru_cache(maxsize=256)
def model_files(folder: Path) -> ModelFiles:
    """Read the sizes of all files, and the headers of the weights."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
    sizes = {path: path.stat() for path in files}
    names = [f"{path.relative_to(folder).as_posix()} {stat.st_size}" for path, stat in sizes.items()]
    weights = [path for path in files if path.suffix in _WEIGHTS]
    counts: dict[str, int] = {}
    for path in weights:
        if path.suffix == ".safetensors":
            _count(path, counts)
    suffixes = [path.suffix for path in weights]
    newest = max((stat.st_mtime for stat in sizes.values()), default=0.0)
    return ModelFiles(
        num_bytes=sum(stat.st_size for stat in sizes.values()),
        digest=hashlib.sha256("\n".join(names).encode()).hexdigest(),
        modified=datetime.fromtimestamp(int(newest), UTC),
        format=next((suffix[1:] for suffix in _WEIGHTS if suffix in suffixes), ""),
        num_parameters=sum(counts.values()) or None,
        dtype=max(counts, key=counts.__getitem__) if counts else "",
    )


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _count(path: Path, counts: dict[str, int]) -> None:
    """Add the number of parameters of each dtype. A file that cannot be read adds none."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                return
            header: dict[str, Any] = msgspec.json.decode(file.read(size), type=dict[str, Any])
    except (OSError, struct.error, msgspec.DecodeError):
        return
    for name, entry in header.items():
        if name != "__metadata__" and isinstance(entry, dict) and "shape" in entry:
            dtype = str(entry.get("dtype", ""))
            counts[dtype] = counts.get(dtype, 0) + prod(entry["shape"])
