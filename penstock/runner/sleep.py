"""Frees a model's memory on its device and restores it.

Level 1 on CUDA frees the storages of all tensors in place and keeps the weights in pinned host memory. Every
tensor, view and tied weight stays the same object. Only CUDA graphs hold addresses, so they are captured
again. Level 1 on a CPU keeps the weights and frees the KV cache. Level 2 drops the model, and reads it again
from its files. Cached keys, values and vectors are lost at every level.
"""

from __future__ import annotations

import gc
import logging
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from penstock.errors import DeviceOutOfMemory, EngineError, ModelLoadError
from penstock.layers.attention import forget_masks
from penstock.runner.base import MakeRoom
from penstock.runner.cpu_memory import available_memory_bytes, malloc_trim, process_bytes
from penstock.runner.faults import typed_faults
from penstock.runner.model_runner import ModelRunner

log = logging.getLogger("penstock.sleep")

_ALIGNMENT = 512  # bytes; alignment of each storage in host memory
_MODEL_FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".model", ".txt")


class ContentsLost(EngineError):
    """The contents restored from host memory are not those that were moved there."""


class _Moved(NamedTuple):
    """A storage whose device memory is freed."""

    storage: UntypedStorage
    size: int
    offset: int | None  # of its contents in host memory; None: they are not kept


class HostMemory:
    """Memory of exactly this size, pinned for fast copies. If it cannot be pinned, copies are slower."""

    def __init__(self, size: int) -> None:
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        if torch.cuda.is_available():
            self._pin(memory)

    def _pin(self, memory: mmap.mmap) -> None:
        address = self.bytes.data_ptr()
        try:
            _check_cuda(torch.cuda.cudart().cudaHostRegister(address, self.size, 0))
        except RuntimeError as error:
            log.warning("the weights in host memory are not pinned, so waking is slower: %s", error)
            return
        # Unpin before the memory returns to the system, whoever drops it. Otherwise the driver would copy to
        # and from the old pages if other memory gets the same addresses later.
        weakref.finalize(self, _unpin, address, memory).atexit = False


def _unpin(address: int, memory: mmap.mmap) -> None:
    """Unpin memory. The reference `memory` keeps it mapped until then."""
    _check_cuda(torch.cuda.cudart().cudaHostUnregister(address))


def _check_cuda(status: Any) -> None:
    """Raise if a call to the CUDA runtime returned an error."""
    if int(status):
        with suppress(RuntimeError):  # clear the error, or the next kernel would report it
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"CUDA error {int(status)}")


