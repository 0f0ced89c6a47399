"""Triton for the kernel modules, if it is installed and usable, and the choice of tensors that go to kernels.

On a CPU without Triton's interpreter, Triton is not imported and its names are None. Kernel modules can still
be imported for their reference implementations.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("penstock.kernels")

MAX_COMPILER_THREADS = 8  # more threads block each other
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (IS_INTERPRETED or torch.cuda.is_available())

if HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = None

CAN_WAIT = False  # whether kernels can wait for their predecessor; if not, they are launched after it
if HAS_TRITON and not IS_INTERPRETED:
    try:
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
        from triton.language.target_info import cuda_capability_geq
    except ImportError:
        log.info("this release of Triton cannot overlap launches")
    else:
        CAN_WAIT = True

__all__ = [
    "HAS_GLUON",
    "HAS_TRITON",
    "IS_INTERPRETED",
    "MAX_COMPILER_THREADS",
    "bind",
    "cdiv",
    "from_fp8",
    "gluon_jit",
    "is_precompiling",
    "jit",
    "next_power_of_2",
    "num_warps_for",
    "precompile",
    "replay",
    "set_kernel_devices",
    "tl",
    "use_kernel",
    "wait_for_inputs",
]


def can_launch_directly() -> bool:
    """Whether compiled kernels can be launched without Triton's own path.

    Log a warning if Triton's release prevents it.
    """
    if not HAS_TRITON or IS_INTERPRETED:
        return False
    from penstock.kernels.triton_internals import find_mismatch

    mismatch = find_mismatch()
    if mismatch is not None:
        log.warning("%s: kernels are launched by Triton itself, which takes more host time", mismatch)
    return mismatch is None


_LAUNCHES_DIRECTLY = can_launch_directly()
HAS_GLUON = _LAUNCHES_DIRECTLY  # Gluon is experimental: its kernels are written for the tested releases
_devices: tuple[str, ...] = ("cuda",) if HAS_TRITON else ()  # device types whose tensors go to kernels


def set_kernel_devices(*devices: str) -> None:
    """Send tensors of these device types to kernels, for comparisons and tests.

    Without arguments, no tensor goes to a kernel.
    """
    global _devices
    _devices = devices


def use_kernel(x: Tensor) -> bool:
    """Whether an operation on this tensor runs in a kernel."""
    if x.is_cuda:  # a shortcut for several calls per layer: the device's name is slow to read
        return "cuda" in _devices
    return bool(_devices) and x.device.type in _devices


def jit(
    *, unspecialized: tuple[str, ...] = (), overlaps: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel. `unspecialized` names arguments that change from step to step.

    Triton would otherwise compile again when a count becomes a multiple of 16, or when a slice of the step's
    integers has another alignment. With `overlaps` the kernel may be launched before its predecessor has
    ended. It must then call `wait_for_inputs` before it reads or writes any data of a step.
    """
    if not HAS_TRITON:
        return lambda function: function
    if _LAUNCHES_DIRECTLY:
        from penstock.kernels.launch import Kernel

        return lambda function: Kernel(function, unspecialized, overlaps=overlaps)
    names = list(unspecialized)
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(
        do_not_specialize=names, do_not_specialize_on_alignment=names
    )
    return decorate


if CAN_WAIT:

    @triton.jit
    def wait_for_inputs() -> None:
        """Wait until the previous kernel has ended, and allow the next one to be launched (PDL).

        Without overlapping launches, and before Hopper, this does nothing.
        """
        if cuda_capability_geq(9, 0):
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def from_fp8(x: tl.tensor, like: tl.tensor) -> tl.tensor:
        """Convert fp8 to the half-precision type of `like`. Before Hopper there is no direct conversion to
        bfloat16."""
        if cuda_capability_geq(9, 0):
            wide = x.to(like.dtype)
        else:
            wide = x.to(tl.float32).to(like.dtype)
        return wide

elif HAS_TRITON:

    @triton.jit
    def wait_for_inputs() -> None:
        """Kernels run one after another."""

    @triton.jit
    def from_fp8(x: tl.tensor, like: tl.tensor) -> tl.tensor:
        """Convert fp8 to the type of `like`."""
        return x.to(tl.float32).to(like.dtype)

else:

    def wait_for_inputs() -> None:
        """Never called: there are no kernels."""

    def from_fp8(x: Any, like: Any) -> Any:
        """Never called: there are no kernels."""


def gluon_jit(*, unspecialized: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a Gluon kernel if `HAS_GLUON`. Otherwise return the function unchanged; it is never launched."""
    if not HAS_GLUON:
        return lambda function: function
    from penstock.kernels.launch import GluonKernel

    return lambda function: GluonKernel(function, unspecialized)


def precompile(threads: int) -> AbstractContextManager[None] | None:
    """A context in which this thread's launches only compile, on `threads` other threads.

    None if this release of Triton does not support it.
    """
    if not _LAUNCHES_DIRECTLY:
        return None
    from penstock.kernels import launch

    return launch.precompile(threads)


def is_precompiling() -> bool:
    """Whether this thread's launches only compile. A model should then launch all kernels that it may use."""
    if not _LAUNCHES_DIRECTLY:
        return False
    from penstock.kernels import launch

    return launch.is_precompiling()


def bind(kernel: Any, tensor_order: tuple[int, ...] | None = None, **constants: Any) -> Callable[..., Any]:
    """Bind a kernel to its constants.

    Call the result with the number of programs and the other arguments, tensors first. Keep it: the constants
    are inspected only once. `tensor_order` gives, for each tensor parameter of the kernel, the index of the
    tensor argument that is passed for it; one argument may be passed several times.
    """
    if (bind_directly := getattr(kernel, "bind", None)) is not None:
        bound: Callable[..., Any] = bind_directly(tensor_order, **constants)
        return bound
    if tensor_order is None:
        return lambda programs, *args: kernel[(programs,)](*args, **constants)
    given = max(tensor_order) + 1
    return lambda programs, *args: kernel[(programs,)](
        *(args[i] for i in tensor_order), *args[given:], **constants
    )


def replay(launch: Callable[..., Any], programs: int, *args: Any) -> Callable[[], Any]:
    """Return a callable that repeats a launch of a bound kernel with the same arguments on the same stream.

    Only its first call checks the arguments.
    """
    prepare: Callable[..., Callable[[], Any]] | None = getattr(launch, "replay", None)
    return partial(launch, programs, *args) if prepare is None else prepare(programs, *args)


def next_power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def cdiv(size: int, part: int) -> int:
    return -(-size // part)


def num_warps_for(elements: int) -> int:
    """Warps of a program that holds this many elements: eight elements per thread, at most 16 warps."""
    return min(max(elements // 256, 1), 16)
