"""Reads tensors that torch.save pickled, without running any code in the file.

Each file is converted to safetensors once, into the cache. If the cache cannot be written, the pickle itself
is read each time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.checkpoint.convert import converted_file
from penstock.checkpoint.files import PICKLES, shown
from penstock.checkpoint.pickles import is_zip
from penstock.errors import ModelLoadError
from penstock.weights.dtypes import DTYPE_NAMES

log = logging.getLogger(__name__)
_ALIGNMENT = 8  # bytes, alignment of the first tensor
_WRAPPER = "state_dict"  # the only key of a file that wraps its tensors once more
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a small file, either safetensors or a pickle."""
    if file.suffix not in PICKLES:
        return dict(load_file(file))
    cached = converted(file)
    return load_pickle(file) if cached is None else dict(load_file(cached))


def load_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped into memory if its format allows it.

    PyTorch's restricted unpickler builds only tensors and plain containers. It refuses everything else before
    any code runs.
    """
    try:
        values = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip(file))
    except FileNotFoundError:
        raise ModelLoadError(f"{file} is missing", param="model") from None
    except Exception as error:  # the unpickler raises many types of exceptions
        if (found := _GLOBAL.search(str(error))) is not None:
            raise ModelLoadError(
                f"{file} was not loaded: it holds {found[1]}, which is no tensor and could run code; "
                "use a checkpoint in safetensors format, or one that holds tensors only",
                param="model",
            ) from None
        reason = str(error).strip().splitlines()[-1:] or ["it is no such file"]
        raise ModelLoadError(f"{file} is not a readable PyTorch file: {reason[0]}", param="model") from None
    return _tensors_of(file, values)


def _tensors_of(file: Path, values: Any) -> dict[str, Tensor]:
    if isinstance(values, dict) and list(values) == [_WRAPPER]:
        values = values[_WRAPPER]
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} holds a {type(values).__name__}, not tensors by name", param="model")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelLoadError(
                f"{file} has {shown(name)}, a {type(value).__name__}; supported are files that hold tensors "
                f"by name, at the top or under {_WRAPPER!r} alone",
                param="model",
            )
        if value.layout != torch.strided or value.is_quantized or value.dtype not in DTYPE_NAMES:
            kind = f"{value.layout} {value.dtype}"
            raise ModelLoadError(f"{file} has {name!r} as {kind}, which is not supported", param="model")
    return {name: value.detach() for name, value in values.items()}


def converted(file: Path) -> Path | None:
    """The file's tensors as safetensors in the cache, converted if they are not there yet.

    None if the cache cannot be written. If several processes need the file, one converts it and the others
    wait.
    """
    cached = converted_file(file)
    if cached.is_file():
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with _locked(cached.with_suffix(".lock")):
            if not cached.is_file():
                tensors = load_pickle(file)
                log.info("converting %s to safetensors once, into %s", file, cached)
                _write(tensors, cached)
    except OSError as error:
        space = error.errno in (errno.ENOSPC, errno.EDQUOT)
        log.warning(
            "%s cannot be converted to safetensors in %s (%s); it is read as it is, which is slower%s",
            file,
            cached.parent,
            error.strerror,
            "; free some space, or set XDG_CACHE_HOME to another disk" if space else "",
        )
        return None
    return cached


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """A lock between processes. It is released when the process exits, even by a crash."""
    with file.open("w") as lock:
        with suppress(OSError):  # some network file systems have no locks; then each process converts
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(tensors: Mapping[str, Tensor], cached: Path) -> None:
    """Write tensor by tensor, so that they are never all in memory. Tensors that share memory are stored
    separately, because safetensors cannot share. The widest dtypes come first, so that each tensor is
    aligned."""
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    for left in cached.parent.glob(f"{cached.stem}.*.part"):
        left.unlink(missing_ok=True)  # left by a process that was killed
    draft = cached.with_suffix(f".{os.getpid()}.part")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    try:
        with draft.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                if tensor.numel():
                    out.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            out.flush()
            os.fsync(out.fileno())  # after a power failure, a file under the final name must be complete
        draft.replace(cached)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