class StorageMover:
    """Moves the storages of tensors to host memory and back, in place: the tensors stay the same objects."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: HostMemory | None = None  # kept from the first move on
        self._moved: list[_Moved] = []
        self._checksums = torch.empty(0)

    def move_out(self, roots: list[object], caches: list[object]) -> None:
        """Free the device memory of every tensor reachable from `roots`. The contents of tensors reachable
        from `caches` are lost. If it raises, nothing has changed."""
        moved, host_bytes = self._plan(roots, caches)
        host = self._host_memory(host_bytes)
        checksums = self._sum_up(moved)
        for storage, size, offset in moved:
            if offset is not None:
                host.bytes[offset : offset + size].copy_(_as_bytes(storage, self.device), non_blocking=True)
        _synchronize(self.device)  # before anything is freed
        self._moved, self._checksums = moved, checksums
        self._free_storages()

    def move_back(self) -> None:
        """Take the memory again. Raises `ContentsLost` if the weights have changed. If it raises, the memory
        is free again."""
        try:
            for storage, size, offset in self._moved:
                storage.resize_(size)
                flat = _as_bytes(storage, self.device)
                if offset is None:
                    flat.zero_()
                elif self._host is not None:
                    flat.copy_(self._host.bytes[offset : offset + size], non_blocking=True)
            _synchronize(self.device)
            self._check_restored()
        except BaseException:
            self._free_storages()
            raise
        self._moved = []

    def close(self) -> None:
        """Drop the moved contents and the host memory."""
        self._moved, self._host = [], None

    def _plan(self, roots: list[object], caches: list[object]) -> tuple[list[_Moved], int]:
        """All storages, each with its offset in host memory, and the size of that memory."""
        lost = {storage._cdata for storage in storages_of(caches, self.device)}
        moved, host_bytes = [], 0
        for storage in storages_of(roots, self.device):
            if not storage.resizable():
                raise EngineError("a tensor of the model has memory that cannot be freed; use level 2")
            size, is_lost = storage.nbytes(), storage._cdata in lost
            moved.append(_Moved(storage, size, None if is_lost else host_bytes))
            host_bytes += 0 if is_lost else -(-size // _ALIGNMENT) * _ALIGNMENT
        return moved, host_bytes

    def _host_memory(self, size: int) -> HostMemory:
        if self._host is not None and self._host.size >= size:
            return self._host
        self._host = None
        if size > (available := available_memory_bytes()):
            raise EngineError(
                f"level 1 keeps {size / 2**30:,.1f} GiB of weights in host memory, of which "
                f"{available / 2**30:,.1f} GiB are available; use level 2"
            )
        self._host = HostMemory(max(size, 1))
        return self._host

    def _check_restored(self) -> None:
        """Raise `ContentsLost` unless the weights were restored exactly."""
        sizes_differ = any(storage.nbytes() != size for storage, size, _ in self._moved)
        if sizes_differ or not torch.equal(self._sum_up(self._moved), self._checksums):
            raise ContentsLost("the weights have changed while they were in host memory")

    def _sum_up(self, moved: list[_Moved]) -> Tensor:
        """A checksum for the contents of each storage that is kept, int64 on the host."""
        sums = []
        for storage, size, offset in moved:
            if offset is not None:
                flat = _as_bytes(storage, self.device)
                sums.append((flat if size % 8 else flat.view(torch.int64)).sum(dtype=torch.int64))
        return torch.stack(sums).cpu() if sums else torch.empty(0)

    def _free_storages(self) -> None:
        for storage, _, _ in self._moved:
            storage.resize_(0)


class ModelSleeper:
    """Puts a `ModelRunner` to sleep and wakes it, together with the runner of its draft model."""

    def __init__(
        self,
        runner: ModelRunner,
        folder: Path,
        install: Callable[[], None],
        *,
        draft: ModelRunner | None = None,
        draft_folder: Path | None = None,
    ) -> None:
        """`install` builds the models from the files in their folders and installs them in the runners."""
        self.runner = runner
        self._runners = [runner] if draft is None else [runner, draft]
        self.device = runner.device
        self.default_level = 1 if self.device.type == "cuda" else 2
        folders = [folder] if draft_folder is None else [folder, draft_folder]
        self._files = {each: _fingerprints(each) for each in folders}
        self._install = install
        self._mover = StorageMover(self.device)
        self._is_uninstalled = False
        self.num_bytes = self._count_bytes()
        self.free_bytes = available_memory_bytes if self.device.type != "cuda" else self._free_device_bytes

    def sleep(self, level: int) -> int:
        with self._on_device():
            before = self._used_bytes()
            forget_masks()
            if level == 2:
                self._uninstall()
            elif self.device.type == "cuda":
                self._forget_graphs()
                self._mover.move_out(self._roots(), self._caches())
            else:
                for runner in self._runners:
                    if runner.cache is not None:
                        runner.cache.store.clear()
            self._return_free_memory()
            return max(0, before - self._used_bytes())

    def wake(self, make_room: MakeRoom) -> None:
        make_room(self.num_bytes)
        try:
            self._restore()
        except DeviceOutOfMemory as error:
            log.warning("no memory to wake: %s; trying once more", error.message)
            make_room(self.num_bytes + self.free_bytes())  # the memory that is free now was not usable
            self._restore()

    def _restore(self) -> None:
        with self._on_device():
            try:
                if not self._is_uninstalled:
                    self._move_back()
                if self._is_uninstalled:
                    self._check_files()
                    self._install()
                    self._is_uninstalled = False
                    _freeze_again()
            except BaseException:
                self._return_free_memory()
                raise

    def _move_back(self) -> None:
        try:
            self._mover.move_back()
        except ContentsLost as error:
            log.error("%s; they are read from the model's files", error.message)
            self._uninstall()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with typed_faults(self.device), torch.inference_mode():
            if self.device.type != "cuda":
                yield
                return
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                yield

    def _uninstall(self) -> None:
        self._mover.close()
        if self._is_uninstalled:
            return
        tensors = [weakref.ref(tensor) for tensor in tensors_of(self._roots())]
        for runner in self._runners:
            runner.uninstall()
        self._is_uninstalled = True
        if any(tensor() is not None for tensor in tensors):
            _collect_cycles()

    def _check_files(self) -> None:
        """Refuse files that have changed since the model was loaded and described."""
        for folder, files in self._files.items():
            found = _fingerprints(folder)
            for name, known in files.items():
                if name not in found:
                    raise ModelLoadError(
                        f"{name} of {folder.name} is gone, so the model cannot be read again"
                    )
                if found[name] != known:
                    raise ModelLoadError(
                        f"{name} of {folder.name} has changed since the model was loaded; unload and "
                        "load the model, or restart the server, to serve the new files"
                    )

    def _forget_graphs(self) -> None:
        for runner in self._runners:
            for graphs in (runner.graphs, runner.decode, runner.mixed):
                if graphs is not None:
                    graphs.forget()

    def _roots(self) -> list[object]:
        """The objects that hold all tensors that live longer than a step."""
        roots: list[object] = []
        for runner in self._runners:
            roots += [runner.model, runner.pooler, runner.cache, runner.generator, runner.images]
            if runner.graphs is not None:
                roots += (runner.graphs.integers, runner.graphs.row_numbers)
            roots += [graphs.integers for graphs in (runner.decode, runner.mixed) if graphs is not None]
        return roots

    def _caches(self) -> list[object]:
        """The roots whose contents are not kept."""
        scorer = self.runner.pooler.scorer
        images = self.runner.images
        return [
            *(runner.cache for runner in self._runners),
            None if scorer is None else scorer.store,
            None if images is None else images.store,
        ]

    def _count_bytes(self) -> int:
        if self.device.type == "cuda":
            return sum(storage.nbytes() for storage in storages_of(self._roots(), self.device))
        cached = {id(tensor) for tensor in tensors_of(self._caches())}  # their pages are allocated on use
        counted: dict[Any, int] = {}
        for tensor in tensors_of(self._roots()):
            if id(tensor) in cached:
                continue
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                counted[storage._cdata] = storage.nbytes()
            else:  # packed by the matrix library
                counted[id(tensor)] = tensor.numel() * tensor.element_size()
        return sum(counted.values())

    def _free_device_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def _used_bytes(self) -> int:
        return torch.cuda.memory_reserved() if self.device.type == "cuda" else process_bytes()

    def _return_free_memory(self) -> None:
        if self.device.type != "cuda":
            malloc_trim()()
            return
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect_cycles() -> None:
    """Free objects that only reference cycles keep alive, including frozen ones, which collections skip."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()


def _freeze_again() -> None:
    """Freeze the new model like the old one, so that later collections skip it. Cycles that loading has left
    are collected first: once frozen they would stay, and some of them map the model's files."""
    if gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _fingerprints(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file that a model may be read from, by path in the folder."""
    files = (path for path in folder.rglob("*") if path.suffix in _MODEL_FILES and path.is_file())
    stats = ((path, path.stat()) for path in files)
    return {str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) for path, stat in stats}


def _as_bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def storages_of(roots: list[object], device: torch.device) -> list[UntypedStorage]:
    """The storages on `device`, each once, of all tensors reachable from `roots`."""
    found: dict[Any, UntypedStorage] = {}
    for tensor in tensors_of(roots):
        if tensor.device.type == device.type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage._cdata, storage)
    return list(found.values())


def tensors_of(roots: list[object]) -> Iterator[Tensor]:
    """All tensors reachable from `roots` without following Python modules, classes and loggers."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _NOT_FOLLOWED):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, FunctionType):  # without its globals, which belong to its module
            waiting += (item.__closure__, item.__defaults__, item.__kwdefaults__)
        else:
            waiting += gc.get_referents(item)


_NOT_FOLLOWED = (ModuleType, type, logging.Logger, str, bytes, int, float)
