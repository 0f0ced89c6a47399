"""Tensors that report a CUDA device. Their values are in host memory, and operations run on the host.

As on a device, operands in host memory are refused, and the host waits where it needs a value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.simulated_gpu.library import ON_HOST

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
# Operations whose result is a number on the host, or has a size that depends on values.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
WAITING |= {"equal", "is_nonzero", "item", "bincount"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
CHANGES_OF_SHAPE = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_"}


class _Capture(threading.local):
    graph: Any = None  # the `SimulatedGraph` that records this thread's operations


capture = _Capture()
_forbids_waits = False  # for all threads, as in CUDA


def forbid_waits(forbidden: bool) -> None:
    global _forbids_waits
    _forbids_waits = forbidden


def wait(what: str) -> None:
    """Called where the host would wait for the device. Raises if waiting is not allowed now."""
    if capture.graph is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    if _forbids_waits:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")


class DeviceTensor(Tensor):
    """A tensor on the simulated device."""

    host: Tensor  # its values

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (replacement := _METHODS.get(func)) is not None:
            return replacement(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Creates tensors on the simulated device where a CUDA device is requested. Each thread needs it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the host and place its results on the device that PyTorch would use."""
    name = func.overloadpacket.__name__
    if name in ("pin_memory", "_pin_memory"):
        return args[0].clone()
    if name == "to":
        names = [argument.name for argument in func._schema.arguments]
        return _convert(**(dict(zip(names, args, strict=False)) | kwargs))
    if _is_composite(func):  # in inference mode, PyTorch dispatches it before it decomposes it
        with OnDevice():
            return func.decompose(*args, **kwargs)
    device = kwargs.get("device")
    names_device = device is not None and torch.device(device).type == "cuda"
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if not given and not names_device:
        return func(*args, **kwargs)
    if name in CHANGES_OF_SHAPE:
        raise NotImplementedError(f"the simulated device has no {name}")
    _check_operands(func, name, args, kwargs)
    if device is None:  # results are on the device of the first operand
        is_on_device = func is not aten.copy_.default or isinstance(args[0], DeviceTensor)
    else:
        is_on_device, kwargs = names_device, kwargs | {"device": "cpu"}
    args, kwargs = tree_map_only(Tensor, _operand, (args, kwargs))
    results = _run_on_host(ON_HOST.get(func.name(), func), args, kwargs)
    known = {id(x.host): x for x in given}  # operands that may also be results

    def placed(x: Tensor) -> Tensor:
        if id(x) in known:
            return known[id(x)]
        return DeviceTensor(x) if is_on_device else x

    return tree_map_only(Tensor, placed, results)


def _run_on_host(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    results = func(*args, **kwargs)
    if capture.graph is not None:
        capture.graph.add(func, args, kwargs, results)
    return results


def _operand(x: Tensor) -> Tensor:
    """The host tensor with an operand's values. A scalar from the host becomes part of the launch."""
    if isinstance(x, DeviceTensor):
        return x.host
    if x.dim() == 0 and capture.graph is not None:
        return capture.graph.keep(x.clone())
    return x


def _on_host(tree: Any) -> Any:
    return tree_map_only(DeviceTensor, lambda x: x.host, tree)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _check_operands(func: Any, name: str, args: Any, kwargs: Any) -> None:
    strangers = [x for x in tree_leaves((args, kwargs)) if _is_stranger(x)]
    if func in (aten.copy_.default, aten._to_copy.default):
        leaves = (
            isinstance(args[0], DeviceTensor) and torch.device(kwargs.get("device") or DEVICE).type == "cpu"
        )
        non_blocking = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        if (strangers or leaves) and not non_blocking:
            wait("a copy between host and device")
        return
    if name in WAITING:
        wait(name)
    if name in INDEXING:
        _check_indices(args[0], args[1])
        strangers = [x for x in strangers if not any(x is index for index in args[1])]
    if any(x.dim() > 0 for x in strangers):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({name})"
        )


