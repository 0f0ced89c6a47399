"""The ranks of a model as torch connects them: NCCL between GPUs, Gloo between processes on a CPU.

The group belongs to one engine. It uses no process-wide state of torch.distributed, so that a process may
have several engines.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import EngineError

STEP_TIMEOUT_S = 600.0  # of one sum; a rank may compile kernels before it joins
_LOOPBACK = "127.0.0.1"  # all ranks are on one machine


class RankGroup:
    """A `layers.parallel.Group`. Layers are given it before the ranks are connected."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._backend: Any = None
        self._store: Any = None

    def connect(self, file: str) -> None:
        """Meet the other ranks by way of a file; returns when all of them have come."""
        self._store = dist.FileStore(file, self.size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self._backend = self._nccl()
        else:
            self._backend = self._gloo()
        met = torch.ones(1, device=self.device)
        self.all_reduce(met)
        if int(met.item()) != self.size:
            raise EngineError(f"{int(met.item())} of {self.size} ranks have met")

    def all_reduce(self, x: Tensor) -> None:
        self._backend.allreduce([x]).wait()

    def broadcast(self, x: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([x], options).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._backend.gather([parts] if parts else [], [x], options).wait()
        return parts

    def close(self) -> None:
        """Leave the other ranks. Where a rank is gone, sums that wait for it end."""
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None:
            with contextlib.suppress(Exception):
                backend.abort() if self.device.type == "cuda" else backend.shutdown()

    def _gloo(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        return dist.ProcessGroupGloo(self._store, self.rank, self.size, options)

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
        return dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
