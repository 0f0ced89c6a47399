"""Memory for an engine that is about to allocate some: other models sleep if too little is free."""

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
Ask = Callable[[int], None]  # have other models sleep to free this many bytes; returns when that is done
RESERVE = 1 << 29  # bytes besides weights and caches: activations and system overhead
_WEIGHTS = (".safetensors", ".bin", ".gguf")


class Room:
    """Memory of a device that several engines share.

    Only one engine at a time allocates, so that no other takes the memory that it has found free. An engine's
    turn begins with `make`, and ends with `leave` or when its process exits.
    """

    def __init__(self, device: str, folder: Path, ask: Ask) -> None:
        """`folder` is the same for all engines of a server."""
        self._device = device
        self._path = folder / f"{one_name(device).replace(':', '-')}.memory"
        self._ask = ask
        self._turn: BinaryIO | None = None

    def make(self, num_bytes: int) -> None:
        """Wait for this engine's turn. Then have other models sleep if less than `num_bytes` are free."""
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
        """End this engine's turn, after it has allocated the memory or failed to."""
        if self._turn is not None:
            self._turn.close()
            self._turn = None


def one_name(device: str) -> str:
    """Return the canonical name of a device: `cuda` and `cuda:0` are the same."""
    return "cuda:0" if device == "cuda" else device


def free_bytes(device: str) -> int:
    if not device.startswith("cuda"):
        return available_memory_bytes()
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def start_bytes(spec: ModelSpec, settings: Resolved) -> int:
    """Estimate the memory that an engine allocates on its first device at start: the weights, and on a GPU a
    KV cache of a set size. On a CPU the pages of a KV cache are allocated when they are first used."""
    if not settings.device.startswith("cuda"):
        return weight_bytes(spec)
    has_cache = settings.generates or settings.chunked
    weights = weight_bytes(spec) // settings.tensor_parallel_size
    return weights + (settings.kv_cache_bytes if has_cache else 0)


def weight_bytes(spec: ModelSpec) -> int:
    """Estimate the memory of a model's weights by the size of their files."""
    files = (file for suffix in _WEIGHTS for file in spec.path.glob(f"*{suffix}"))
    return sum(file.stat().st_size for file in files)
