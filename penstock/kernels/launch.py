"""Launches of compiled kernels that skip Triton's own launch path.

Triton binds and inspects all arguments for each launch. For a small kernel that takes more host time than the
rest of the launch. Only a few properties of the arguments decide which compiled kernel to use, and this
module checks just these. Unusual launches go through Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels import triton_internals
from penstock.kernels.triton_internals import (
    GluonJITFunction,
    JITFunction,
    TensorDescriptor,
    current_device_and_stream,
    has_launch_hooks,
    launch_by_triton,
)

_INT32 = 1 << 31
MAX_COMPILED = 1024  # compiled kernels cached by each `Kernel`
# Whether this thread only compiles kernels. Launches of other threads must run, because they need results.
_precompiling: ContextVar[bool] = ContextVar("penstock_precompiling", default=False)
_num_precompiling = 0  # number of such threads; if 0, launches do not read the context variable
_counting = threading.Lock()


class Compiled(NamedTuple):
    """A compiled kernel, ready to be launched with other arguments of the same types."""

    call: Callable[..., Any]
    leading: tuple[Any, ...]  # arguments between the stream and the kernel's own
    constants: tuple[Any, ...]  # values of the constexpr parameters, which come last


_address = Tensor.data_ptr
_dtype = attrgetter("dtype")


class ArgumentTypes(NamedTuple):
    """Indices of a kernel's arguments by type. Each group is checked without a Python loop over all
    arguments."""

    tensors: tuple[int, ...]
    absent: tuple[int, ...]  # None, which Triton compiles in
    aligned: tuple[int, ...]  # tensors for which Triton specializes on the alignment
    descriptors: tuple[int, ...]  # tensor descriptors for TMA
    floats: tuple[int, ...]
    integers: tuple[int, ...]  # unspecialized integers
    has_others: bool  # whether some arguments need Triton's own launch path
    num_args: int

    @staticmethod
    def of(args: tuple[Any, ...], unspecialized: tuple[bool, ...]) -> ArgumentTypes:
        indices = range(len(args))
        tensors = tuple(i for i in indices if isinstance(args[i], Tensor))
        floats = tuple(i for i in indices if type(args[i]) is float)
        integers = tuple(i for i in indices if type(args[i]) is int and unspecialized[i])
        aligned = tuple(i for i in tensors if not unspecialized[i])
        absent = tuple(i for i in indices if args[i] is None)
        descriptors = tuple(i for i in indices if isinstance(args[i], TensorDescriptor))
        known = len(tensors) + len(absent) + len(descriptors) + len(floats) + len(integers)
        has_others = known < len(args)
        return ArgumentTypes(tensors, absent, aligned, descriptors, floats, integers, has_others, len(args))

    def key(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The properties of the arguments that decide which compiled kernel to use.

        None if Triton has to decide, because a tensor is not aligned or a number may be compiled in.
        """
        if self.has_others or len(args) != self.num_args:
            return None
        for i in self.absent:
            if args[i] is not None:
                return None
        for i in self.floats:
            if type(args[i]) is not float:
                return None
        for i in self.integers:
            if type(args[i]) is not int or not -_INT32 <= args[i] < _INT32:
                return None
        try:
            if reduce(or_, map(_address, [args[i] for i in self.aligned]), 0) & 15:
                return None
            dtypes = tuple(map(_dtype, [args[i] for i in self.tensors]))
            if not self.descriptors:
                return dtypes
            described = [args[i] for i in self.descriptors]
            return *dtypes, *((each.base.dtype, *each.block_shape, each.layout) for each in described)
        except (AttributeError, TypeError):  # a number where the first launch had a tensor
            return None


