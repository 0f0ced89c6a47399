"""Triton, where it is there and something can run it, and whether a tensor is worth a kernel.

Elsewhere (a CPU without Triton's interpreter) its names stand empty: a kernel's file can still be
imported for the reference that it holds, and start-up does not pay for Triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (IS_INTERPRETED or torch.cuda.is_available())

if HAS_TRITON:
    import triton
    import triton.language as tl
else:
    triton = tl = None

__all__ = [
    "HAS_GLUON",
    "HAS_TRITON",
    "IS_INTERPRETED",
    "bind",
    "cdiv",
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
]

_LAUNCHED = "3.6."  # the release whose compiled kernels are launched directly; others go Triton's own way
_DIRECT = HAS_TRITON and not IS_INTERPRETED and triton.__version__.startswith(_LAUNCHED)
HAS_GLUON = _DIRECT  # kernels in that processor's own terms are written for this release's form of them
_devices: tuple[str, ...] = ("cuda",) if HAS_TRITON else ()  # those whose tensors go to kernels


def set_kernel_devices(*devices: str) -> None:
    """For comparisons and tests: kernels take the tensors of these devices, of none if none is named."""
    global _devices
    _devices = devices


def use_kernel(x: Tensor) -> bool:
    """Whether work on this tensor goes to a kernel."""
    if x.is_cuda:  # asked many times a layer, and the name of a device is slow to come by
        return "cuda" in _devices
    return bool(_devices) and x.device.type in _devices


def jit(*, unspecialized: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a kernel. Arguments in `unspecialized` change from step to step: a kernel is not compiled
    anew because a count became a multiple of 16, or a slice of the step's integers is aligned differently."""
    if not HAS_TRITON:
        return lambda function: function
    if _DIRECT:
        from penstock.kernels.launch import Kernel

        return lambda function: Kernel(function, unspecialized)
    made: Callable[[Callable[..., Any]], Any] = triton.jit(
        do_not_specialize=list(unspecialized), do_not_specialize_on_alignment=list(unspecialized)
    )
    return made


def gluon_jit(*, unspecialized: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Makes a kernel that says itself which warps do what; where `HAS_GLUON` is, and nothing elsewhere."""
    if not HAS_GLUON:
        return lambda function: function
    from penstock.kernels.launch import OwnKernel

    return lambda function: OwnKernel(function, unspecialized)


def precompile(threads: int) -> AbstractContextManager[None] | None:
    """In which kernels are compiled by several threads instead of being run. None: they cannot be."""
    if not _DIRECT:
        return None
    from penstock.kernels import launch

    return launch.precompile(threads)


def is_precompiling() -> bool:
    """Whether kernels are compiled instead of being run, so that all that a model has should be launched."""
    if not _DIRECT:
        return False
    from penstock.kernels import launch

    return launch.is_precompiling()


def bind(kernel: Any, places: tuple[int, ...] | None = None, **constants: Any) -> Callable[..., Any]:
    """A kernel with its constants: called with the number of its programs and its other arguments, tensors
    first. Whoever launches it keeps this, for constants are looked at once. `places` says which of the
    given tensors each of the kernel's is, where one stands for several."""
    if (own := getattr(kernel, "bind", None)) is not None:
        made: Callable[..., Any] = own(places, **constants)
        return made
    if places is None:
        return lambda programs, *args: kernel[(programs,)](*args, **constants)
    given = max(places) + 1
    return lambda programs, *args: kernel[(programs,)](*(args[i] for i in places), *args[given:], **constants)


def replay(launch: Callable[..., Any], programs: int, *args: Any) -> Callable[[], Any]:
    """A launch of what `bind` gave, to be made again and again with the same arguments on the same stream;
    what can be found out once is found out by the first."""
    prepare: Callable[..., Callable[[], Any]] | None = getattr(launch, "replay", None)
    return partial(launch, programs, *args) if prepare is None else prepare(programs, *args)


def next_power_of_2(size: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(size - 1, 0).bit_length()


def cdiv(size: int, part: int) -> int:
    return -(-size // part)


def num_warps_for(elements: int) -> int:
    """Warps for a program that holds so many elements: eight a thread, at most 16 warps."""
    return min(max(elements // 256, 1), 16)
