"""CUDA graphs of steps, whatever is in them: how they are captured, and what happens where they cannot be.

A capture that fails costs the service nothing but its graph. One for which memory ran out is followed by a
time without others, and a step that runs out of it takes what all graphs hold.
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
Capture = Callable[[Work], tuple[Callable[[], None], list[Tensor]]]  # → (replay, what it writes to)
K = TypeVar("K", bound=Hashable)
G = TypeVar("G")

FAILURES = 3  # captures that fail before no more are tried
SCARCE_S = 60.0  # without captures after memory ran out


class CudaCapture:
    """Captures into one pool of memory, which all graphs share: they run one after another, and each copies
    its results out before the next begins."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.renew()

    def renew(self) -> None:
        """Another pool, for that of graphs which are all gone, or of a broken capture, is closed for good."""
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(self.device)

    def __call__(self, work: Work) -> tuple[Callable[[], None], list[Tensor]]:
        work()  # nothing may be compiled or set up during the capture
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        collects = gc.isenabled()
        gc.disable()  # what is freed meanwhile might ask the device for something
        try:
            with torch.cuda.stream(self.stream):
                # Not by torch.cuda.graph, which waits for the device and empties its cache first.
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    self._abandon(graph)
                    raise
                graph.capture_end()
        except BaseException:
            self.renew()  # a pool that a broken capture has left open is of no more use
            raise
        finally:
            if collects:
                gc.enable()
        return graph.replay, outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed. Where it cannot be ended the allocator still has to be told: as long as
        it believes in a capture it gives no cached memory back, and steps would run out of it."""
        try:
            graph.capture_end()
        except Exception:
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)


class Captures(Generic[K, G]):
    """Graphs by the steps that they serve."""

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
        self._not_before = 0.0  # captures

    @property
    def gave_up(self) -> bool:
        return self._failures >= FAILURES

    def _taken(self, key: K, make: Callable[[], G], steps: str) -> G | None:
        """The graph for these steps, captured now. None: it cannot be had."""
        began = self.clock()
        try:
            graph = make()
        except NotCapturable as error:
            self._failures = FAILURES
            log.info("%s run without graphs: %s", self.kind, error)
            return None
        except Exception as error:
            self.refused.add(key)
            self._failures += 1
            if out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # the tensors of half a capture
                self._make_room()
            log.warning("no graph for %s: %s: %s", steps, type(error).__name__, error)
            if self.gave_up:
                log.warning("no more graphs are tried after %d failures", FAILURES)
            return None
        self.captured[key] = graph
        took = self.clock() - began
        self.capture_s += took
        log.debug("captured %s in %.1f ms", key, took * 1000)
        return graph

    def drop(self) -> None:
        """Give back what all graphs hold: a step needs it more. Shapes that come again are captured again."""
        if self.captured:
            log.warning("%d graphs are given up: memory ran out", len(self.captured))
        self.captured.clear()
        if isinstance(self.capture, CudaCapture):
            self.capture.renew()
        self._make_room()

    def _make_room(self) -> None:
        self._not_before = self.clock() + SCARCE_S
        if self.staging.device.type == "cuda":
            torch.cuda.empty_cache()
