"""Names, types and shapes of stored tensors, from the header of a safetensors file. Reads no values.

A file begins with the length of its header in eight bytes. The header is JSON, and the values follow it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.errors import ModelLoadError

LENGTH_BYTES = 8  # size of the length field at the start of a file
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit is a little lower


class StoredTensor(NamedTuple):
    dtype: str  # in the format's spelling, such as F32 or I8
    shape: tuple[int, ...]


def header_bytes(file: Path) -> bytes:
    """Read the header as stored; raise `ValueError` if its length is not plausible."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 2 <= size <= min(_MAX_HEADER_BYTES, file.stat().st_size):
            raise ValueError(f"its header would take {size} bytes")
        return stream.read(size)


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Type and shape of every tensor in a safetensors file, by name."""
    try:
        header = msgspec.json.decode(header_bytes(file))
        return {
            name: StoredTensor(str(entry["dtype"]), tuple(int(length) for length in entry["shape"]))
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise ModelLoadError(
            f"{file} is missing; the model's vectors are read from it", param="model"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is not a readable safetensors file: {error}", param="model") from None


_SCALARS = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}


def read_scalar(file: Path, name: str) -> float | None:
    """Read the value of a tensor with one element; None if the file has no such tensor."""
    header = header_bytes(file)
    entry = msgspec.json.decode(header).get(name)
    if entry is None or math.prod(entry["shape"]) != 1:
        return None
    begin, end = entry["data_offsets"]
    with file.open("rb") as stream:
        stream.seek(LENGTH_BYTES + len(header) + begin)
        raw = stream.read(end - begin)
    if entry["dtype"] == "BF16":
        return float(np.frombuffer(b"\0\0" + raw, "<f4")[0])
    return float(np.frombuffer(raw, _SCALARS[entry["dtype"]])[0])
