"""CUDA graphs of the simulated device: they repeat the captured operations on the same memory, without the
Python code around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.simulated_gpu.tensors import capture

POOL = (0, 1)


class SimulatedGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._steps: list[Callable[[], None]] = []
        self._own: set[int] = set()  # storages that the graph owns, allocated during the capture

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture.graph is not None:
            raise RuntimeError("CUDA error: the stream is capturing already")
        capture.graph = self

    def capture_end(self) -> None:
        capture.graph = None

    def replay(self) -> None:
        if capture.graph is not None:
            raise RuntimeError("CUDA error: a graph cannot be launched while a stream is capturing")
        for step in self._steps:
            step()

    def reset(self) -> None:
        self._steps.clear()

    def pool(self) -> tuple[int, int]:
        return POOL

    def keep(self, x: Tensor) -> Tensor:
        """Let the graph own this tensor."""
        self._own.add(_storage(x))
        return x

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, results: Any) -> None:
        """Record an operation. On replay, its results are written to the same memory as in the capture."""
        made = _tensors(results)
        given = {_storage(x) for x in _tensors((args, kwargs))}
        new = [_storage(x) not in given for x in made]
        if not any(new) and not _changes_operands(func):
            return  # a view
        self._own.update(_storage(x) for x, is_new in zip(made, new, strict=True) if is_new)
        held, targets = self._held((args, kwargs)), self._held(made)

        def repeat() -> None:
            args, kwargs = _resolved(held)
            again = _tensors(func(*args, **kwargs))
            for target, x, is_new in zip(_resolved(targets), again, new, strict=True):
                if is_new:
                    target.copy_(x)

        self._steps.append(repeat)

    def add_launch(self, launch: Callable[..., None], args: Any, kwargs: Any) -> None:
        """Record the launch of a kernel."""
        held = self._held((args, kwargs))

        def repeat() -> None:
            args, kwargs = _resolved(held)
            launch(*args, **kwargs)

        self._steps.append(repeat)

    def _held(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda x: _Memory(x, _storage(x) in self._own), tree)


class _Memory:
    """A tensor that a graph reads or writes. As in CUDA, a graph has only the address of memory that was
    allocated before its capture, and does not keep it alive."""

    def __init__(self, x: Tensor, keeps: bool) -> None:
        self._kept = x if keeps else None
        self._storage = StorageWeakRef(x.untyped_storage())
        self._layout = (x.storage_offset(), tuple(x.size()), tuple(x.stride()))
        self._dtype = x.dtype

    def tensor(self) -> Tensor:
        if self._kept is not None:
            return self._kept
        if self._storage.expired():
            raise RuntimeError("CUDA error: a graph uses memory that was freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


def _resolved(tree: Any) -> Any:
    return tree_map_only(_Memory, _Memory.tensor, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _changes_operands(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
