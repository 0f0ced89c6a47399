"""Launches of a kernel that was compiled before, without Triton's own way there.

For each launch Triton binds and inspects all arguments anew, which costs the host more than the rest of a
small kernel's launch. What decides which compiled form serves is little and known here; where anything
is out of the ordinary, Triton launches as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial, reduce
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import AsyncCompileMode, knobs
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_INT32 = 1 << 31
MOST = 1024  # compiled forms that a kernel remembers
_precompiling = False  # kernels are compiled and not run


class Form(NamedTuple):
    """A compiled kernel, ready to be launched with other arguments of the same kinds."""

    run: Callable[..., Any]
    before: tuple[Any, ...]  # what it is given between the stream and the kernel's own arguments
    constants: tuple[Any, ...]  # in the order of the signature, which ends with them


_address = Tensor.data_ptr
_dtype = attrgetter("dtype")


class Reads(NamedTuple):
    """Which of a kernel's arguments are what, so that each is looked at once and without a loop in Python."""

    tensors: tuple[int, ...]
    absent: tuple[int, ...]  # None, which is compiled in
    aligned: tuple[int, ...]  # those whose address counts
    described: tuple[int, ...]  # tensors that the copy engine reads or writes in pieces
    floats: tuple[int, ...]
    integers: tuple[int, ...]  # that are loose
    others: bool  # there are arguments that only Triton knows how to take
    total: int

    @staticmethod
    def of(args: tuple[Any, ...], loose: tuple[bool, ...]) -> Reads:
        places = range(len(args))
        tensors = tuple(i for i in places if isinstance(args[i], Tensor))
        floats = tuple(i for i in places if type(args[i]) is float)
        integers = tuple(i for i in places if type(args[i]) is int and loose[i])
        aligned = tuple(i for i in tensors if not loose[i])
        absent = tuple(i for i in places if args[i] is None)
        described = tuple(i for i in places if isinstance(args[i], TensorDescriptor))
        known = len(tensors) + len(absent) + len(described) + len(floats) + len(integers)
        others = known < len(args)
        return Reads(tensors, absent, aligned, described, floats, integers, others, len(args))

    def kinds(self, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What a compiled form depends on. None: that is for Triton to say, as where a tensor begins at an
        odd address, or a number might be compiled in."""
        if self.others or len(args) != self.total:
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
            kinds = tuple(map(_dtype, [args[i] for i in self.tensors]))
            if not self.described:
                return kinds
            pieces = [args[i] for i in self.described]
            return *kinds, *((piece.base.dtype, *piece.block_shape, piece.layout) for piece in pieces)
        except (AttributeError, TypeError):  # a number where a tensor was
            return None


def _straight(run: Callable[..., Any], function: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Without what Triton does around each launch for kernels that need memory of their own: whom to call,
    and what comes behind the stream."""
    launch = getattr(run, "launch", None)
    sizes = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    flags = [getattr(run, name, None) for name in ("launch_cooperative_grid", "launch_pdl")]
    if launch is None or sizes != [0, 0] or None in flags:
        return run, (function,)
    return launch, (function, *flags, None, None)


class Kernel(JITFunction):  # type: ignore[misc]
    """A `JITFunction` that remembers its compiled forms by the kinds of their arguments.

    Positional arguments are tensors and numbers, keywords are constants and options.
    """

    def __init__(self, function: Callable[..., Any], loose: tuple[str, ...]) -> None:
        super().__init__(function, do_not_specialize=list(loose), do_not_specialize_on_alignment=list(loose))
        self.forms: dict[tuple[Any, ...], Form] = {}
        self.quick = 0  # launches that took the short way
        self._loose = tuple(name in loose for name in self.arg_names)
        self._reads: Reads | None = None  # of the first launch, as all others are
        self._constants = [parameter.name for parameter in self.params if parameter.is_constexpr]
        places = [parameter.num for parameter in self.params if parameter.is_constexpr]
        self._last = places == list(range(len(self.params) - len(places), len(self.params)))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            return self._launch(grid, args, constants)

        return launch

    def run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        return super().run(*args, grid=grid, warmup=warmup or _precompiling, **constants)

    def _launch(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        if (reads := self._reads) is None:
            reads = self._reads = Reads.of(args, self._loose)
        kinds = reads.kinds(args)
        if kinds is None or len(grid) != 1 or self.pre_run_hooks or _watched(knobs.runtime):
            return self.run(*args, grid=grid, warmup=False, **constants)
        device, stream = _where()
        values = tuple(constants.values())
        key = (device, kinds, tuple(constants), values, tuple(map(type, values)))
        form = self.forms.get(key)
        if form is None:
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            form = self.form_of(compiled, len(args), constants)
            if form is not None and len(self.forms) < MOST:
                self.forms[key] = form
            return compiled
        self.quick += 1
        form.run(grid[0], 1, 1, stream, *form.before, *args, *form.constants)
        return None

    def bind(self, places: tuple[int, ...] | None, **constants: Any) -> Bound:
        """The kernel with its constants and options; see `language.bind`."""
        return Bound(self, constants, places)

    def reads(self, args: tuple[Any, ...]) -> Reads:
        return Reads.of(args, self._loose)

    def form_of(self, compiled: Any, given: int, constants: dict[str, Any]) -> Form | None:
        """How to launch this again. None: its make is not known, or not all of its arguments were given."""
        run, function, metadata = (
            getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")
        )
        complete = given + len(self._constants) == len(self.params) and self._last
        complete = complete and all(name in constants for name in self._constants)
        if not complete or run is None or function is None or metadata is None:
            return None
        call, before = _straight(run, function)
        values = tuple(constants[name] for name in self._constants)
        return Form(call, (*before, metadata, None, None, None), values)


class OwnKernel(Kernel, GluonJITFunction):  # type: ignore[misc]
    """One that says itself which warps do what and how tensors lie in them."""


class _Compilers(ThreadPoolExecutor):
    """Threads that make a kernel ready for its first launch: that it is loaded and can be called from here
    takes as long as compiling it."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads, "penstock-compile", torch.cuda.set_device, (torch.cuda.current_device(),))

    def submit(self, compiled: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def ready() -> Any:
            kernel = compiled(*args, **options)
            with suppress(Exception):  # its first launch will say so itself
                _ = kernel.run
            return kernel

        return super().submit(ready)


@contextmanager
def precompile(threads: int) -> Iterator[None]:
    """Kernels that are launched in here are compiled side by side, and none is run: what they would have
    written is left as it was found. On leaving, all are there."""
    global _precompiling
    with _Compilers(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
        _precompiling = True
        try:
            yield
        finally:
            _precompiling = False


def is_precompiling() -> bool:
    return _precompiling


class Bound:
    """A kernel with its constants, for launches that differ in tensors and numbers alone; made once for each
    set of constants and kept by whoever launches. Tensors come first.

    The launcher is handed addresses: it asks the driver about every tensor otherwise.
    """

    def __init__(self, kernel: Kernel, constants: dict[str, Any], places: tuple[int, ...] | None) -> None:
        self.kernel = kernel
        self.constants = constants
        self.forms: dict[tuple[Any, ...], Form] = {}
        self._places = places
        self._spread = None if places is None else _picked(places)
        self._tensors = 0  # leading arguments, once a launch has shown them
        self._types: tuple[type, ...] | None = None  # of the numbers behind; None: nothing has been launched
        self._aligned: tuple[int, ...] = ()  # tensors whose address counts
        self._integers: tuple[int, ...] = ()

    def replay(self, programs: int, *args: Any) -> Callable[[], Any]:
        """See `language.replay`."""
        made: Callable[[], Any] | None = None

        def launch() -> Any:
            nonlocal made
            if made is not None:
                return made()
            before = self.kernel.quick
            found = self(programs, *args)
            if self.kernel.quick > before:  # all was as it should be, and will be the next time
                made = self._as_launched(programs, args)
            return found

        return launch

    def _as_launched(self, programs: int, args: tuple[Any, ...]) -> Callable[[], Any]:
        """The launch that was just made the short way, once more."""
        tensors = args[: self._tensors]
        device, stream = _where()
        form = self.forms[device, (*map(_dtype, tensors),)]
        addresses = [*map(_address, tensors)]
        where = addresses if self._spread is None else self._spread(addresses)
        numbers = args[self._tensors :]
        return partial(form.run, programs, 1, 1, stream, *form.before, *where, *numbers, *form.constants)

    def __call__(self, programs: int, *args: Any) -> Any:
        kernel, numbers = self.kernel, args[self._tensors :]
        if self._types != (*map(type, numbers),) or kernel.pre_run_hooks or _watched(knobs.runtime):
            return self._otherwise(programs, args)
        for i in self._integers:
            if not -_INT32 <= args[i] < _INT32:
                return self._by_triton(programs, args)
        tensors = args[: self._tensors]
        try:
            addresses = [*map(_address, tensors)]
            dtypes = (*map(_dtype, tensors),)
        except (AttributeError, TypeError):  # a number where a tensor was
            return self._by_triton(programs, args)
        for i in self._aligned:
            if addresses[i] & 15:
                return self._by_triton(programs, args)
        device, stream = _where()
        form = self.forms.get((device, dtypes))
        if form is None:
            compiled = self._by_triton(programs, args)
            form = kernel.form_of(compiled, len(self._all(args)), self.constants)
            if form is not None:
                self.forms[device, dtypes] = form
            return compiled
        kernel.quick += 1
        where = addresses if self._spread is None else self._spread(addresses)
        form.run(programs, 1, 1, stream, *form.before, *where, *numbers, *form.constants)
        return None

    def _otherwise(self, programs: int, args: tuple[Any, ...]) -> Any:
        """By Triton, but for the first launch of all, which shows what is what."""
        if self._types is not None:
            return self._by_triton(programs, args)
        reads = self.kernel.reads(self._all(args))
        count = len(reads.tensors)
        if reads.others or reads.absent or reads.described or reads.tensors != tuple(range(count)):
            return self._by_triton(programs, args)
        places = tuple(range(count)) if self._places is None else self._places
        self._tensors = max(places, default=-1) + 1
        self._integers = tuple(i - count + self._tensors for i in reads.integers)
        self._aligned = tuple(sorted({places[i] for i in reads.aligned}))
        self._types = tuple(map(type, args[self._tensors :]))
        return self(programs, *args)

    def _all(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's own arguments."""
        if self._places is None or self._spread is None:
            return args
        return *self._spread(args), *args[max(self._places) + 1 :]

    def _by_triton(self, programs: int, args: tuple[Any, ...]) -> Any:
        return self.kernel.run(*self._all(args), grid=(programs,), warmup=False, **self.constants)


def _picked(places: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What stands at these places, as a tuple whatever their number."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)


def _watched(runtime: Any) -> bool:
    """Whether somebody, as a profiler, wants to hear of every launch."""
    first, last = runtime.launch_enter_hook, runtime.launch_exit_hook
    if first is not None and getattr(first, "calls", True):
        return True
    return last is not None and bool(getattr(last, "calls", True))


def _where() -> tuple[int, int]:
    """The device that kernels go to, and its stream."""
    global _ask
    if _ask is None:
        active = driver.active
        device_of = getattr(torch._C, "_cuda_getDevice", active.get_current_device)
        _ask = device_of, active.get_current_stream
    device = _ask[0]()
    return device, _ask[1](device)


_ask: tuple[Callable[[], int], Callable[[int], int]] | None = None