def _is_stranger(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, DeviceTensor)


def _check_indices(x: Tensor, indices: Any) -> None:
    for index in indices:
        if isinstance(index, Tensor) and _is_stranger(x):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            wait("an index of booleans")
        if _is_stranger(index) or isinstance(index, list):  # PyTorch copies it to the device
            wait("an index from host memory")


# The following functions replace PyTorch's. Without CUDA, PyTorch's versions look for the device before they
# dispatch an operation.

_torch_tensor, _tensor_to = torch.tensor, Tensor.to


class _Recorded(TorchDispatchMode):
    """Records operations on the host tensors in the current capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_on_host(func, args, kwargs or {})


def _get_item(x: Any, index: Any) -> Tensor:
    _check_indices(x, index if isinstance(index, tuple) else (index,))
    with _Recorded():
        return DeviceTensor(x.host[_on_host(index)])


def _set_item(x: Any, index: Any, value: Any) -> None:
    _check_indices(x, index if isinstance(index, tuple) else (index,))
    if _is_stranger(value) and value.dim():
        wait("values from host memory")
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=x.dtype, device=DEVICE)
    with _Recorded():
        x.host[_on_host(index)] = value.host if isinstance(value, DeviceTensor) else value.clone()


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copied: Tensor = dispatch(aten.copy_.default, (x, source, non_blocking), {})
    return copied


def _contiguous(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    if x.is_contiguous(memory_format=memory_format):
        return x
    copied: Tensor = aten.clone(x, memory_format=memory_format)
    return copied


def _new_tensor(x: Tensor, data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    return make_tensor(data, dtype=dtype or x.dtype, device=device or x.device)


def _read(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that returns a value to the host, and therefore waits."""

    def read(x: Any) -> Any:
        wait(method.__name__)
        return method(x.host)

    return read


def make_tensor(data: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Tensor:
    """Replaces `torch.tensor`."""
    if isinstance(data, DeviceTensor):
        return move(data, device or data.device, dtype or data.dtype, copy=True)
    if device is None or torch.device(device).type != "cuda":
        return _torch_tensor(data, dtype=dtype, device=device, **more)
    return move(_torch_tensor(data, dtype=dtype), device)


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Replaces `torch.as_tensor`."""
    if isinstance(data, Tensor):
        return move(data, device or data.device, dtype or data.dtype)
    return make_tensor(data, dtype=dtype, device=device)


def move(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces `Tensor.to`."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    copies = kwargs.pop("copy", False)
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    if (device or x.device).type != "cuda" and _is_stranger(x):
        return _tensor_to(x, *args, copy=copies, **kwargs)
    return _convert(x, device=device, dtype=dtype, non_blocking=non_blocking, copy=copies)


def _convert(
    self: Tensor,
    *,
    device: Any = None,
    dtype: Any = None,
    other: Tensor | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    **_: Any,
) -> Tensor:
    if other is not None:
        device, dtype = other.device, other.dtype
    dtype, device = dtype or self.dtype, torch.device(device or self.device)
    if dtype == self.dtype and device.type == self.device.type and not copy:
        return self
    wanted = {"dtype": dtype, "device": device, "non_blocking": non_blocking}
    converted: Tensor = dispatch(aten._to_copy.default, (self,), wanted)
    return converted


_READING = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__)
_METHODS: dict[Any, Callable[..., Any]] = {method: _read(method) for method in _READING} | {
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
    Tensor.__invert__: aten.bitwise_not,
    Tensor.contiguous: _contiguous,
    Tensor.copy_: _copy,
    Tensor.data_ptr: lambda x: x.host.data_ptr(),
    Tensor.is_pinned: lambda x, *_: False,
    Tensor.new_tensor: _new_tensor,
    Tensor.nonzero: aten.nonzero,
    Tensor.untyped_storage: lambda x: x.host.untyped_storage(),
}
