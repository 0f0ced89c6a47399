"""Translation of device exceptions: out of memory, a lost device, or a fault of the step alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.errors import DeviceFailed, DeviceOutOfMemory, EngineError

_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")


@contextmanager
def typed_faults(device: torch.device) -> Iterator[None]:
    """Raise device exceptions as the engine's error types; other exceptions pass unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        fault = diagnose(error, lambda: _touch(device))
        if fault is None:
            raise
        traceback.clear_frames(error.__traceback__)  # the frames hold the tensors that fill the memory
    else:
        return
    if isinstance(fault, DeviceOutOfMemory) and device.type == "cuda":
        torch.cuda.empty_cache()
    raise fault from None


def diagnose(error: BaseException, touch: Callable[[], None]) -> EngineError | None:
    """The typed error for an exception, or None for a fault of the step alone.

    After a CUDA error the device may still work: `touch` uses it once more, and raises if it does not.
    """
    words = str(error).strip()
    first_line = words.splitlines()[0] if words else type(error).__name__
    if out_of_memory(error):
        return DeviceOutOfMemory(first_line)
    if "CUDA" not in words and not isinstance(error, torch.AcceleratorError):
        return None
    try:
        touch()
    except RuntimeError:
        return DeviceFailed(f"the device failed: {first_line}")
    return None


def out_of_memory(error: BaseException) -> bool:
    words = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        sign in words for sign in _NO_MEMORY
    )


def _touch(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
