"""Small pooling steps, and steps of prompt chunks, as CUDA graphs: one copy in, one replay, one copy out.

Launching a small step's kernels one by one costs the host more than the step costs the device. A graph is
captured for a bucket once steps of that shape have come repeatedly and were found to wait for the host.
Until then, and wherever a graph cannot be captured, steps run eagerly.
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
    ROWS,
    Bucket,
    KVLayout,
    Layout,
    LineLayout,
    NoGroups,
    bucket_of,
    cached_keys_of,
    max_layout_size,
)
from penstock.runner.capture import Capture, Captures
from penstock.runner.inputs import AdapterPlan
from penstock.runner.staging import Staging
from penstock.types import GeneratePlan, PooledResult, PoolingParams, PoolPlan, StepPlan, Task, Variant

log = logging.getLogger("penstock.graphs")

USES_BEFORE_CAPTURE = 2  # of a shape
MAX_GRAPHS = 256
MAX_OUTPUT_BYTES = 1 << 30  # of the graphs' outputs; they share all their other memory
# The last layer is computed for the output tokens alone from this many tokens × hidden size on, and only if
# they are at most this share of all tokens: selecting them takes a few small kernels.
MIN_PRUNED_SIZE, MAX_PRUNED_SHARE = 1 << 20, 0.75
_CAPTURE_PAUSE = 4.0  # times a capture's own duration pass before the next capture
_ALWAYS_SMALL = 512  # tokens; steps up to this size wait for the host whatever the model is
_MAX_DEVICE_SHARE = 1.5  # a step that keeps the device busy this many times the host's work gains nothing


class Key(NamedTuple):
    """The steps that one graph serves. `params` are pooled inside the graph; None: it ends with the model."""

    bucket: Bucket
    has_types: bool
    has_skip: bool
    params: PoolingParams | None
    max_cached_keys: int | None = None  # None: the step does not use the KV cache
    is_prompt: bool = False  # it runs chunks of prompts, and ends with the model
    adapter_rank: int = 0  # the bucket of its adapters' ranks; 0: the step has none

    def serves(self, other: Key) -> bool:
        """Whether this key's graph can replay the steps of another key at little extra device time."""
        if (self.max_cached_keys is None) != (other.max_cached_keys is None):
            return False
        fits = all(size >= needed for size, needed in zip(self.bucket, other.bucket, strict=True))
        fits = fits and (self.max_cached_keys or 0) >= (other.max_cached_keys or 0)
        fits = fits and self.has_types >= other.has_types and self.has_skip >= other.has_skip  # absent: zeros
        same = (self.params, self.is_prompt) == (other.params, other.is_prompt)
        same = same and self.adapter_rank == other.adapter_rank
        return fits and same and self.bucket.tokens <= 2 * other.bucket.tokens


@dataclass(frozen=True, slots=True, eq=False)
class HiddenGraph:
    """A graph that ends with the model."""

    layout: Layout
    batch: Batch  # of the bucket, on the buffer that steps are copied to
    replay: Callable[[], None]
    hidden: Tensor  # [tokens of the bucket, hidden]

    @property
    def outputs(self) -> list[Tensor]:
        return [self.hidden]


@dataclass(frozen=True, slots=True, eq=False)
class PooledGraph:
    """A graph that pools too."""

    layout: Layout
    replay: Callable[[], None]
    values: Tensor  # [rows or tokens of the bucket, …]
    finite: Tensor | None  # uint8 [rows or tokens of the bucket]
    packed: Tensor  # uint8: the bytes of the values, then of the flags
    row_bytes: int  # of the values

    @property
    def outputs(self) -> list[Tensor]:
        return [self.values] if self.finite is None else [self.values, self.finite]


Graph = HiddenGraph | PooledGraph


class ReplayedStates(NamedTuple):
    """Hidden states of a replayed step and its own part of the padded batch, valid until the next replay."""

    hidden: Tensor  # [tokens, hidden]
    batch: Batch


@dataclass(slots=True)
class _Seen:
    """What is known of the steps of one key."""

    uses: int = 0
    was_served_by_larger: bool = False  # so the time that they take without a graph is not known
    host_s: float = float("inf")
    device_s: float = float("inf")

    @property
    def is_worth_capturing(self) -> bool:
        is_measured = self.host_s < float("inf")
        waits_for_host = is_measured and self.device_s < _MAX_DEVICE_SHARE * self.host_s
        return self.was_served_by_larger or waits_for_host


