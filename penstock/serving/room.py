"""Memory for an engine that is about to take some: other models sleep where there is too little."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.checkpoint.spec import ModelSpec
from penstock.runner.cpu_memory import available_memory_bytes

log = logging.getLogger("penstock.engine")
Ask = Callable[[int], None]  # have other models sleep for this many bytes; returns when that is done
RESERVE = 1 << 29  # bytes beyond the weights and caches: activations, and what the system needs
_WEIGHTS = (".safetensors", ".bin", ".gguf")


def make_room(num_bytes: int, device: str, ask: Ask) -> None:
    """Ask for memory if the device has less than this free."""
    if device == "null":
        return
    missing = num_bytes + RESERVE - free_bytes(device)
    if missing > 0:
        log.info("%.1f GiB are missing; other models may have to sleep", missing / 2**30)
        ask(missing)


def free_bytes(device: str) -> int:
    if not device.startswith("cuda"):
        return available_memory_bytes()
    import torch

    return torch.cuda.mem_get_info(torch.device(device))[0]


def weight_bytes(spec: ModelSpec) -> int:
    """About what a model's weights take once they are loaded: the size of their files."""
    files = (file for suffix in _WEIGHTS for file in spec.path.glob(f"*{suffix}"))
    return sum(file.stat().st_size for file in files)
