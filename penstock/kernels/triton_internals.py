"""All uses of Triton's undocumented names. Callers of this module do not depend on Triton's release.

`launch` calls compiled kernels directly, which saves most of the host time of a launch. This relies on how
Triton calls its own launcher. `find_mismatch` checks that the installed release behaves as this module
expects; if it does not, `language` launches every kernel with the public `kernel[grid](…)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import triton

try:
    from triton import AsyncCompileMode, JITFunction, knobs
    from triton.compiler import CompiledKernel
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver
except ImportError as error:  # another release; `find_mismatch` reports it, and nothing below is called
    _import_error: str | None = str(error)
else:
    _import_error = None

__all__ = [
    "TESTED_RELEASES",
    "DirectLauncher",
    "GluonJITFunction",
    "JITFunction",
    "TensorDescriptor",
    "compile_in",
    "current_device_and_stream",
    "direct_launcher",
    "find_mismatch",
    "has_launch_hooks",
    "launch_by_triton",
    "parameters",
    "pre_run_hooks",
]

TESTED_RELEASES = ("3.6.",)


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    is_constexpr: bool


class DirectLauncher(NamedTuple):
    """How to call a compiled kernel: `call(x, y, z, stream, *leading, *arguments)`, with the grid first."""

    call: Callable[..., Any]
    leading: tuple[Any, ...]


def find_mismatch() -> str | None:
    """Describe how the installed Triton differs from what this module expects; None if it does not.

    The names checked below do not show the order of the launcher's arguments, so an untested release always
    counts as different.
    """
    release = triton.__version__
    if not release.startswith(TESTED_RELEASES):
        known = ", ".join(f"{prefix}x" for prefix in TESTED_RELEASES)
        return f"Triton {release} is not a tested release ({known})"
    if _import_error is not None:
        return f"Triton {release}: {_import_error}"
    wanted: tuple[tuple[object, str, tuple[str, ...]], ...] = (
        (JITFunction.run, "JITFunction.run", ("self", "args", "grid", "warmup", "kwargs")),
        (AsyncCompileMode, "AsyncCompileMode", ("executor", "ignore_errors")),
        (
            CompiledKernel.launch_metadata,
            "CompiledKernel.launch_metadata",
            ("self", "grid", "stream", "args"),
        ),
    )
    for function, name, expected in wanted:
        found = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        if found != expected:
            return f"Triton {release}: {name} takes ({', '.join(found)}), not ({', '.join(expected)})"
    if not isinstance(getattr(CompiledKernel, "run", None), property):
        return f"Triton {release}: CompiledKernel.run is not a property"
    for name in ("launch_enter_hook", "launch_exit_hook"):
        if not hasattr(knobs.runtime, name):
            return f"Triton {release}: knobs.runtime has no {name}"
    return None


def parameters(kernel: Any) -> list[Parameter]:
    """The parameters of a `JITFunction`, in order."""
    return [Parameter(parameter.name, parameter.is_constexpr) for parameter in kernel.params]


def pre_run_hooks(kernel: Any) -> list[Any]:
    """The list that `JITFunction.add_pre_run_hook` appends to."""
    hooks: list[Any] = kernel.pre_run_hooks
    return hooks


def launch_by_triton(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], *, compile_only: bool
) -> Any:
    """Launch a `JITFunction` the way `kernel[grid](…)` does, and return what Triton compiled for it."""
    return kernel.run(*args, grid=grid, warmup=compile_only, **constants)


def direct_launcher(compiled: Any) -> DirectLauncher | None:
    """How to call a kernel that `launch_by_triton` returned; None if it does not look as expected."""
    run, function, metadata = (
        getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")
    )
    if run is None or function is None or metadata is None:
        return None
    # After the packed metadata come the launch metadata and two hooks, which are not used.
    trailing = (metadata, None, None, None)
    launch = getattr(run, "launch", None)
    sizes = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    flags = [getattr(run, name, None) for name in ("launch_cooperative_grid", "launch_pdl")]
    if launch is None or sizes != [0, 0] or None in flags:
        return DirectLauncher(run, (function, *trailing))
    # The launcher object only allocates scratch memory, and this kernel needs none.
    return DirectLauncher(launch, (function, *flags, None, None, *trailing))


def has_launch_hooks() -> bool:
    """Whether something, such as a profiler, has installed hooks that Triton calls at every launch."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    return leave is not None and bool(getattr(leave, "calls", True))


def current_device_and_stream() -> tuple[int, int]:
    """The CUDA device and stream that a launch goes to."""
    global _getters
    if _getters is None:
        active = driver.active
        get_device = getattr(torch._C, "_cuda_getDevice", active.get_current_device)
        _getters = get_device, active.get_current_stream
    device = _getters[0]()
    return device, _getters[1](device)


_getters: tuple[Callable[[], int], Callable[[int], int]] | None = None


def compile_in(pool: Executor) -> AbstractContextManager[Any]:
    """A context in which launches with `compile_only` compile in `pool`; the real launch raises errors."""
    mode: AbstractContextManager[Any] = AsyncCompileMode(pool, ignore_errors=True)
    return mode
