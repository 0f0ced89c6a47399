"""Catches every conversion of a tensor to a Python number, and every copy that `Staging` does not make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runner.model_runner import ModelRunner
from penstock.runner.staging import Staging

ASKING = {"item", "tolist", "cpu", "numpy", "__array__", "__dlpack__", "__contains__", "is_nonzero", "equal"}
ASKING |= {"__bool__", "__int__", "__float__", "__index__", "__complex__", "allclose"}
SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
SENDING = {"tensor", "as_tensor", "from_numpy", "cuda"}  # integers must be sent with the plan, in one copy
MASKABLE = {"__getitem__", "__setitem__", "index_put", "index_put_"}
# The same below Python, where one operation may call another.
ATEN = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}


class Crossing(AssertionError):
    """A number was read from the device, or sent to it, between launch and collect."""


class Trap(TorchFunctionMode):
    def __init__(self) -> None:
        self.open = False
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        self.calls += 1
        if not self.open and _crosses(name, args, kwargs):
            raise Crossing(f"{name} between launch and collect")
        return func(*args, **kwargs)


class DeepTrap(TorchDispatchMode):
    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.trap = trap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_", "_index_put_impl_") and _has_mask(args[1])
        if not self.trap.open and (name in ATEN or masked):
            raise Crossing(f"aten {name} between launch and collect")
        return func(*args, **(kwargs or {}))


def _crosses(name: str, args: Any, kwargs: Any) -> bool:
    if name in ASKING | SIZED_BY_VALUES | SENDING:
        return True
    if name == "where":
        return len(args) + len(kwargs) == 1  # with only a condition it is the same as nonzero
    if name == "repeat_interleave":
        return len(args) > 1 and isinstance(args[1], Tensor) and kwargs.get("output_size") is None
    if name == "to":
        return "device" in kwargs or any(isinstance(arg, str | torch.device) for arg in args[1:])
    return name in MASKABLE and _has_mask(args[1])


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


@contextmanager
def trapped(patch: pytest.MonkeyPatch) -> Iterator[Trap]:
    """Trap all crossings in steps that run inside, on any thread. Only `Staging` may cross."""
    trap = Trap()
    step = ModelRunner._step

    def guarded_step(self: ModelRunner, plan: Any) -> Any:
        with trap, DeepTrap(trap):
            return step(self, plan)

    def opening(method: Any) -> Any:
        def call(self: Staging, *args: Any) -> Any:
            trap.open = True
            try:
                return method(self, *args)
            finally:
                trap.open = False

        return call

    with patch.context() as patched:
        patched.setattr(ModelRunner, "_step", guarded_step)
        patched.setattr(Staging, "send", opening(Staging.send))
        patched.setattr(Staging, "fetch", opening(Staging.fetch))
        yield trap
