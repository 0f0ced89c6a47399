"""Memory for an engine that is about to take some: other models sleep where there is too little."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from penstock.checkpoint.spec import ModelSpec
from penstock.config import Resolved
from penstock.runner.cpu_memory import available_memory_bytes

log = logging.getLogger("penstock.engine")
Ask = Callable[[int], None]  # have other models sleep for this many bytes; returns when that is done
RESERVE = 1 << 29  # bytes beyond the weights and caches: activations, and what the system needs
_WEIGHTS = (".safetensors", ".bin", ".gguf")


class Room:
    """Memory of a device that engines share. One engine at a time takes some: another must not take what this
    one has found free. Its turn begins with `make` and ends with `leave`, or with the process."""

    def __init__(self, device: str, folder: Path, ask: Ask) -> None:
        """`folder` is the same for all engines of a server."""
        self._device = device
        self._path = folder / f"{one_name(device).replace(':', '-')}.memory"
        self._ask = ask
        self._turn: BinaryIO | None = None

    def make(self, num_bytes: int) -> None:
        """Wait for the turn. Then have other models sleep if the device has less than this free."""
        if self._device == "null":
            return
        if self._turn is None:
            turn = self._path.open("ab")
            fcntl.flock(turn, fcntl.LOCK_EX)
            self._turn = turn
        missing = num_bytes + RESERVE - free_bytes(self._device)
        if missing > 0:
            log.info("%.1f GiB are missing; other models may have to sleep", missing / 2**30)
            self._ask(missing)

    def leave(self) -> None:
        """The memory is taken, or it cannot be taken."""
        if self._turn is not None:
            self._turn.close()
            self._turn = None


def one_name(device: str) -> str:
    """The name of a device that may have two."""
    return "cuda:0" if device == "cuda" else device


def free_bytes(device: str) -> int:
    if not device.startswith("cuda"):
        return available_memory_bytes()
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def start_bytes(spec: ModelSpec, settings: Resolved) -> int:
    """About what an engine takes of its first device while it starts: the weights, and on a GPU a KV cache of
    a given size. A CPU takes the pages of a KV cache when they are used."""
    if not settings.device.startswith("cuda"):
        return weight_bytes(spec)
    has_cache = settings.generates or settings.chunked
    weights = weight_bytes(spec) // settings.tensor_parallel_size
    return weights + (settings.kv_cache_bytes if has_cache else 0)


def weight_bytes(spec: ModelSpec) -> int:
    """About what a model's weights take once they are loaded: the size of their files."""
    files = (file for suffix in _WEIGHTS for file in spec.path.glob(f"*{suffix}"))
    return sum(file.stat().st_size for file in files)
