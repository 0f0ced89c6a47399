"""Communication between the ranks of a model: NCCL between GPUs, Gloo between processes on a CPU.

NCCL refuses ranks that share a GPU. These use Gloo and exchange tensors through host memory, which is slow
and only for tests. The group belongs to one engine. It uses no process-wide state of torch.distributed, so
that a process may have several engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from penstock.errors import EngineError

CONNECT_TIMEOUT_S = 60.0  # until all ranks are connected
STEP_TIMEOUT_S = 600.0  # of one collective; a rank may compile kernels before it joins
_LOOPBACK = "127.0.0.1"  # all ranks are on one machine


class RankGroup:
    """A `layers.parallel.Group`. It is passed to layers before the ranks are connected."""

    def __init__(self, rank: int, size: int, device: torch.device, *, uses_nccl: bool) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.uses_nccl = uses_nccl
        self._backend: Any = None
        self._store: Any = None

    def connect(self, file: str) -> None:
        """Connect to the other ranks through a shared file. Returns when all of them are connected."""
        self._store = FileStore(file, self.size)
        self._store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        self._backend = self._nccl() if self.uses_nccl else self._gloo()
        met = torch.ones(1, device=self.device)
        self.all_reduce(met)
        if int(met.item()) != self.size:
            raise EngineError(f"{int(met.item())} of {self.size} ranks have met")
        self._store.set_timeout(timedelta(seconds=1))  # nothing waits for the store any more

    def all_reduce(self, x: Tensor) -> None:
        with self._exchangeable(x) as near:
            self._backend.allreduce([near]).wait()

    def broadcast(self, x: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with self._exchangeable(x) as near:
            self._backend.broadcast([near], options).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        if self.uses_nccl:  # NCCL's gather sends single messages, which is slower than an all-gather
            found = x.new_empty((self.size, *x.shape))
            self._backend._allgather_base(found, x).wait()
            return list(found.unbind()) if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with self._exchangeable(x) as near:
            parts = [torch.empty_like(near) for _ in range(self.size)] if self.rank == 0 else []
            self._backend.gather([parts] if parts else [], [near], options).wait()
        return [part.to(x.device) for part in parts]

    @contextlib.contextmanager
    def _exchangeable(self, x: Tensor) -> Iterator[Tensor]:
        """`x`, or a copy in host memory if the backend needs one. Changes to the copy are copied back."""
        if self.uses_nccl or not x.is_cuda:
            yield x
            return
        near = x.cpu()
        yield near
        x.copy_(near)

    def close(self) -> None:
        """Disconnect from the other ranks. Collectives that wait for a lost rank end. The store's file has to
        be open until then: NCCL looks at it every second, and waits for it if it is gone."""
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None:
            with contextlib.suppress(Exception):
                backend.abort() if self.uses_nccl else backend.shutdown()

    def _gloo(self) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
        options._devices = [gloo.create_device(hostname=_LOOPBACK)]
        return gloo(self._store, self.rank, self.size, options)

    def _nccl(self) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
        return dist.ProcessGroupNCCL(self._store, self.rank, self.size, options)
