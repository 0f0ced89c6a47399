"""Small pooling steps, and steps of prompt chunks, as CUDA graphs: one copy in, one replay, one copy out.

Launching a small step's kernels one by one takes the host longer than the step takes the device.
`graph_policy` decides when a graph is captured for a bucket. Until then a larger graph replays the step, if
its padding costs less than launching the kernels. Otherwise, or if no graph can be captured, steps run
eagerly.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import is_precompiling
from penstock.kernels.lora import LineTiles
from penstock.kvcache.store import KVCache
from penstock.layers.adapter_lines import LinePlan
from penstock.layers.adapter_state import AdapterLines, StepAdapters, adapting
from penstock.layers.batch import Batch, KVAccess, OutputTokens, PagedTensors, reads_in_place
from penstock.layers.lora import AdapterSites
from penstock.models.registry import Model
from penstock.pooling.build import Pooler, VariantTensors
from penstock.pooling.heads import to_output
from penstock.pooling.methods import CARRIED
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import (
    CACHED_KEYS,
    ROWS,
    KVLayout,
    Layout,
    LineLayout,
    NoGroups,
    bucket_of,
    cached_keys_of,
    max_layout_size,
)
from penstock.runner.capture import Capture, Captures, Work
from penstock.runner.graph_keys import Key
from penstock.runner.graph_policy import MAX_KNOWN, GraphPolicy
from penstock.runner.inputs import AdapterPlan
from penstock.runner.staging import Staging
from penstock.types import GeneratePlan, PooledResult, PoolingParams, PoolPlan, StepPlan, Task, Variant

log = logging.getLogger("penstock.graphs")

MAX_GRAPHS = 256
MAX_OUTPUT_BYTES = 1 << 30  # of all graphs' outputs; graphs share all other memory
# The last layer is computed only for the output tokens if a step has at least this many tokens × hidden size,
# and if they are at most this share of all tokens. Selecting them takes a few small kernels.
MIN_PRUNED_SIZE, MAX_PRUNED_SHARE = 1 << 20, 0.75
_CAPTURE_PAUSE = 4.0  # pause before the next capture under load, as a multiple of a capture's duration


@dataclass(frozen=True, slots=True, eq=False)
class HiddenGraph:
    """A graph that ends with the model."""

    layout: Layout
    batch: Batch  # of the whole bucket, on the buffer that steps are copied to
    replay: Callable[[], None]
    hidden: Tensor  # [tokens of the bucket, hidden]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.hidden]


@dataclass(frozen=True, slots=True, eq=False)
class PooledGraph:
    """A graph that also pools."""

    layout: Layout
    replay: Callable[[], None]
    values: Tensor  # [rows or tokens of the bucket, …]
    finite: Tensor | None  # uint8 [rows or tokens of the bucket]
    packed: Tensor  # uint8: the bytes of the values, then of the flags
    row_bytes: int  # bytes of one row or token of `values`

    @property
    def outputs(self) -> list[Tensor]:
        return [self.values] if self.finite is None else [self.values, self.finite]


Graph = HiddenGraph | PooledGraph


class ReplayedStates(NamedTuple):
    """Hidden states of a replayed step and its own part of the padded batch, valid until the next replay."""

    hidden: Tensor  # [tokens, hidden]
    batch: Batch


class _GraphWork(NamedTuple):
    """What a graph computes for a bucket."""

    batch: Batch
    run: Work


class Graphs(Captures[Key, Graph]):
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        staging: Staging,
        capture: Capture | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cache: KVCache | None = None,
        policy: GraphPolicy | None = None,
    ) -> None:
        """`policy`: the policy of earlier graphs of the same model, with its measurements."""
        super().__init__(staging, capture, clock)
        self.policy = GraphPolicy() if policy is None else policy
        self.model = model
        self.pooler = pooler
        self.cache = cache
        self._carries_sums = pooler.carries or any(head.method in CARRIED for head in pooler.heads.values())
        # None: the model takes no adapters.
        self.adapter_sites: AdapterSites | None = getattr(model, "adapter_sites", None)
        size = max_layout_size(self._num_slots)
        self.integers = torch.zeros(size, dtype=torch.int32, device=staging.device)
        self.row_numbers = torch.arange(ROWS[-1] + 1, dtype=torch.int32, device=staging.device)
        self.output_bytes = 0
        self.last_replayed: Graph | None = None
        self._larger_keys: dict[Key, Key | None] = {}  # key → smallest captured key that serves it
        self._captures_on_first_use = False

    @contextlib.contextmanager
    def capture_on_first_use(self) -> Iterator[None]:
        """Capture shapes when they are first used, and replay them even where eager steps were faster. For
        warm-up, before there is any load."""
        self._captures_on_first_use = True
        try:
            yield
        finally:
            self._captures_on_first_use = False

    @property
    def is_full(self) -> bool:
        return len(self.captured) >= MAX_GRAPHS or self.output_bytes >= MAX_OUTPUT_BYTES

    @property
    def _num_slots(self) -> int:
        return 0 if self.adapter_sites is None else self.adapter_sites.num_slots

    def key_of(self, plan: StepPlan, adapters: AdapterPlan | None = None) -> Key | None:
        """The key of a step; None: the step always runs eagerly."""
        key = self._pool_key(plan) if isinstance(plan, PoolPlan) else self._prompt_key(plan)
        if key is None or adapters is None:
            return key
        return key._replace(adapter_rank=adapters.rank, tile_slots=adapters.tile_slots(plan))

    def _pool_key(self, plan: PoolPlan) -> Key | None:
        if plan.limits is not None or _is_multimodal(plan):
            return None
        bucket = bucket_of(plan.num_tokens, plan.num_rows, plan.max_length)
        if bucket is None:
            return None
        params, max_cached_keys = self._params_inside(plan.variants), None
        if plan.kv is not None:
            max_cached_keys = self._cached_keys(len(plan.kv.read_slots))
            if max_cached_keys is None:
                return None
            if params is not None and not params.per_token:
                params = None  # perhaps only a few rows end in this step
        return Key(bucket, plan.type_ids is not None, plan.skip is not None, params, max_cached_keys)

    def _cached_keys(self, num_cached: int) -> int | None:
        """None: a pooling step that uses the KV cache cannot be replayed. Gathered keys have no fixed size,
        and a capture runs the step twice, which would add carried sums twice."""
        return cached_keys_of(num_cached) if self._reads_in_place() and not self._carries_sums else None

    def _prompt_key(self, plan: GeneratePlan) -> Key | None:
        """The key of a step that only runs prompt chunks, all of whose token ids are known."""
        if plan.paged.num_rows or len(plan.sample.fed_tokens) or not self._reads_in_place():
            return None
        if _is_multimodal(plan):
            return None
        bucket = bucket_of(plan.num_tokens, plan.num_rows, plan.max_length)
        max_cached_keys = cached_keys_of(len(plan.kv.read_slots))
        if bucket is None or max_cached_keys is None:
            return None
        return Key(bucket, False, False, None, max_cached_keys, is_prompt=True)

    def _reads_in_place(self) -> bool:
        return self.cache is not None and reads_in_place(self.cache.store)

    def _params_inside(self, variants: tuple[Variant, ...]) -> PoolingParams | None:
        """The parameters that a graph can pool with: one variant of all rows, with common parameters."""
        if len(variants) != 1:
            return None
        variant, params = variants[0], variants[0].params
        if variant.index is not None or variant.pairs is not None:
            return None
        if params.dimensions is not None or params.top_k is not None:
            return None
        return None if params.task is Task.SPARSE and self.pooler.splade is not None else params

    def prepare(self, key: Key, plan: StepPlan, adapters: AdapterPlan | None = None) -> Graph | None:
        """Find or capture the graph for a step, and start copying its integers. None: run it eagerly."""
        self.policy.note_use(key)
        graph = self.captured.get(key)
        if graph is not None and self._prefers_eager(key):
            return None
        if graph is None:
            larger = self._larger_key(key)
            if not self._is_due(key, larger):
                if larger is None:
                    return None
                graph = self.captured[larger]
        layout = self._layout_of(key) if graph is None else graph.layout
        pinned = self.staging.pinned_ints(layout.size)
        layout.write(pinned.numpy(), plan)
        if layout.adapters is not None and adapters is not None:
            tokens, rows = layout.adapters.tokens, layout.adapters.rows
            tokens.write(pinned.numpy(), adapters.of_tokens(plan, tokens.tile_lines))
            rows.write(pinned.numpy(), adapters.of_rows(tile_lines=rows.tile_lines))
        self.integers[: layout.size].copy_(pinned, non_blocking=True)
        if graph is None:
            graph = self._capture(key, layout)
        return graph

    def replay_pooled(self, graph: PooledGraph, plan: PoolPlan) -> PooledResult:
        """Replay a prepared step. Its arrays are valid once the device has reached this point."""
        self.replays += 1
        self.last_replayed = graph
        graph.replay()
        count = plan.num_tokens if plan.variants[0].params.per_token else plan.num_rows
        values, size = graph.values, graph.row_bytes
        # Flags, if there are any, follow the values of the whole bucket.
        packed = graph.packed[: count * size] if graph.finite is None else graph.packed
        flat = self.staging.fetch_bytes(packed)
        array = flat[: count * size].view(values.dtype).view(count, *values.shape[1:]).numpy()
        if graph.finite is None:
            return PooledResult((array,))
        end = len(values) * size
        return PooledResult((array,), (flat[end : end + count].numpy(),))

    def replay_hidden(
        self, graph: HiddenGraph, plan: StepPlan, adapters: AdapterPlan | None = None
    ) -> ReplayedStates:
        """Replay a prepared step up to its hidden states."""
        self.replays += 1
        self.last_replayed = graph
        graph.replay()
        tokens, rows, padded = plan.num_tokens, plan.num_rows, graph.batch
        kv = padded.kv
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
            kv=None if kv is None else replace(kv, cu_keys=kv.cu_keys[: rows + 1]),
            adapters=None if adapters is None else self._step_adapters(graph.layout, adapters, plan),
        )
        return ReplayedStates(graph.hidden[:tokens], batch)

    def observe(self, key: Key, host_s: float, device_s: float) -> None:
        """Record the times of an eager step. Steps that only compiled their kernels are ignored."""
        if not is_precompiling():
            self.policy.times.ran_eagerly(key.bucket.tokens, host_s, device_s)

    def observe_replay(self, graph: Graph, device_s: float) -> None:
        """Record the device time of a replayed step."""
        self.policy.times.replayed(graph.layout.bucket.tokens, device_s)

    def observe_gap(self, gap_s: float, device_s: float) -> None:
        """Record how long the device was idle before a step of `device_s`."""
        self.policy.times.followed(gap_s, device_s)

    def _larger_key(self, key: Key) -> Key | None:
        """The smallest larger graph that can replay a step without its own graph. None: there is none, or its
        padding would cost more than an eager step."""
        if key in self._larger_keys:
            larger = self._larger_keys[key]
        else:
            serving = [other for other in self.captured if other.serves(key)]
            larger = min(serving, key=lambda other: (other.bucket, other.max_cached_keys or 0), default=None)
            if len(self._larger_keys) >= MAX_KNOWN:
                self._larger_keys.clear()
            self._larger_keys[key] = larger
        return larger if larger is not None and self.policy.may_borrow(key, larger) else None

    def _prefers_eager(self, key: Key) -> bool:
        """Whether a step runs eagerly although it has a graph."""
        return not (key.is_prompt or self._captures_on_first_use) and self.policy.prefers_eager(key)

    @property
    def _may_capture(self) -> bool:
        return not (self.gave_up or self.is_full)

    def _is_due(self, key: Key, larger: Key | None) -> bool:
        """Whether to capture a graph for a step that is about to run."""
        if key in self.refused or not self._may_capture:
            return False
        if self._captures_on_first_use:
            return True
        return self.policy.is_due(key, larger) and self.clock() >= self._not_before

    def can_capture(self, key: Key) -> bool:
        """Whether a step can have this key. A key from the history may not fit the engine's settings."""
        if key.bucket != bucket_of(*key.bucket) or key.adapter_rank:
            return False
        if key.params is not None and self._params_inside((Variant(key.params, None),)) != key.params:
            return False
        if key.max_cached_keys is None:
            return not key.is_prompt
        if key.is_prompt:
            return key.params is None and self._reads_in_place() and key.max_cached_keys in CACHED_KEYS
        if key.params is not None and not key.params.per_token:
            return False
        return key.max_cached_keys == self._cached_keys(key.max_cached_keys)

    @property
    def has_idle_work(self) -> bool:
        """Whether `capture_next` may capture a graph now."""
        if not self._may_capture or self.clock() < self._not_before:
            return False
        return self.policy.has_idle_work(self.captured.keys() | self.refused)

    def capture_next(self, *, is_planned: bool = False) -> bool:
        """Capture one graph while no step runs. `is_planned`: only a planned one. False: none to capture."""
        if not self._may_capture or self.clock() < self._not_before:
            return False
        unavailable = self.captured.keys() | self.refused
        key = (self.policy.next_planned if is_planned else self.policy.next_idle)(unavailable)
        if key is None:
            return False
        if not self.can_capture(key):
            self.refused.add(key)
        elif self._capture(key, self._empty_layout(key)) is not None:
            self._not_before = self.clock()  # no request waits, so no pause is needed
        return True

    def compile_ahead(self, keys: Iterable[Key]) -> None:
        """Launch the kernels of these graphs. Called while launches only compile."""
        for key in keys:
            if self.can_capture(key):
                self._work_of(key, self._empty_layout(key)).run()

    def _empty_layout(self, key: Key) -> Layout:
        """The layout of a step of padding only, with its integers on the device. Its rows are empty, and its
        tokens are not written to the KV cache."""
        layout = self._layout_of(key)
        self.integers[: layout.size].zero_()
        if layout.kv is not None:
            self.integers[layout.kv.token_slots].fill_(-1)
        return layout

    def _capture(self, key: Key, layout: Layout) -> Graph | None:
        began = self.clock()
        steps = f"steps of {key.bucket.tokens} tokens in {key.bucket.rows} rows"
        graph = self._try_capture(key, lambda: self._make_graph(key, layout), steps)
        if graph is None:
            return None
        elapsed = self.clock() - began
        self._not_before = began + elapsed * (1 + _CAPTURE_PAUSE)
        self.policy.captured(key, elapsed)
        self._larger_keys.clear()
        self.output_bytes += sum(output.nbytes for output in graph.outputs)
        if self.is_full:
            log.info("%d graphs are captured; steps of other shapes run eagerly", len(self.captured))
        return graph

    def forget(self) -> None:
        """Drop all graphs. They are captured again while the engine is idle."""
        self.policy.plan(key for key in self.captured if not key.adapter_rank)
        self._forget()

    def _forget(self) -> None:
        self.output_bytes = 0
        self.last_replayed = None
        self._larger_keys.clear()
        super()._forget()

    def drop(self) -> None:
        self.policy.plan_nothing()  # memory is scarce
        super().drop()

    def forget_where(self, is_stale: Callable[[Key], bool]) -> None:
        self._larger_keys.clear()
        super().forget_where(is_stale)

    def _make_graph(self, key: Key, layout: Layout) -> Graph:
        batch, run = self._work_of(key, layout)
        if key.params is None:
            replay, (hidden,) = self.capture(run)
            return HiddenGraph(layout, batch, replay, hidden)
        replay, (packed, values, *finite) = self.capture(run)
        row_bytes = values[0].numel() * values.itemsize
        return PooledGraph(layout, replay, values, finite[0] if finite else None, packed, row_bytes)

    def _work_of(self, key: Key, layout: Layout) -> _GraphWork:
        batch = _padded_batch(layout, self.integers, self.cache)
        batch = replace(batch, adapters=self._padded_adapters(key, layout))
        if key.is_prompt and batch.kv is not None:
            batch = replace(batch, is_generation=True, kv=_without_decodes(batch.kv))
        if key.params is not None:
            return self._pooled_work(key, key.params, batch)

        def states() -> list[Tensor]:
            with adapting(batch.adapters):
                return [self.model(batch)]

        return _GraphWork(batch, states)

    def _pooled_work(self, key: Key, params: PoolingParams, batch: Batch) -> _GraphWork:
        variants, tensors = (Variant(params, None),), (VariantTensors(),)
        method, rows = self._pruning_method(key, params), self.row_numbers[: key.bucket.rows + 1]

        def work() -> list[Tensor]:
            own = batch
            if method is not None:
                own = replace(batch, output_tokens=_one_token_per_row(method, batch, rows))
                if (adapters := batch.adapters) is not None:  # one output token per row
                    own = replace(own, adapters=replace(adapters, outputs=adapters.rows))
            with adapting(own.adapters):
                pooled = self.pooler(self.model(own), own.output_batch(), variants, tensors)
            values, finite = to_output(pooled, variants, quantizes=self.pooler.quantizes)
            outputs = [value.contiguous() for value in values] + finite
            raw = [output.view(-1).view(torch.uint8) for output in outputs]
            return [raw[0] if len(raw) == 1 else torch.cat(raw), *outputs]

        return _GraphWork(batch, work)

    def _pruning_method(self, key: Key, params: PoolingParams) -> str | None:
        """The pooling method, if it reads one token of each row and it pays to compute the last layer only
        for those tokens. Otherwise None."""
        tokens, rows, _ = key.bucket
        if not self.model.prunes_last_layer or key.max_cached_keys is not None:
            return None
        if tokens * self.model.hidden_size < MIN_PRUNED_SIZE or rows > MAX_PRUNED_SHARE * tokens:
            return None
        method = self.pooler.reads((Variant(params, None),))
        return method if method in ("cls", "last") else None

    def _layout_of(self, key: Key) -> Layout:
        return Layout.of(
            key.bucket,
            has_types=key.has_types,
            has_skip=key.has_skip,
            max_cached_keys=key.max_cached_keys,
            num_slots=self._num_slots if key.adapter_rank else 0,
        )

    def _padded_adapters(self, key: Key, layout: Layout) -> StepAdapters | None:
        """The adapters of the whole bucket."""
        if layout.adapters is None or self.adapter_sites is None:
            return None
        tokens, rows = layout.adapters.tokens, layout.adapters.rows
        return StepAdapters(
            self.adapter_sites.state,
            key.adapter_rank,
            padded_lines(tokens, self.integers),
            padded_lines(rows, self.integers),
            tile_slots=key.tile_slots,
        )

    def _step_adapters(self, layout: Layout, adapters: AdapterPlan, plan: StepPlan) -> StepAdapters | None:
        """The adapters of the step that was copied to a graph's buffer."""
        if layout.adapters is None:
            return None
        tokens, rows = layout.adapters.tokens, layout.adapters.rows
        return StepAdapters(
            adapters.state,
            adapters.rank,
            _lines(tokens, self.integers, adapters.of_tokens(plan, tokens.tile_lines)),
            _lines(rows, self.integers, adapters.of_rows(tile_lines=rows.tile_lines)),
            row_slots=adapters.row_slots,
        )


