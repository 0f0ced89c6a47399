"""Small steps as CUDA graphs: one copy in, one replay, one copy out, whatever the model is made of.

Launching a step's kernels one by one costs the host more than a small step costs the device. A graph is
captured for a bucket when steps of its shape come again and were found to wait for the host; until then,
and wherever a graph cannot be had, steps run as they always do.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core import Array, PoolingParams, SamplePlan, StepPlan, Task, Variant
from penstock.kvcache.store import KVStore
from penstock.layers.batch import Batch, Memory, Paged, read_in_place
from penstock.models.registry import Model
from penstock.pooling.build import Pooler
from penstock.pooling.heads import leave
from penstock.pooling.methods import CARRIED
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import (
    Bucket,
    Layout,
    NoGroups,
    NotCapturable,
    bucket_of,
    largest_size,
    memory_of,
)
from penstock.runner.faults import out_of_memory
from penstock.runner.staging import Staging

log = logging.getLogger("penstock.graphs")
Work = Callable[[], list[Tensor]]
Capture = Callable[[Work], tuple[Callable[[], None], list[Tensor]]]  # → (replay, what it writes to)

USES = 2  # of a shape, before it is captured
MOST = 256  # graphs
MOST_BYTES = 1 << 30  # of what they write to; all else they share
FAILURES = 3  # captures that fail before no more are tried
_REST = 4.0  # a capture is followed by so many times its own duration without another
SCARCE_S = 60.0  # without captures after memory ran out
_WORTH = 1.5  # a step that keeps the device busy for so many times the host's work gains nothing


class Key(NamedTuple):
    """Steps that one graph serves. `params` is the finish inside the graph; None: it ends with the model."""

    bucket: Bucket
    types: bool
    skip: bool
    params: PoolingParams | None
    memory: int | None = None  # remembered keys that it has room for; None: rows are not cut
    generates: bool = False  # it runs prompts, and ends with the model


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    layout: Layout
    batch: Batch  # of the bucket, on the buffer that steps are copied to
    replay: Callable[[], None]
    outputs: list[Tensor]  # [rows or tokens of the bucket, …]: the results and their flags, or hidden states
    packed: Tensor | None = None  # uint8: the bytes of the outputs; None where they are hidden states
    row_bytes: int = 0  # of the results


@dataclass(slots=True)
class _Seen:
    uses: int = 0
    host_s: float = float("inf")
    device_s: float = float("inf")

    @property
    def pays(self) -> bool:
        return self.host_s < float("inf") and self.device_s < _WORTH * self.host_s


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


class Graphs:
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        staging: Staging,
        capture: Capture | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cache: tuple[KVStore, Tensor] | None = None,
    ) -> None:
        self.model = model
        self.pooler = pooler
        self.staging = staging
        self.cache = cache
        self._sums = pooler.carries or any(head.method in CARRIED for head in pooler.heads.values())
        self.capture = CudaCapture(staging.device) if capture is None else capture
        self.clock = clock
        self.integers = torch.zeros(largest_size(), dtype=torch.int32, device=staging.device)
        self.captured: dict[Key, Graph] = {}
        self.refused: set[Key] = set()
        self.replays = 0
        self.capture_s = 0.0
        self.held_bytes = 0
        self._seen: dict[Key, _Seen] = {}
        self._failures = 0
        self._not_before = 0.0
        self._at_once = False

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Before there is any load: shapes are captured on their first use."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    @property
    def full(self) -> bool:
        return len(self.captured) >= MOST or self.held_bytes >= MOST_BYTES

    def key_of(self, plan: StepPlan) -> Key | None:
        """None: such a step is never replayed."""
        if plan.limits is not None or plan.adapters is not None:
            return None
        if plan.sample is not None and not self._runs_prompts(plan, plan.sample):
            return None
        bucket = bucket_of(plan.num_tokens, plan.num_rows, plan.max_length)
        if bucket is None:
            return None
        if plan.sample is not None and plan.kv is not None:
            memory = memory_of(len(plan.kv.read_slots))
            return None if memory is None else Key(bucket, False, False, None, memory, True)
        types, skip = plan.type_ids is not None, plan.skip is not None
        inside, memory = self._inside(plan.variants), None
        if plan.kv is not None:
            memory = memory_of(len(plan.kv.read_slots)) if self._pages() else None
            if memory is None:
                return None
            if inside is not None and not inside.per_token:
                inside = None  # rows that end may be few among those that go on
        return Key(bucket, types, skip, inside, memory)

    def _runs_prompts(self, plan: StepPlan, sample: SamplePlan) -> bool:
        """Whether a step runs parts of prompts and nothing else; their tokens are all here."""
        paged = None if plan.kv is None else plan.kv.paged
        alone = paged is not None and not paged.rows and not len(sample.fed_tokens)
        return alone and self.cache is not None and read_in_place(self.cache[0])

    def _pages(self) -> bool:
        """Whether steps with memory can be replayed: what is gathered has no fixed size, and sums that go on
        over steps would not survive that a step runs twice when it is captured."""
        return self.cache is not None and read_in_place(self.cache[0]) and not self._sums

    def _inside(self, variants: tuple[Variant, ...]) -> PoolingParams | None:
        """What can be finished inside: one result for all rows, of which there are few kinds."""
        if len(variants) != 1:
            return None
        variant, params = variants[0], variants[0].params
        if variant.index is not None or variant.pairs is not None:
            return None
        if params.dimensions is not None or params.top_k is not None:
            return None
        return None if params.task is Task.SPARSE and self.pooler.splade is not None else params

    def place(self, key: Key, plan: StepPlan) -> Graph | None:
        """The graph for a step, with the step's integers on their way to it. None: run it without."""
        graph = self.captured.get(key)
        if graph is None and not self._due(key):
            return None
        layout = Layout(key.bucket, key.types, key.skip, key.memory) if graph is None else graph.layout
        pinned = self.staging.slot(layout.size)
        layout.write(pinned.numpy(), plan)
        self.integers[: layout.size].copy_(pinned, non_blocking=True)
        if graph is None:
            graph = self._capture(key, layout)
        return graph

    def results(self, graph: Graph, plan: StepPlan) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Replay a placed step: host arrays of its output, and of its flags if it has any."""
        self.replays += 1
        graph.replay()
        count = plan.num_tokens if plan.variants[0].params.per_token else plan.num_rows
        values, *flags = graph.outputs
        assert graph.packed is not None
        size = graph.row_bytes
        if not flags:
            flat = self.staging.fetch_bytes(graph.packed[: count * size])
            return (flat.view(values.dtype).view(count, *values.shape[1:]).numpy(),), ()
        flat = self.staging.fetch_bytes(graph.packed)
        stop = len(values) * size
        array = flat[: count * size].view(values.dtype).view(count, *values.shape[1:]).numpy()
        return (array,), (flat[stop : stop + count].numpy(),)

    def hidden(self, graph: Graph, plan: StepPlan) -> tuple[Tensor, Batch]:
        """Replay a placed step: its hidden states and its own part of the batch, until the next replay."""
        self.replays += 1
        graph.replay()
        tokens, rows, padded = plan.num_tokens, plan.num_rows, graph.batch
        memory = padded.memory
        batch = Batch(
            token_ids=padded.token_ids[:tokens],
            positions=padded.positions[:tokens],
            type_ids=None if padded.type_ids is None else padded.type_ids[:tokens],
            cu_lengths=padded.cu_lengths[: rows + 1],
            lengths=padded.lengths[:rows],
            skip=None if padded.skip is None else padded.skip[:rows],
            groups=plan.groups,
            max_length=plan.max_length,
            num_tokens=tokens,
            num_rows=rows,
            memory=None if memory is None else replace(memory, cu_keys=memory.cu_keys[: rows + 1]),
        )
        return graph.outputs[0][:tokens], batch

    def observe(self, key: Key, host_s: float, device_s: float) -> None:
        """What a step of this shape took without a graph; the first, with all that is lazy, took longer."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.host_s, seen.device_s = min(seen.host_s, host_s), min(seen.device_s, device_s)

    def _due(self, key: Key) -> bool:
        if key in self.refused or self._failures >= FAILURES or self.full:
            return False
        seen = self._seen.setdefault(key, _Seen())
        seen.uses += 1
        if self._at_once:
            return True
        return seen.uses > USES and seen.pays and self.clock() >= self._not_before

    def _capture(self, key: Key, layout: Layout) -> Graph | None:
        began = self.clock()
        try:
            graph = self._captured(key, layout)
        except NotCapturable as error:
            self._failures = FAILURES
            log.info("steps run without graphs: %s", error)
            return None
        except Exception as error:
            self.refused.add(key)
            self._failures += 1
            if out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # the tensors of half a capture
                self._make_room()
            log.warning(
                "no graph for steps of %d tokens in %d rows: %s: %s",
                *key.bucket[:2],
                type(error).__name__,
                error,
            )
            if self._failures == FAILURES:
                log.warning("no more graphs are tried after %d failures", FAILURES)
            return None
        self.captured[key] = graph
        took = self.clock() - began
        self.capture_s += took
        self._not_before = began + took * (1 + _REST)
        log.debug("captured %s in %.1f ms", key, took * 1000)
        self.held_bytes += sum(output.nbytes for output in graph.outputs)
        if self.full:
            log.info("%d graphs are captured; steps of further shapes run without", len(self.captured))
        return graph

    def drop(self) -> None:
        """Give back what all graphs hold: a step needs it more. Shapes that come again are captured again."""
        if self.captured:
            log.warning("%d graphs are given up: memory ran out", len(self.captured))
        self.captured.clear()
        self.held_bytes = 0
        if isinstance(self.capture, CudaCapture):
            self.capture.renew()
        self._make_room()

    def _make_room(self) -> None:
        self._not_before = self.clock() + SCARCE_S
        if self.staging.device.type == "cuda":
            torch.cuda.empty_cache()

    def _captured(self, key: Key, layout: Layout) -> Graph:
        batch, params = _batch(layout, self.integers, self.cache), key.params
        if key.generates and batch.memory is not None:
            batch = replace(batch, generates=True, memory=_of_prompts(batch.memory))
        variants = () if params is None else (Variant(params, None),)

        def work() -> list[Tensor]:
            hidden = self.model(batch)
            if params is None:
                return [hidden]
            values, flags = leave(self.pooler(hidden, batch, variants, [None]), variants)
            outputs = [value.contiguous() for value in values] + flags
            raw = [output.view(-1).view(torch.uint8) for output in outputs]
            return [*outputs, raw[0] if len(raw) == 1 else torch.cat(raw)]

        replay, outputs = self.capture(work)
        if params is None:
            return Graph(layout, batch, replay, outputs)
        row_bytes = outputs[0][0].numel() * outputs[0].itemsize
        return Graph(layout, batch, replay, outputs[:-1], outputs[-1], row_bytes)


