"""The adapters of a tensor-parallel model: each rank has its part of every adapter.

Rank 0 decides which adapters are in host memory and in which slots; the other ranks follow. They read an
adapter when rank 0 does (`adapter_orders`). They write it to a slot, or drop it, when the plan of a step
orders it, so all ranks do both in the same order.
"""

from __future__ import annotations

import itertools
import logging
import socket
from threading import Lock

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.adapter_files import Marks
from penstock.checkpoint.adapters import LoraSpec
from penstock.errors import PenstockError
from penstock.kernels.lora import rank_bucket
from penstock.layers.lora import AdapterSites
from penstock.models.adapter_files import read_adapter
from penstock.runner.adapters import AdapterPool, HostAdapter, check_marks, host_adapter
from penstock.runner.cuda_device import use_device
from penstock.runner.parallel.adapter_orders import (
    AdapterOrder,
    Addend,
    CancelRead,
    CannotRead,
    HasRead,
    OtherReaders,
    ReadAdapter,
    Total,
    from_bytes,
    to_bytes,
)
from penstock.runner.parallel.plans import SlotOrders
from penstock.runner.parallel.processes import receive_message, send_message
from penstock.types import Ints

log = logging.getLogger("penstock.adapters")


class ParallelAdapterPool(AdapterPool):
    """The adapters of rank 0. It also collects the orders for the other ranks."""

    def __init__(
        self,
        sites: AdapterSites,
        max_on_host: int,
        dtype: torch.dtype,
        device: torch.device,
        others: OtherReaders,
    ) -> None:
        super().__init__(sites, max_on_host, dtype, device)
        self._others = others
        self._sum_over_ranks = others.sum
        self._copies = itertools.count()
        # Orders for the other ranks, sent with the next step.
        self._writes: list[tuple[int, int]] = []  # copy and slot
        self._drops: list[int] = []  # copies

    def _read(self, spec: LoraSpec, marks: Marks) -> HostAdapter:
        copy = next(self._copies)
        with self._others.reading(copy, spec, marks):
            adapter = super()._read(spec, marks)
        return adapter._replace(copy=copy)

    def _on_left_host(self, adapter: HostAdapter) -> None:
        with self._lock:
            self._drops.append(adapter.copy)

    def _on_written(self, slot: int, adapter: HostAdapter) -> None:
        self._writes.append((adapter.copy, slot))

    def take_orders(self) -> SlotOrders | None:
        """The orders that other ranks carry out before the next step. Called on the thread of `plan`."""
        if not self._writes and not self._drops:
            return None
        with self._lock:
            writes, self._writes = self._writes, []
            drops, self._drops = self._drops, []
        return SlotOrders(_ints(writes), _ints(drops))

    def close(self) -> None:
        self._others.close()
        super().close()


def _ints(numbers: list[int] | list[tuple[int, int]]) -> Ints:
    return np.array(numbers, dtype=np.int32).reshape(-1)


class _Cancelled(Exception):
    """Rank 0 has cancelled the read."""


class RankAdapters:
    """The adapter parts of another rank. One thread reads them; the thread of steps writes them to slots."""

    def __init__(
        self,
        sites: AdapterSites,
        dtype: torch.dtype,
        device: torch.device,
        connection: socket.socket,
        step_lock: Lock,
    ) -> None:
        """`step_lock` is held while a step runs."""
        self.sites = sites
        self._dtype = dtype
        self._device = device
        self._connection = connection
        self._step_lock = step_lock
        self._copies: dict[int, HostAdapter] = {}

    def apply(self, orders: SlotOrders) -> None:
        """Carry out the orders of a plan. Called on the thread of steps."""
        for copy, slot in orders.writes.reshape(-1, 2).tolist():
            self.sites.write(slot, self._copies[copy].weights)
        for copy in orders.drops.tolist():
            del self._copies[copy]

    def follow(self) -> None:
        """Carry out the orders of rank 0 until it is gone."""
        use_device(self._device)
        while (order := self._next_order()) is not None:
            if isinstance(order, CancelRead):
                self._copies.pop(order.copy, None)
            elif isinstance(order, ReadAdapter):
                try:
                    send_message(self._connection, self._answer(order))
                except OSError:
                    return

    def _next_order(self) -> AdapterOrder | None:
        try:
            content = receive_message(self._connection)
        except OSError:
            return None
        if content is None:
            return None
        order: AdapterOrder = msgspec.json.decode(content, type=ReadAdapter | Total | CancelRead)
        return order

    def _answer(self, order: ReadAdapter) -> HasRead | CannotRead:
        try:
            self._copies[order.copy] = self._read(order)
            return HasRead()
        except PenstockError as error:
            return CannotRead(type(error).__name__, error.message, error.param)
        except _Cancelled:
            return CannotRead("EngineError", "the read was cancelled")
        except Exception as error:
            log.exception("an adapter cannot be read")
            return CannotRead("EngineError", f"{type(error).__name__}: {error}")

    def _read(self, order: ReadAdapter) -> HostAdapter:
        spec, pins = order.spec, self._device.type == "cuda"
        check_marks(spec, order.marks)
        with torch.inference_mode():
            weights = read_adapter(spec, self.sites, self._dtype, self._sum)
            check_marks(spec, order.marks)
            adapter = host_adapter(weights, pins)
            if pins:
                self.sites.compile_kernels(adapter.weights, rank_bucket(adapter.rank))
            # Reserve memory now: the slot is written during a step of all ranks, where this must not fail.
            with self._step_lock:
                self.sites.reserve(adapter.weights)
        return adapter

    def _sum(self, values: Tensor) -> Tensor:
        send_message(self._connection, Addend(to_bytes(values)))
        if not isinstance(order := self._next_order(), Total):
            raise _Cancelled
        return from_bytes(order.values)
