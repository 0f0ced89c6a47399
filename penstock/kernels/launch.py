"""Launches of a kernel that was compiled before, without Triton's own way there.

For each launch Triton binds and inspects all arguments anew, which costs the host more than the rest of a
small kernel's launch. What decides which compiled form serves is little and known here; where anything
is out of the ordinary, Triton launches as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_INT32 = 1 << 31
MOST = 1024  # compiled forms that a kernel remembers


class Form(NamedTuple):
    """A compiled kernel, ready to be launched with other arguments of the same kinds."""

    run: Callable[..., Any]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]  # in the order of the signature, which ends with them


class Kernel(JITFunction):  # type: ignore[misc]
    """A `JITFunction` that remembers its compiled forms by the kinds of their arguments.

    Positional arguments are tensors and numbers, keywords are constants and options.
    """

    def __init__(self, function: Callable[..., Any], loose: tuple[str, ...]) -> None:
        super().__init__(function, do_not_specialize=list(loose), do_not_specialize_on_alignment=list(loose))
        self.forms: dict[tuple[Any, ...], Form] = {}
        self.quick = 0  # launches that took the short way
        self._loose = tuple(name in loose for name in self.arg_names)
        self._constants = [parameter.name for parameter in self.params if parameter.is_constexpr]
        places = [parameter.num for parameter in self.params if parameter.is_constexpr]
        self._last = places == list(range(len(self.params) - len(places), len(self.params)))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            return self._launch(grid, args, constants)

        return launch

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        kinds = self._kinds(args)
        if kinds is None or len(grid) != 1 or self.pre_run_hooks or _watched():
            return self.run(*args, grid=grid, warmup=False, **constants)
        device, stream = _where()
        values = constants.values()
        key = (device, *kinds, *constants, *values, *map(type, values))
        form = self.forms.get(key)
        if form is None:
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            self._remember(key, compiled, len(args), constants)
            return compiled
        self.quick += 1
        form.run(
            grid[0], 1, 1, stream, form.function, form.metadata, None, None, None, *args, *form.constants
        )
        return None

    def _kinds(self, args: tuple[Any, ...]) -> list[Any] | None:
        """What a compiled form depends on. None: that is for Triton to say, as where a tensor begins at an
        odd address, or a number might be compiled in."""
        kinds: list[Any] = []
        addresses = 0
        for value, loose in zip(args, self._loose, strict=False):
            if isinstance(value, Tensor):
                kinds.append(value.dtype)
                if not loose:
                    addresses |= value.data_ptr()
            elif type(value) is float:
                kinds.append(float)
            elif type(value) is int and loose and -_INT32 <= value < _INT32:
                kinds.append(int)
            else:
                return None
        return None if addresses & 15 else kinds

    def _remember(self, key: tuple[Any, ...], compiled: Any, given: int, constants: dict[str, Any]) -> None:
        run, function, metadata = (
            getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")
        )
        complete = given + len(self._constants) == len(self.params) and self._last
        complete = complete and all(name in constants for name in self._constants)
        if not complete or run is None or function is None or metadata is None or len(self.forms) >= MOST:
            return
        self.forms[key] = Form(run, function, metadata, tuple(constants[name] for name in self._constants))


def _watched() -> bool:
    """Whether somebody, as a profiler, wants to hear of every launch."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _where() -> tuple[int, int]:
    """The device that kernels go to, and its stream."""
    active = driver.active
    device = active.get_current_device()
    return device, active.get_current_stream(device)
