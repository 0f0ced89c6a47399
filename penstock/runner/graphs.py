"""Small steps as CUDA graphs: one copy in, one replay, one copy out, whatever the model is made of.

Launching a step's kernels one by one costs the host more than a small step costs the device. A graph is
captured for a bucket when steps of its shape come again and were found to wait for the host; until then,
and wherever a graph cannot be had, steps run as they always do.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import is_precompiling
from penstock.kvcache.store import KVStore
from penstock.layers.batch import Batch, Memory, Needed, Paged, read_in_place
from penstock.models.registry import Model
from penstock.pooling.build import Pooler
from penstock.pooling.heads import leave
from penstock.pooling.methods import CARRIED
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import (
    ROWS,
    Bucket,
    Layout,
    NoGroups,
    bucket_of,
    largest_size,
    memory_of,
)
from penstock.runner.capture import Capture, Captures
from penstock.runner.staging import Staging
from penstock.types import Array, PoolingParams, SamplePlan, StepPlan, Task, Variant

log = logging.getLogger("penstock.graphs")

USES = 2  # of a shape, before it is captured
MOST = 256  # graphs
MOST_BYTES = 1 << 30  # of what they write to; all else they share
# Tokens × hidden size from which on a last layer is finished for those tokens alone that are read, and the
# share that these may have: to pick them out takes a few small kernels.
NARROWED, FEWER = 1 << 20, 0.75
_REST = 4.0  # a capture is followed by so many times its own duration without another
_SMALL = 512  # tokens; steps up to here wait for the host whatever the model is
_WORTH = 1.5  # a step that keeps the device busy for so many times the host's work gains nothing


class Key(NamedTuple):
    """Steps that one graph serves. `params` is the finish inside the graph; None: it ends with the model."""

    bucket: Bucket
    types: bool
    skip: bool
    params: PoolingParams | None
    memory: int | None = None  # remembered keys that it has room for; None: rows are not cut
    generates: bool = False  # it runs prompts, and ends with the model

    def serves(self, other: Key) -> bool:
        """Whether its graph can stand in for that of another, and costs the device little more."""
        if (self.memory is None) != (other.memory is None):
            return False
        roomy = all(size >= needed for size, needed in zip(self.bucket, other.bucket, strict=True))
        roomy = roomy and (self.memory or 0) >= (other.memory or 0)
        roomy = roomy and self.types >= other.types and self.skip >= other.skip  # none are all zeros
        alike = (self.params, self.generates) == (other.params, other.generates)
        return roomy and alike and self.bucket.tokens <= 2 * other.bucket.tokens


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
    stood_in: bool = (
        False  # another's graph has served such steps, so how long they take without is not known
    )
    host_s: float = float("inf")
    device_s: float = float("inf")

    @property
    def pays(self) -> bool:
        return self.stood_in or (self.host_s < float("inf") and self.device_s < _WORTH * self.host_s)


class Graphs(Captures[Key, Graph]):
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        staging: Staging,
        capture: Capture | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cache: tuple[KVStore, Tensor] | None = None,
    ) -> None:
        super().__init__(staging, capture, clock)
        self.model = model
        self.pooler = pooler
        self.cache = cache
        self._sums = pooler.carries or any(head.method in CARRIED for head in pooler.heads.values())
        self.integers = torch.zeros(largest_size(), dtype=torch.int32, device=staging.device)
        self.counted = torch.arange(ROWS[-1] + 1, dtype=torch.int32, device=staging.device)  # replays read it
        self.held_bytes = 0
        self._seen: dict[Key, _Seen] = {}
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
        if graph is None and not self._due(key) and (graph := self._stand_in(key)) is None:
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
        """What a step of this shape took without a graph; the first, with all that is lazy, took longer, and
        one whose kernels were compiled and not run says nothing."""
        seen = self._seen.get(key)
        if seen is not None and not is_precompiling():
            seen.host_s, seen.device_s = min(seen.host_s, host_s), min(seen.device_s, device_s)

    def _stand_in(self, key: Key) -> Graph | None:
        """For a small step whose own graph is not captured (yet): that of the next roomier shape."""
        if key.bucket.tokens > _SMALL:
            return None
        serving = [other for other in self.captured if other.serves(key)]
        if not serving:
            return None
        if (seen := self._seen.get(key)) is not None:
            seen.stood_in = True
        return self.captured[min(serving, key=lambda other: (other.bucket, other.memory or 0))]

    def _due(self, key: Key) -> bool:
        if key in self.refused or self.gave_up or self.full:
            return False
        seen = self._seen.setdefault(key, _Seen())
        seen.uses += 1
        if self._at_once:
            return True
        return seen.uses > USES and seen.pays and self.clock() >= self._not_before

    def _capture(self, key: Key, layout: Layout) -> Graph | None:
        began = self.clock()
        steps = "steps of {} tokens in {} rows".format(*key.bucket[:2])
        graph = self._taken(key, lambda: self._captured(key, layout), steps)
        if graph is None:
            return None
        self._not_before = began + (self.clock() - began) * (1 + _REST)
        self.held_bytes += sum(output.nbytes for output in graph.outputs)
        if self.full:
            log.info("%d graphs are captured; steps of further shapes run without", len(self.captured))
        return graph

    def _ends(self, key: Key) -> str | None:
        """Which one token of each row is read, where the last layer is better finished for them alone."""
        tokens, rows, _ = key.bucket
        if not self.model.prunes_last_layer or key.params is None or key.memory is not None:
            return None
        if tokens * self.model.hidden_size < NARROWED or rows > FEWER * tokens:
            return None
        method = self.pooler.reads((Variant(key.params, None),))
        return method if method in ("cls", "last") else None

    def drop(self) -> None:
        self.held_bytes = 0
        super().drop()

    def _captured(self, key: Key, layout: Layout) -> Graph:
        batch, params = _batch(layout, self.integers, self.cache), key.params
        if key.generates and batch.memory is not None:
            batch = replace(batch, generates=True, memory=_of_prompts(batch.memory))
        variants = () if params is None else (Variant(params, None),)
        ends, rows = self._ends(key), self.counted[: key.bucket.rows + 1]

        def work() -> list[Tensor]:
            own = batch if ends is None else replace(batch, needed=_one_a_row(ends, batch, rows))
            hidden = self.model(own)
            if params is None:
                return [hidden]
            values, flags = leave(self.pooler(hidden, own.narrowed(), variants, [None]), variants)
            outputs = [value.contiguous() for value in values] + flags
            raw = [output.view(-1).view(torch.uint8) for output in outputs]
            return [*outputs, raw[0] if len(raw) == 1 else torch.cat(raw)]

        replay, outputs = self.capture(work)
        if params is None:
            return Graph(layout, batch, replay, outputs)
        row_bytes = outputs[0][0].numel() * outputs[0].itemsize
        return Graph(layout, batch, replay, outputs[:-1], outputs[-1], row_bytes)


def _one_a_row(method: str, batch: Batch, rows: Tensor) -> Needed:
    """The first or last token of each row, of which empty ones have none: nobody asks what they get."""
    if method == "last":
        tokens = (batch.cu_lengths[1:] - 1).clamp_min_(0)
    else:
        tokens = batch.cu_lengths[:-1]
        if batch.skip is not None:
            tokens = tokens + torch.minimum(batch.skip, batch.lengths - 1)
        tokens = tokens.clamp(0, batch.num_tokens - 1)
    return Needed(tokens, rows, rows[1:] - rows[:-1], 1)


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