class Kernel(JITFunction):  # type: ignore[misc]
    """A `JITFunction` that caches its compiled kernels by the types of their arguments.

    Positional arguments are tensors and numbers, keyword arguments are constants and compile options.
    """

    def __init__(
        self, function: Callable[..., Any], unspecialized: tuple[str, ...], *, overlaps: bool = False
    ) -> None:
        """`overlaps`: see `language.jit`."""
        names = list(unspecialized)
        super().__init__(function, do_not_specialize=names, do_not_specialize_on_alignment=names)
        self.overlaps = overlaps
        self.compiled_kernels: dict[tuple[Any, ...], Compiled] = {}
        self.num_direct_launches = 0
        parameters = triton_internals.parameters(self)
        self.hooks = triton_internals.pre_run_hooks(self)
        self._num_parameters = len(parameters)
        self._unspecialized = tuple(parameter.name in unspecialized for parameter in parameters)
        self._types: ArgumentTypes | None = None  # set by the first launch; later ones have the same types
        self._constants = [parameter.name for parameter in parameters if parameter.is_constexpr]
        self._constants_come_last = all(
            parameter.is_constexpr for parameter in parameters[len(parameters) - len(self._constants) :]
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            return self._launch(grid, args, constants)

        return launch

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        if (types := self._types) is None:
            types = self._types = ArgumentTypes.of(args, self._unspecialized)
        type_key = types.key(args)
        if type_key is None or len(grid) != 1 or self.hooks or has_launch_hooks():
            return self.launch_by_triton(grid, args, constants)
        device, stream = current_device_and_stream()
        values = tuple(constants.values())
        key = (device, type_key, tuple(constants), values, tuple(map(type, values)))
        found = self.compiled_kernels.get(key)
        if found is None:
            compiled = self.launch_by_triton(grid, args, constants)
            found = self.as_compiled(compiled, len(args), constants)
            if found is not None and len(self.compiled_kernels) < MAX_COMPILED:
                self.compiled_kernels[key] = found
            return compiled
        if _num_precompiling and _precompiling.get():
            return None  # its inputs may be outputs of kernels that were not run
        self.num_direct_launches += 1
        found.call(grid[0], 1, 1, stream, *found.leading, *args, *found.constants)
        return None

    def launch_by_triton(self, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any]) -> Any:
        """Launch on Triton's own path and return the compiled kernel. While precompiling, only compile."""
        if self.overlaps and _can_overlap():
            constants = {**constants, "launch_pdl": True}  # direct launches read it from the compiled kernel
        return launch_by_triton(self, grid, args, constants, compile_only=_precompiling.get())

    def bind(self, tensor_order: tuple[int, ...] | None, **constants: Any) -> BoundKernel:
        """The kernel with its constants and compile options; see `language.bind`."""
        return BoundKernel(self, constants, tensor_order)

    def types_of(self, args: tuple[Any, ...]) -> ArgumentTypes:
        return ArgumentTypes.of(args, self._unspecialized)

    def as_compiled(self, compiled: Any, num_args: int, constants: dict[str, Any]) -> Compiled | None:
        """Prepare direct launches of a compiled kernel; None if it is unfamiliar or lacks arguments."""
        has_all = num_args + len(self._constants) == self._num_parameters and self._constants_come_last
        if not has_all or not all(name in constants for name in self._constants):
            return None
        launcher = triton_internals.direct_launcher(compiled)
        if launcher is None:
            return None
        return Compiled(*launcher, tuple(constants[name] for name in self._constants))


@lru_cache(maxsize=1)
def _can_overlap() -> bool:
    """Whether the GPUs can launch a kernel before its predecessor has ended."""
    from penstock.kernels.language import CAN_WAIT

    has_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    return CAN_WAIT and has_gpu and torch.cuda.get_device_capability() >= (9, 0)


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc]
    """A Gluon kernel, whose source assigns work to warps and chooses register layouts."""


