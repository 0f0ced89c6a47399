"""Inspects pickled weights without torch and without unpickling them."""

from __future__ import annotations

import zipfile
from pathlib import Path

_ZIP = b"PK\x03\x04"
_MAX_PICKLE_BYTES = 100_000_000  # maximum size read of the part that names the tensors


def is_zip(file: Path) -> bool:
    """Whether torch.save wrote the file in the format that it has used since PyTorch 1.6."""
    with file.open("rb") as opened:
        return opened.read(len(_ZIP)) == _ZIP


def may_hold(file: Path, tensor: str) -> bool:
    """Whether the name of a tensor is in the file. A file that cannot be read may hold anything."""
    try:
        if not is_zip(file):
            with file.open("rb") as opened:
                return tensor.encode() in opened.read(_MAX_PICKLE_BYTES)
        with zipfile.ZipFile(file) as archive:
            parts = [name for name in archive.namelist() if name.endswith("data.pkl")]
            with archive.open(parts[0]) as opened:
                return tensor.encode() in opened.read(_MAX_PICKLE_BYTES)
    except (OSError, zipfile.BadZipFile, LookupError, NotImplementedError, RuntimeError):
        return True