def padded_lines(layout: LineLayout, integers: Tensor) -> AdapterLines:
    """The adapters of all lines of a bucket."""
    tiles = integers[layout.tiles].view(-1, 3)
    tiled = LineTiles(integers[layout.order], tiles, layout.tile_lines)
    return AdapterLines(integers[layout.slots], tiled, None)


def _lines(layout: LineLayout, integers: Tensor, lines: LinePlan) -> AdapterLines:
    """The adapters of the lines of a step in a bucket."""
    padded, count = padded_lines(layout, integers), len(lines.slots)
    tiled = LineTiles(padded.tiled.order[:count], padded.tiled.tiles, layout.tile_lines)
    return AdapterLines(padded.slots[:count], tiled, lines.groups)


def _one_token_per_row(method: str, batch: Batch, rows: Tensor) -> OutputTokens:
    """The first or last token of each row; padding rows have none and get an arbitrary token."""
    if method == "last":
        tokens = (batch.cu_lengths[1:] - 1).clamp_min_(0)
    else:
        tokens = batch.cu_lengths[:-1]
        if batch.skip is not None:
            tokens = tokens + torch.minimum(batch.skip, batch.lengths - 1)
        tokens = tokens.clamp(0, batch.num_tokens - 1)
    return OutputTokens(tokens, rows, rows[1:] - rows[:-1], 1)


