"""`torch.cuda` of a simulated H200, and the threads and kernel launches that use it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from triton.runtime import interpreter

from tests.simulated_gpu.graphs import POOL, SimulatedGraph
from tests.simulated_gpu.tensors import (
    DEVICE,
    DeviceTensor,
    OnDevice,
    as_tensor,
    capture,
    forbid_waits,
    make_tensor,
    move,
    wait,
)

FREE_BYTES = 1 << 28  # engines give most of it to the KV cache
PROPERTIES = SimpleNamespace(
    name="simulated H200",
    major=9,
    minor=0,
    total_memory=1 << 34,
    multi_processor_count=132,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    warp_size=32,
)


class Stream:
    """A stream whose work runs immediately, in launch order across all streams."""

    cuda_stream = 0
    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        wait("Stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        """Allowed even while other waits are forbidden, except during a capture."""
        if capture.graph is not None:
            wait("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if self._recorded_s is None or end._recorded_s is None:
            raise RuntimeError("both events must be recorded before calculating elapsed time")
        return (end._recorded_s - self._recorded_s) * 1000


class Generator(torch.Generator):
    """A generator for the device that draws on the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator.__new__(cls, "cpu")


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _synchronize(device: Any = None) -> None:
    wait("torch.cuda.synchronize")


_STREAM = Stream()
_CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "is_bf16_supported": lambda *_: True,
    "mem_get_info": lambda device=None: (FREE_BYTES, PROPERTIES.total_memory),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "synchronize": _synchronize,
    "set_sync_debug_mode": lambda mode: forbid_waits(mode in (2, "error")),
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": _nothing,
    "device": _nothing,
    "device_of": _nothing,
    "CUDAGraph": SimulatedGraph,
    "graph_pool_handle": lambda: POOL,
    "is_current_stream_capturing": lambda: capture.graph is not None,
}


def install() -> None:
    """Simulate a CUDA device in this process from now on."""
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
    torch.utils._device._device_constructors()  # caches PyTorch's own functions, for `with torch.device`
    torch.tensor, torch.as_tensor = make_tensor, as_tensor  # type: ignore[assignment]
    torch.Generator = Generator  # type: ignore[misc]
    Tensor.to = move  # type: ignore[method-assign, assignment]
    Tensor.cuda = lambda self, *_, **options: move(self, DEVICE, **options)  # type: ignore[method-assign]
    threading.Thread.run = _run_thread  # type: ignore[method-assign]
    interpreter.GridExecutor.__call__ = _launch
    OnDevice().__enter__()


_thread_run, _interpret = threading.Thread.run, interpreter.GridExecutor.__call__


def _run_thread(self: threading.Thread) -> None:
    with OnDevice():
        _thread_run(self)


def _launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
    for x in [*args, *kwargs.values()]:
        if isinstance(x, Tensor) and not isinstance(x, DeviceTensor):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    args, kwargs = tree_map_only(DeviceTensor, lambda x: x.host, (args, kwargs))

    def interpret(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            _interpret(kernel, *args, **kwargs)

    interpret(*args, **kwargs)
    if capture.graph is not None:
        capture.graph.add_launch(interpret, args, kwargs)
