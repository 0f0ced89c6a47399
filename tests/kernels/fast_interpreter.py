"""Reduces the overhead of Triton's interpreter around the operations of a kernel.

The interpreter patches the language again for every call of a device function. It checks each integer sum and
product for overflow by repeating it in 64 bits, and computes the type and shape of each value again. Together
these took more than half of the time of an interpreted kernel.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

from tests.thinning import ALL_CASES

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_patched: set[str] = set()  # modules of the language that the current launch has patched
_np_dtypes: dict[str, Any] = {}  # name of an element type → NumPy dtype


def install() -> None:
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _np_dtype
    # Tensors of the tests are too small for an overflow. PENSTOCK_ALL_CASES=1 keeps the checks.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=ALL_CASES)
    interpreter.interpreter_builder.options = options
    tl.tuple.__init__ = _init_tuple
    tl.tuple.type = _TypeOnDemand()
    tl.block_type.__init__ = _init_block_type
    tl.tensor.__init__ = _init_tensor


class _LaunchScope(interpreter._LangPatchScope):  # type: ignore[misc]
    """Restores the language when the launch ends."""

    def __init__(self, scope: Any) -> None:
        self._changes = scope._changes

    def restore(self) -> None:
        super().restore()
        _patched.clear()


def _patch_lang_once(fn: Any) -> Any:
    """Patch only what the current launch has not patched yet: device functions use the same modules as their
    kernel."""
    found = {
        value.__name__
        for value in fn.__globals__.values()
        if inspect.ismodule(value) and (value is tl or value is tl.core)
    }
    if found <= _patched:
        return interpreter._LangPatchScope()
    _patched.update(found)
    return _LaunchScope(_patch_lang(fn))


def _np_dtype(kind: Any) -> Any:
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if element.name not in _np_dtypes:
        _np_dtypes[element.name] = _get_np_dtype(element)
    return _np_dtypes[element.name]


class _TypeOnDemand:
    def __get__(self, values: Any, owner: Any = None) -> Any:
        values.type = tl.core._type_for_tuple_values(values.values)
        return values.type


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = [*args]
    if type is not None:
        self.type = type if isinstance(type, tl.tuple_type) else tl.tuple_type(type)


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(tl.core._unwrap_shape(shape))
    self.element_ty = element_ty
    self.shape, self.numel, self.name = _describe_block(element_ty.name, sizes)


@cache
def _describe_block(element: str, sizes: tuple[int, ...]) -> tuple[Any, int, str]:
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape = tl.tuple(sizes)
    return shape, tl.core.validate_block_shape(shape), f"<{shape}, {element}>"


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _describe_tensor(tuple(type.shape.values) if type.is_block() else ())


@cache
def _describe_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