def _padded_batch(layout: Layout, integers: Tensor, cache: KVCache | None) -> Batch:
    """The whole bucket. The host's decisions depend on the bucket's shape, not on that of a step."""
    tokens, rows, max_length = layout.bucket
    return Batch(
        token_ids=integers[layout.token_ids],
        positions=integers[layout.positions],
        type_ids=None if layout.type_ids is None else integers[layout.type_ids],
        cu_lengths=integers[layout.cu_lengths],
        lengths=integers[layout.lengths],
        skip=None if layout.skip is None else integers[layout.skip],
        groups=NoGroups(),
        max_length=max_length,
        num_tokens=tokens,
        num_rows=rows,
        kv=None if layout.kv is None or cache is None else _padded_kv(layout.kv, integers, cache),
    )


def _padded_kv(layout: KVLayout, integers: Tensor, cache: KVCache) -> KVAccess:
    """Attention reads cached keys from their slots; nothing is gathered, and no sums are carried."""
    cu_keys = integers[layout.cu_keys]
    nothing = cu_keys[:0]
    return KVAccess(
        cache.store,
        cu_keys,
        layout.max_cached_keys,
        read_slots=integers[layout.read_slots],
        token_slots=integers[layout.token_slots],
        new_key_at=nothing,
        cached_key_at=nothing,
        write_tokens=nothing,
        write_slots=nothing,
    )


def _without_decodes(kv: KVAccess) -> KVAccess:
    """The same access for a generation step in which no row reads through block tables."""
    nothing = kv.read_slots[:0]
    return replace(kv, paged=PagedTensors(0, nothing.view(0, 0), nothing, BLOCK_SIZE))


def _is_multimodal(plan: StepPlan) -> bool:
    """Whether a step has images. Buckets do not cover their numbers of patches."""
    return plan.images is not None or plan.rope_positions is not None
