"""Fixes for bugs of Triton's interpreter that affect our kernels.

For example, it keeps bfloat16 values as 16-bit integers, and computes with them as if they were integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_Builder = interpreter.InterpreterBuilder
_patch_lang_tensor = interpreter._patch_lang_tensor
_convert_float = interpreter._convert_float
_cast, _binary, _ternary, _unary = (
    _Builder.cast_impl,
    _Builder.binary_op,
    _Builder.ternary_op,
    _Builder.unary_op,
)
_FROM_FP8 = {"fp32": torch.float32, "fp16": torch.float16}
_fma, _dot = _Builder.create_fma, _Builder.create_dot


def install() -> None:
    interpreter._patch_lang_tensor = _patch_bounds_of_loops
    interpreter._convert_float = _convert_as_torch_does
    _Builder.cast_impl = _cast_through_float32
    _Builder.binary_op, _Builder.ternary_op, _Builder.unary_op = _binary_op, _ternary_op, _unary_op
    _Builder.create_fma, _Builder.create_dot = _create_fma, _create_dot


def _patch_bounds_of_loops(tensor: Any, scope: Any) -> None:
    """The interpreter converts a loaded loop bound to int in a way that NumPy 2.4 no longer allows."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert_as_torch_does(values: Any, source: Any, target: Any, mode: Any) -> Any:
    """The interpreter loses the carry out of a mantissa, and reads fp8's NaN as 480. Hardware and torch round
    to nearest."""
    if str(source) == "fp8e4nv" and str(target) in _FROM_FP8:
        bits = torch.from_numpy(np.asarray(values, np.uint8).copy())
        found: NDArray[Any] = bits.view(torch.float8_e4m3fn).to(_FROM_FP8[str(target)]).numpy()
        return found.view(np.uint32 if found.itemsize == 4 else np.uint16)
    if str(source) == "fp32" and str(target) == "fp8e4nv":
        return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if str(source) == "fp32" and str(target) == "bf16":
        return _narrow(values)
    if str(source) == "bf16" and str(target) == "fp32":
        return _wide(values)
    return _convert_float(values, source, target, mode)


def _narrow(values: NDArray[Any]) -> NDArray[np.uint16]:
    rounded = torch.from_numpy(np.asarray(values, np.float32).copy()).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy()


def _wide(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16) and handle.data.dtype == np.uint16


def _widened(handle: Any) -> Any:
    return interpreter.TensorHandle(_wide(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrowed(handle: Any) -> Any:
    """Convert the fp32 result of an operation on bfloat16 back. The result of a comparison stays as it is."""
    if handle.data.dtype != np.float32:
        return interpreter.TensorHandle(handle.data, tl.bfloat16)
    return interpreter.TensorHandle(_narrow(handle.data), tl.bfloat16)


def _cast_through_float32(self: Any, src: Any, dst_type: Any) -> Any:
    if _is_bf16(src) and dst_type.scalar != tl.bfloat16:
        src = _widened(src)
        return src if dst_type.scalar == tl.float32 else _cast(self, src, dst_type)
    if dst_type.scalar == tl.bfloat16 and not _is_bf16(src):
        return interpreter.TensorHandle(_narrow(src.data.astype(np.float32)), tl.bfloat16)
    return _cast(self, src, dst_type)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if not _is_bf16(lhs):
        return _binary(self, lhs, rhs, op)
    return _narrowed(_binary(self, _widened(lhs), _widened(rhs), op))


def _ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
    if op is np.where or not _is_bf16(other):  # a selection does no arithmetic
        return _ternary(self, lhs, rhs, other, op)
    return _narrowed(_ternary(self, _widened(lhs), _widened(rhs), _widened(other), op))


def _unary_op(self: Any, arg: Any, op: Any) -> Any:
    return _narrowed(_unary(self, _widened(arg), op)) if _is_bf16(arg) else _unary(self, arg, op)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if not _is_bf16(z):
        return _fma(self, x, y, z)
    return _narrowed(_fma(self, _widened(x), _widened(y), _widened(z)))


def _create_dot(self: Any, a: Any, b: Any, d: Any, *more: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), d, *more)
