"""The adapters that requests may choose: files on disk, copies in host memory, and slots on the device.

The least recently used adapter leaves its slot, or host memory, for another. Slots are written in stream
order, so a step that was launched before still reads the old contents.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.adapter_files import Marks, adapter_digest, file_marks
from penstock.checkpoint.adapters import LoraSpec, read_lora
from penstock.errors import BadValue, EngineError, NotPossible
from penstock.kernels.lora import rank_bucket
from penstock.layers.adapted_linear import SumOverRanks
from penstock.layers.lora import AdapterSites
from penstock.models.adapter_files import read_adapter
from penstock.runner.base import AdapterInfo, AdapterStats, check_adapters
from penstock.runner.cuda_device import use_device
from penstock.runner.inputs import AdapterPlan
from penstock.types import Ints
from penstock.weights.adapters import ModuleWeights

log = logging.getLogger("penstock.adapters")

_ALIGNMENT = 64  # bytes; alignment of each tensor in pinned memory


class HostAdapter(NamedTuple):
    """An adapter in host memory."""

    weights: ModuleWeights
    rank: int
    num_bytes: int
    copy: int = 0  # with several ranks: the number under which the others keep their parts


class _Files(NamedTuple):
    """The files of an adapter when it was loaded."""

    marks: Marks
    digest: str  # of their content

    def marks_of_same(self, spec: LoraSpec) -> Marks:
        """The current marks of the files. Raises if their content has changed; new copies are accepted."""
        if (marks := file_marks(spec.folder)) != self.marks and adapter_digest(spec.folder) != self.digest:
            raise _changed(spec)
        return marks


class AdapterPool:
    """Loads adapters, and assigns slots to the adapters of a step. `AdapterStore` describes its methods."""

    def __init__(
        self, sites: AdapterSites, max_on_host: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`max_on_host`: maximum number of loaded adapters in host memory; the checkpoint's own stay."""
        self.max_adapters = sites.num_slots
        self.in_use: Callable[[], Collection[int]] = tuple  # adapters of requests that have not finished
        # Called when layers have allocated memory for adapters, so that addresses in graphs are invalid.
        self.on_growth: Callable[[], None] = lambda: None
        self._max_on_host = max(max_on_host, self.max_adapters)
        self._dtype = dtype
        self._device = device
        self._lock = RLock()
        self._reader = ThreadPoolExecutor(
            1, thread_name_prefix="penstock-adapters", initializer=use_device, initargs=(device,)
        )
        self._specs: dict[int, LoraSpec] = {}  # of adapters that were loaded and not yet dropped
        self._files: dict[int, _Files] = {}  # their state when the adapters were loaded
        self._known: set[int] = set()  # adapters that requests may choose
        self._used_ids: set[int] = set(range(len(sites.own)))
        self._host: OrderedDict[int, HostAdapter] = OrderedDict()  # the least recently used first
        self._reading: dict[int, Future[HostAdapter]] = {}
        self._slots: OrderedDict[int, int] = OrderedDict()  # adapter → slot, the least recently used first
        self._ranks: dict[int, int] = {}  # slot → rank of its adapter
        self._num_host_loads = self._num_device_loads = 0
        self._sum_over_ranks: SumOverRanks | None = None  # None: this process computes the whole model
        self.attach(sites)

    def attach(self, sites: AdapterSites) -> None:
        """Use the layers of a model. No adapter is on the device yet."""
        self._sites: AdapterSites | None = sites
        self._slots.clear()
        self._free = list(range(sites.num_slots - 1, -1, -1))
        self._own = [host_adapter(weights, self._pins) for weights in sites.own]
        sites.own = []  # this pool holds them now
        if self._pins:
            with torch.inference_mode():
                for adapter in self._own:
                    sites.compile_kernels(adapter.weights, rank_bucket(adapter.rank))
        self._known.update(range(len(self._own)))

    def detach(self) -> None:
        """Release the model's layers."""
        self._sites = None
        self._own = []
        self._slots.clear()

    @property
    def _pins(self) -> bool:
        return self._device.type == "cuda"

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    # Load and unload.

    def load(self, adapter_id: int, folder: str, name: str) -> Future[AdapterInfo]:
        return self._reader.submit(self._load, adapter_id, folder, name)

    def _load(self, adapter_id: int, folder: str, name: str) -> AdapterInfo:
        if adapter_id in self._used_ids:
            raise BadValue(f"adapter id {adapter_id} was used before", param="adapter")
        self._used_ids.add(adapter_id)
        files = _Files(file_marks(folder), adapter_digest(folder))
        spec = read_lora(Path(folder), name)
        adapter = self._read(spec, files.marks)
        try:
            if self._pins and self._sites is not None:
                with torch.inference_mode():
                    self._sites.compile_kernels(adapter.weights, rank_bucket(adapter.rank))
        except BaseException:
            self._on_left_host(adapter)
            raise
        with self._lock:
            self._specs[adapter_id], self._files[adapter_id] = spec, files
            self._known.add(adapter_id)
            self._keep(adapter_id, adapter)
        log.info("adapter %s: rank %d on %s", name, spec.rank, ", ".join(spec.kinds))
        return AdapterInfo(spec.rank, spec.kinds, adapter.num_bytes)

    def unload(self, adapter_id: int) -> None:
        with self._lock:
            self._known.discard(adapter_id)
            self._drop_unused()

    def check(self, adapter_ids: Ints) -> None:
        check_adapters(adapter_ids, self._known, self.max_adapters)

    def prefetch(self, adapter_ids: Ints) -> list[Future[Any]]:
        reads: list[Future[Any]] = []
        with self._lock:
            for adapter_id in np.unique(adapter_ids).tolist():
                if adapter_id in self._specs and adapter_id not in self._slots:
                    reading = self._begin_reading(adapter_id)
                    reads += [] if reading is None else [reading]
        return reads

    def stats(self) -> AdapterStats:
        with self._lock:
            self._drop_unused()
            on_host = len(self._host) + len(self._own)
            counts = self._num_host_loads, self._num_device_loads
            return AdapterStats(len(self._known), on_host, len(self._slots), *counts)

    def _drop_unused(self) -> None:
        """Drop adapters that were unloaded and that no request uses any more."""
        unloaded = [each for each in self._specs if each not in self._known]
        if not unloaded:
            return
        for adapter_id in set(unloaded).difference(self.in_use()):
            del self._specs[adapter_id], self._files[adapter_id]
            if (adapter := self._host.pop(adapter_id, None)) is not None:
                self._on_left_host(adapter)
            if (slot := self._slots.pop(adapter_id, None)) is not None:
                self._free.append(slot)

    # Host memory.

    def _read(self, spec: LoraSpec, marks: Marks) -> HostAdapter:
        """Read an adapter whose files have these marks."""
        if (sites := self._sites) is None:
            raise NotPossible("the engine sleeps; wake it before an adapter is loaded")
        with torch.inference_mode():
            weights = read_adapter(spec, sites, self._dtype, self._sum_over_ranks)
            adapter = host_adapter(weights, self._pins)
        self._num_host_loads += 1
        return adapter

    def _keep(self, adapter_id: int, adapter: HostAdapter) -> None:
        self._host[adapter_id] = adapter
        self._host.move_to_end(adapter_id)
        for other in list(self._host):
            if len(self._host) <= self._max_on_host:
                break
            if other in self._known and other != adapter_id:  # an unloaded adapter may be gone from disk
                self._on_left_host(self._host.pop(other))

    def _on_left_host(self, adapter: HostAdapter) -> None:
        """Called when an adapter has left host memory. It may still be in a slot, or about to be written."""

    def _begin_reading(self, adapter_id: int) -> Future[HostAdapter] | None:
        """Start reading an adapter that has left host memory. None: it is still there."""
        if adapter_id in self._host:
            self._host.move_to_end(adapter_id)
            return None
        if (reading := self._reading.get(adapter_id)) is None:
            spec, files = self._specs[adapter_id], self._files[adapter_id]

            def read() -> HostAdapter:
                try:
                    marks = files.marks_of_same(spec)
                    adapter = self._read(spec, marks)
                    check_marks(spec, marks)
                    with self._lock:
                        self._keep(adapter_id, adapter)
                    return adapter
                finally:
                    with self._lock:  # the caller holds it until it has made the entry
                        self._reading.pop(adapter_id, None)

            reading = self._reading[adapter_id] = self._reader.submit(read)
        return reading

    def _on_host(self, adapter_id: int) -> HostAdapter:
        with self._lock:
            if adapter_id < len(self._own):
                return self._own[adapter_id]
            if adapter_id not in self._specs:
                raise EngineError(f"adapter {adapter_id} is not loaded")
            reading = self._begin_reading(adapter_id)
            if reading is None:
                return self._host[adapter_id]
        return reading.result()

    # The device.

    def plan(self, adapter_ids: Ints) -> AdapterPlan:
        """Assign slots to the adapters of a step's rows. Adapters that are not on the device are copied
        there, after the steps that were launched before."""
        ids = np.unique(adapter_ids)
        wanted = ids[ids >= 0].tolist()
        if len(wanted) > self.max_adapters or self._sites is None:
            raise EngineError(f"a step has {len(wanted)} adapters; there is room for {self.max_adapters}")
        slots = np.full(len(ids), -1, dtype=np.int32)
        adapters = [self._on_host(each) for each in wanted if each not in self._slots]
        with self._lock:
            waiting = iter(adapters)
            for adapter_id in wanted:
                if adapter_id in self._slots:
                    self._slots.move_to_end(adapter_id)
            for at, adapter_id in enumerate(wanted, len(ids) - len(wanted)):
                if adapter_id not in self._slots:
                    self._take_slot(self._sites, adapter_id, next(waiting), wanted)
                slots[at] = self._slots[adapter_id]
        rank = max(self._ranks[slot] for slot in slots.tolist() if slot >= 0)
        return AdapterPlan(self._sites.state, rank_bucket(rank), slots[np.searchsorted(ids, adapter_ids)])

    def _take_slot(
        self, sites: AdapterSites, adapter_id: int, adapter: HostAdapter, wanted: Collection[int]
    ) -> None:
        if not self._free:
            oldest = next(other for other in self._slots if other not in wanted)
            self._free.append(self._slots.pop(oldest))
        slot = self._free.pop()
        try:
            grew = sites.write(slot, adapter.weights)
        except BaseException:
            self._free.append(slot)
            raise
        self._slots[adapter_id] = slot
        self._ranks[slot] = adapter.rank
        self._on_written(slot, adapter)
        self._num_device_loads += 1
        if grew:
            self.on_growth()

    def _on_written(self, slot: int, adapter: HostAdapter) -> None:
        """Called when an adapter has been written to a slot."""


def check_marks(spec: LoraSpec, marks: Marks) -> None:
    """Refuse files that have changed since they had these marks."""
    if file_marks(spec.folder) != marks:
        raise _changed(spec)


def _changed(spec: LoraSpec) -> EngineError:
    return EngineError(f"the files of adapter {spec.name!r} are not those that were loaded; load it again")


def host_adapter(weights: ModuleWeights, pins: bool) -> HostAdapter:
    """An adapter in host memory. `pins`: copy it into one pinned buffer, for fast copies to a GPU."""
    tensors = [tensor for each in weights.values() for tensor in each if tensor is not None]
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    rank = max((each.rank for each in weights.values()), default=0)
    if not pins:
        return HostAdapter(weights, rank, sum(sizes))
    memory, offset = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True), 0
    moved: list[Tensor] = []
    for tensor, size in zip(tensors, sizes, strict=True):
        place = memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved.append(place.copy_(tensor))
        offset += size
    pinned = iter(moved)
    found: ModuleWeights = {
        name: type(each)(*(None if tensor is None else next(pinned) for tensor in each))
        for name, each in weights.items()
    }
    return HostAdapter(found, rank, sum(sizes))