class _Compilers(ThreadPoolExecutor):
    """Threads that compile and load kernels. Loading a kernel takes as long as compiling it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, "penstock-compile", torch.cuda.set_device, (torch.cuda.current_device(),))

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = compiled(*args, **options)
            with suppress(Exception):  # its first launch raises the same error
                triton_internals.direct_launcher(kernel)
            return kernel

        return super().submit(compile_and_load)


@contextmanager
def precompile(threads: int) -> Iterator[None]:
    """A context in which launches of this thread only compile, on `threads` other threads.

    Outputs are not written. All kernels are compiled when the context ends.
    """
    with _Compilers(threads) as pool, triton_internals.compile_in(pool):
        token = _precompiling.set(True)
        _count_precompiling(1)
        try:
            yield
        finally:
            _count_precompiling(-1)
            _precompiling.reset(token)


def _count_precompiling(change: int) -> None:
    global _num_precompiling
    with _counting:
        _num_precompiling += change


def is_precompiling() -> bool:
    return _precompiling.get()


class BoundKernel:
    """A kernel with its constants, for launches that differ only in tensors and numbers; tensors come first.

    The caller makes one for each set of constants and keeps it. The launcher is passed addresses instead of
    tensors, because it would query the driver for each tensor.
    """

    def __init__(
        self, kernel: Kernel, constants: dict[str, Any], tensor_order: tuple[int, ...] | None
    ) -> None:
        self.kernel = kernel
        self.constants = constants
        self.compiled_kernels: dict[tuple[Any, ...], Compiled] = {}
        self._tensor_order = tensor_order
        self._reorder = None if tensor_order is None else _picker(tensor_order)
        self._num_tensors = 0  # leading arguments that are tensors; set by the first launch
        # Types of the arguments after the tensors; None before the first launch.
        self._number_types: tuple[type, ...] | None = None
        self._aligned: tuple[int, ...] = ()  # tensors for which Triton specializes on the alignment
        self._integers: tuple[int, ...] = ()

    def replay(self, programs: int, *args: Any) -> Callable[[], Any]:
        """See `language.replay`."""
        prepared: Callable[[], Any] | None = None

        def launch() -> Any:
            nonlocal prepared
            if prepared is not None and not _num_precompiling:
                return prepared()
            before = self.kernel.num_direct_launches
            found = self(programs, *args)
            if self.kernel.num_direct_launches > before:  # all checks passed, and would pass again
                prepared = self._prepare(programs, args)
            return found

        return launch

    def _prepare(self, programs: int, args: tuple[Any, ...]) -> Callable[[], Any]:
        """Return a callable that repeats the direct launch just made."""
        tensors = args[: self._num_tensors]
        device, stream = current_device_and_stream()
        found = self.compiled_kernels[device, (*map(_dtype, tensors),)]
        addresses = [*map(_address, tensors)]
        ordered = addresses if self._reorder is None else self._reorder(addresses)
        numbers = args[self._num_tensors :]
        return partial(
            found.call, programs, 1, 1, stream, *found.leading, *ordered, *numbers, *found.constants
        )

    def __call__(self, programs: int, *args: Any) -> Any:
        kernel, numbers = self.kernel, args[self._num_tensors :]
        if self._number_types != (*map(type, numbers),) or kernel.hooks or has_launch_hooks():
            return self._launch_unusual(programs, args)
        for i in self._integers:
            if not -_INT32 <= args[i] < _INT32:
                return self._launch_by_triton(programs, args)
        tensors = args[: self._num_tensors]
        try:
            addresses = [*map(_address, tensors)]
            dtypes = (*map(_dtype, tensors),)
        except (AttributeError, TypeError):  # a number where the first launch had a tensor
            return self._launch_by_triton(programs, args)
        for i in self._aligned:
            if addresses[i] & 15:
                return self._launch_by_triton(programs, args)
        device, stream = current_device_and_stream()
        found = self.compiled_kernels.get((device, dtypes))
        if found is None:
            compiled = self._launch_by_triton(programs, args)
            found = kernel.as_compiled(compiled, len(self._kernel_args(args)), self.constants)
            if found is not None:
                self.compiled_kernels[device, dtypes] = found
            return compiled
        if _num_precompiling and _precompiling.get():
            return None
        kernel.num_direct_launches += 1
        ordered = addresses if self._reorder is None else self._reorder(addresses)
        found.call(programs, 1, 1, stream, *found.leading, *ordered, *numbers, *found.constants)
        return None

    def _launch_unusual(self, programs: int, args: tuple[Any, ...]) -> Any:
        """Launch through Triton. The very first launch only records the argument types and tries again."""
        if self._number_types is not None:
            return self._launch_by_triton(programs, args)
        types = self.kernel.types_of(self._kernel_args(args))
        count = len(types.tensors)
        if types.has_others or types.absent or types.descriptors or types.tensors != tuple(range(count)):
            return self._launch_by_triton(programs, args)
        order = tuple(range(count)) if self._tensor_order is None else self._tensor_order
        self._num_tensors = max(order, default=-1) + 1
        self._integers = tuple(i - count + self._num_tensors for i in types.integers)
        self._aligned = tuple(sorted({order[i] for i in types.aligned}))
        self._number_types = tuple(map(type, args[self._num_tensors :]))
        return self(programs, *args)

    def _kernel_args(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments in the order of the kernel's parameters."""
        if self._tensor_order is None or self._reorder is None:
            return args
        return *self._reorder(args), *args[max(self._tensor_order) + 1 :]

    def _launch_by_triton(self, programs: int, args: tuple[Any, ...]) -> Any:
        return self.kernel.launch_by_triton((programs,), self._kernel_args(args), self.constants)


def _picker(indices: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that selects the values at these indices, as a tuple even for one index."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)
