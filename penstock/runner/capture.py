"""Capture of CUDA graphs of any kind, and handling of failed captures.

After a failed capture only its graph is missing. If a capture runs out of memory, no other is tried for a
while. If a step runs out of memory, all graphs are dropped.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.runner.buckets import NotCapturable
from penstock.runner.faults import out_of_memory
from penstock.runner.staging import Staging

log = logging.getLogger("penstock.graphs")
Work = Callable[[], list[Tensor]]
Capture = Callable[[Work], tuple[Callable[[], None], list[Tensor]]]  # → (replay, the tensors it writes to)
K = TypeVar("K", bound=Hashable)
G = TypeVar("G")

MAX_FAILURES = 3  # failed captures after which no more are tried
OOM_PAUSE_S = 60.0  # pause before the next capture after memory ran out


class CudaCapture:
    """Captures into one memory pool that all graphs share: they run one after another, and each copies its
    results out before the next begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.renew_pool()

    def renew_pool(self) -> None:
        """Use a new pool. A pool is unusable after a broken capture, or when all its graphs are freed."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)

    def __call__(self, work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        work()  # nothing may be compiled or set up during the capture
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        collects = gc.isenabled()
        gc.disable()  # freeing an object could call the device during the capture
        try:
            with torch.cuda.stream(self.stream):
                # Not `torch.cuda.graph`, which would wait for the device and empty its cache first.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    self._abandon(graph)
                    raise
                graph.capture_end()
        except BaseException:
            self.renew_pool()  # a broken capture leaves its pool open and unusable
            raise
        finally:
            if collects:
                gc.enable()
        return graph.replay, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture. If that fails, at least tell the allocator: while it assumes a capture, it
        frees no cached memory, and steps would run out of memory."""
        try:
            graph.capture_end()
        except Exception:
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)


class Captures(Generic[K, G]):
    """Captured graphs, by the key of the steps that they replay."""

    kind = "steps"  # for the log

    def __init__(
        self,
        staging: Staging,
        capture: Capture | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.staging = staging
        self.capture = CudaCapture(staging.device) if capture is None else capture
        self.clock = clock
        self.captured: dict[K, G] = {}
        self.refused: set[K] = set()
        self.replays = 0
        self.capture_s = 0.0
        self._failures = 0
        self._not_before = 0.0  # when the next capture may start

    @property
    def gave_up(self) -> bool:
        return self._failures >= MAX_FAILURES

    def _try_capture(self, key: K, make: Callable[[], G], steps: str) -> G | None:
        """Capture a graph now. None: the capture failed."""
        began = self.clock()
        try:
            graph = make()
        except NotCapturable as error:
            self._failures = MAX_FAILURES
            log.info("%s run without graphs: %s", self.kind, error)
            return None
        except Exception as error:
            self.refused.add(key)
            self._failures += 1
            if out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # the frames hold the tensors of the capture
                self._pause_captures()
            log.warning("no graph for %s: %s: %s", steps, type(error).__name__, error)
            if self.gave_up:
                log.warning("%d captures failed; no more graphs are tried", MAX_FAILURES)
            return None
        self.captured[key] = graph
        elapsed = self.clock() - began
        self.capture_s += elapsed
        log.debug("captured %s in %.1f ms", key, elapsed * 1000)
        return graph

    def drop(self) -> None:
        """Free the memory of all graphs after a step ran out of memory. Shapes that occur again are captured
        again."""
        if self.captured:
            log.warning("memory ran out: %d graphs are dropped", len(self.captured))
        self._forget()
        self._pause_captures()

    def forget(self) -> None:
        """Drop all graphs, because the tensors that they read will have other addresses. New graphs may be
        captured at once."""
        self._forget()

    def _forget(self) -> None:
        self.captured.clear()
        self._not_before = 0.0
        if isinstance(self.capture, CudaCapture):
            self.capture.renew_pool()

    def forget_where(self, is_stale: Callable[[K], bool]) -> None:
        """Drop some graphs, because tensors that they read have other addresses now."""
        for key in [key for key in self.captured if is_stale(key)]:
            del self.captured[key]

    def _pause_captures(self) -> None:
        self._not_before = self.clock() + OOM_PAUSE_S
        if self.staging.device.type == "cuda":
            torch.cuda.empty_cache()