def _batch(layout: Layout, integers: Tensor, cache: tuple[KVStore, Tensor] | None) -> Batch:
    """The whole bucket: what the host decides by is its shape, not that of any step."""
    views = {name: integers[begin : begin + room] for name, (begin, room) in layout.places.items()}
    tokens, rows, longest = layout.bucket
    return Batch(
        token_ids=views["token_ids"],
        positions=views["positions"],
        type_ids=views.get("type_ids"),
        cu_lengths=views["cu_lengths"],
        lengths=views["lengths"],
        skip=views.get("skip"),
        groups=NoGroups(),
        max_length=longest,
        num_tokens=tokens,
        num_rows=rows,
        memory=_memory(layout, views, cache),
    )


def _of_prompts(memory: Memory) -> Memory:
    """The same for a step in which no row reads block by block."""
    nothing = memory.read_slots[:0]
    return replace(memory, paged=Paged(0, nothing.view(0, 0), nothing, BLOCK_SIZE))


def _memory(layout: Layout, views: dict[str, Tensor], cache: tuple[KVStore, Tensor] | None) -> Memory | None:
    """What attention reads by slots; nothing is gathered, and no sums go on."""
    if layout.memory is None or cache is None:
        return None
    nothing = views["cu_keys"][:0]
    return Memory(
        *cache,
        views["cu_keys"],
        layout.memory,
        read_slots=views["read_slots"],
        token_slots=views["token_slots"],
        new_at=nothing,
        old_at=nothing,
        write_tokens=nothing,
        write_slots=nothing,
        carry_rows=nothing,
        carry_slots=nothing,
        carry_old=nothing,
    )