class Graphs(Captures[Key, Graph]):
    def __init__(
        self,
        model: Model,
        pooler: Pooler,
        staging: Staging,
        capture: Capture | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cache: KVCache | None = None,
    ) -> None:
        super().__init__(staging, capture, clock)
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
        self._seen: dict[Key, _Seen] = {}
        self._captures_on_first_use = False

    @contextlib.contextmanager
    def capture_on_first_use(self) -> Iterator[None]:
        """For warm-up, before there is any load."""
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
        """None: such a step is never replayed."""
        key = self._pool_key(plan) if isinstance(plan, PoolPlan) else self._prompt_key(plan)
        return key if key is None or adapters is None else key._replace(adapter_rank=adapters.rank)

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
                params = None  # few of the step's rows may end in it
        return Key(bucket, plan.type_ids is not None, plan.skip is not None, params, max_cached_keys)

    def _cached_keys(self, num_cached: int) -> int | None:
        """None: a pooling step that uses the KV cache cannot be replayed. Gathered keys have no fixed size,
        and a capture runs the step twice, which would add carried sums twice."""
        return cached_keys_of(num_cached) if self._reads_in_place() and not self._carries_sums else None

    def _prompt_key(self, plan: GeneratePlan) -> Key | None:
        """For a step that runs chunks of prompts and nothing else; all its token ids are known."""
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
        """What can be pooled inside a graph: one variant of all rows, with common parameters."""
        if len(variants) != 1:
            return None
        variant, params = variants[0], variants[0].params
        if variant.index is not None or variant.pairs is not None:
            return None
        if params.dimensions is not None or params.top_k is not None:
            return None
        return None if params.task is Task.SPARSE and self.pooler.splade is not None else params

    def prepare(self, key: Key, plan: StepPlan, adapters: AdapterPlan | None = None) -> Graph | None:
        """The graph for a step, with the copy of the step's integers under way. None: run it eagerly."""
        graph = self.captured.get(key)
        if graph is None and not self._is_due(key) and (graph := self._larger_graph(key)) is None:
            return None
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
        """Replay a prepared step; its arrays are valid once the device has passed this point."""
        self.replays += 1
        graph.replay()
        count = plan.num_tokens if plan.variants[0].params.per_token else plan.num_rows
        values, size = graph.values, graph.row_bytes
        # Where there are flags, they follow the bucket's values.
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
        """Note what a step of this shape took without a graph. The minimum counts, because first steps
        include lazy set-up. A step whose kernels were only compiled, not run, is ignored."""
        seen = self._seen.get(key)
        if seen is not None and not is_precompiling():
            seen.host_s, seen.device_s = min(seen.host_s, host_s), min(seen.device_s, device_s)

    def _larger_graph(self, key: Key) -> Graph | None:
        """The smallest larger graph, for a small step whose own graph is not captured (yet)."""
        if key.bucket.tokens > _ALWAYS_SMALL:
            return None
        serving = [other for other in self.captured if other.serves(key)]
        if not serving:
            return None
        if (seen := self._seen.get(key)) is not None:
            seen.was_served_by_larger = True
        return self.captured[min(serving, key=lambda other: (other.bucket, other.max_cached_keys or 0))]

    def _is_due(self, key: Key) -> bool:
        if key in self.refused or self.gave_up or self.is_full:
            return False
        seen = self._seen.setdefault(key, _Seen())
        seen.uses += 1
        if self._captures_on_first_use:
            return True
        is_frequent = seen.uses > USES_BEFORE_CAPTURE
        return is_frequent and seen.is_worth_capturing and self.clock() >= self._not_before

    def _capture(self, key: Key, layout: Layout) -> Graph | None:
        began = self.clock()
        steps = f"steps of {key.bucket.tokens} tokens in {key.bucket.rows} rows"
        graph = self._try_capture(key, lambda: self._make_graph(key, layout), steps)
        if graph is None:
            return None
        self._not_before = began + (self.clock() - began) * (1 + _CAPTURE_PAUSE)
        self.output_bytes += sum(output.nbytes for output in graph.outputs)
        if self.is_full:
            log.info("%d graphs are captured; steps of other shapes run eagerly", len(self.captured))
        return graph

    def forget(self) -> None:
        self.output_bytes = 0
        super().forget()

    def _make_graph(self, key: Key, layout: Layout) -> Graph:
        batch = _padded_batch(layout, self.integers, self.cache)
        batch = replace(batch, adapters=self._padded_adapters(key, layout))
        if key.is_prompt and batch.kv is not None:
            batch = replace(batch, is_generation=True, kv=_without_decodes(batch.kv))
        if key.params is None:

            def states() -> list[Tensor]:
                with adapting(batch.adapters):
                    return [self.model(batch)]

            replay, (hidden,) = self.capture(states)
            return HiddenGraph(layout, batch, replay, hidden)
        return self._make_pooled_graph(key, key.params, layout, batch)

    def _make_pooled_graph(
        self, key: Key, params: PoolingParams, layout: Layout, batch: Batch
    ) -> PooledGraph:
        variants, tensors = (Variant(params, None),), (VariantTensors(),)
        method, rows = self._pruning_method(key, params), self.row_numbers[: key.bucket.rows + 1]

        def work() -> list[Tensor]:
            own = batch
            if method is not None:
                own = replace(batch, output_tokens=_one_token_per_row(method, batch, rows))
                if (adapters := batch.adapters) is not None:  # an output token is that of its row
                    own = replace(own, adapters=replace(adapters, outputs=adapters.rows))
            with adapting(own.adapters):
                pooled = self.pooler(self.model(own), own.output_batch(), variants, tensors)
            values, finite = to_output(pooled, variants, quantizes=self.pooler.quantizes)
            outputs = [value.contiguous() for value in values] + finite
            raw = [output.view(-1).view(torch.uint8) for output in outputs]
            return [raw[0] if len(raw) == 1 else torch.cat(raw), *outputs]

        replay, (packed, values, *finite) = self.capture(work)
        row_bytes = values[0].numel() * values.itemsize
        return PooledGraph(layout, replay, values, finite[0] if finite else None, packed, row_bytes)

    def _pruning_method(self, key: Key, params: PoolingParams) -> str | None:
        """The pooling method, where it reads one token of each row and the last layer is better computed for
        those tokens alone."""
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
    """The whole bucket: the host decides by the bucket's shape, not by that of any step."""
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
    """The same for a generation step in which no row reads through block tables."""
    nothing = kv.read_slots[:0]
    return replace(kv, paged=PagedTensors(0, nothing.view(0, 0), nothing, BLOCK_SIZE))


def _is_multimodal(plan: StepPlan) -> bool:
    """Whether a step has images, whose numbers of patches no bucket knows."""
    return plan.images is not None or plan.rope_positions is not None
