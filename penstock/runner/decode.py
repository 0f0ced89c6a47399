"""Decode steps, in which every sequence runs one token, as CUDA graphs: one copy in, one replay, tokens out.

A decode step does little on the device but read weights, and there is one for every generated token:
launching its kernels one by one would take several times as long. A graph holds the model, the logits and,
where no row asks for more than a temperature and filters, the choice of the token too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.sampled_tokens import insert_sampled_tokens
from penstock.kvcache.store import KVStore
from penstock.layers.adapter_state import StepAdapters, adapting
from penstock.layers.batch import Batch, KVAccess, PagedTensors
from penstock.layers.lora import AdapterSites
from penstock.models.registry import Model
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import BufferSpace, LineLayout, NoGroups
from penstock.runner.capture import Capture, Captures
from penstock.runner.generator import GeneratedTensors, Generator, verify_arrays
from penstock.runner.graphs import padded_lines
from penstock.runner.inputs import AdapterPlan
from penstock.runner.staging import Staging
from penstock.sampling.plan import EDITS, Need
from penstock.sampling.sampler import VerifyTensors
from penstock.types import GeneratePlan, Ints, SamplePlan

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MAX_BLOCKS = (16, 64, 256, 1024, 4096, 16384)  # blocks of the longest row
MAX_GRAPHS = 192
MAX_VERIFY_WARM_UP_ROWS = 128  # of steps with proposals; graphs of larger steps are captured on demand
USES_BEFORE_CAPTURE = 4  # uses of a shape; while the batch grows, most shapes are used only once
AFTER_GRAPH = Need.LOGPROBS | Need.TAIL | EDITS  # needs that are served after the graph, from its logits


class Key(NamedTuple):
    """The steps that one graph can replay."""

    rows: int
    max_blocks: int
    samples: bool  # the graph returns sampled tokens instead of logits
    filters: bool  # sampling applies top-k, top-p and min-p
    adapter_rank: int = 0  # bucket of the adapters' ranks; 0: no adapters

    def serves(self, other: Key) -> bool:
        """Whether this key's graph can replay the steps of another key."""
        fits = self.rows >= other.rows and self.max_blocks >= other.max_blocks
        fits = fits and self.adapter_rank == other.adapter_rank
        return fits and self.samples == other.samples and self.filters >= other.filters


class DecodeTensors(NamedTuple):
    """The parts of the buffer that a graph reads, [rows] each."""

    token_ids: Tensor
    fed_slots: Tensor  # the slot whose last token is fed; -1: `token_ids` holds the token
    positions: Tensor
    token_slots: Tensor
    num_keys: Tensor
    slots: Tensor  # of the sampler
    block_tables: Tensor  # [rows, max_blocks]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Offsets of a step's arrays in one buffer of integers, each with room for the bucket's rows."""

    rows: int
    max_blocks: int
    token_ids: slice
    fed_slots: slice
    positions: slice
    token_slots: slice
    num_keys: slice
    slots: slice
    block_tables: slice
    adapters: LineLayout | None  # None: no row has one
    size: int

    @classmethod
    def of(cls, rows: int, max_blocks: int, num_slots: int = 0) -> Layout:
        """`num_slots`: of adapters; 0: no row has one."""
        space = BufferSpace()
        return cls(
            rows,
            max_blocks,
            token_ids=space.take(rows),
            fed_slots=space.take(rows),
            positions=space.take(rows),
            token_slots=space.take(rows),
            num_keys=space.take(rows),
            slots=space.take(rows),
            block_tables=space.take(rows * max_blocks),
            adapters=LineLayout.of(space, rows, num_slots) if num_slots else None,
            size=space.size,
        )

    def views(self, flat: Tensor) -> DecodeTensors:
        return DecodeTensors(
            token_ids=flat[self.token_ids],
            fed_slots=flat[self.fed_slots],
            positions=flat[self.positions],
            token_slots=flat[self.token_slots],
            num_keys=flat[self.num_keys],
            slots=flat[self.slots],
            block_tables=flat[self.block_tables].view(self.rows, self.max_blocks),
        )

    def write(self, out: Ints, plan: GeneratePlan, padding_slot: int) -> None:
        """Write the step's integers, and padding rows behind them."""
        paged, sample, count = plan.paged, plan.sample, plan.num_rows
        out[self.token_ids][:count] = plan.token_ids
        out[self.positions][:count] = plan.positions
        out[self.token_slots][:count] = plan.kv.token_slots
        out[self.num_keys][:count] = paged.num_keys
        out[self.slots][:count] = sample.sampled_slots
        self.write_padding(out, padding_slot, first_row=count)
        out[self.fed_slots][sample.fed_tokens] = sample.fed_slots
        tables = out[self.block_tables].reshape(self.rows, self.max_blocks)
        tables[:count, : paged.max_blocks] = paged.block_tables.reshape(count, paged.max_blocks)

    def write_padding(self, out: Ints, padding_slot: int, first_row: int = 0) -> None:
        """Rows without a sequence: token 0 at position 0, which reads one key, is written to no cache slot,
        and is sampled for `padding_slot`."""
        out[self.token_ids][first_row:] = 0
        out[self.positions][first_row:] = 0
        out[self.token_slots][first_row:] = -1
        out[self.num_keys][first_row:] = 1
        out[self.slots][first_row:] = padding_slot
        out[self.fed_slots] = -1  # of all rows: a step sets those that are fed afterwards
        out[self.block_tables].reshape(self.rows, self.max_blocks)[first_row:, 0] = 0


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    layout: Layout
    replay: Callable[[], None]
    output: Tensor  # int32 [rows] tokens, or [rows, vocabulary] logits
    slots: Tensor  # int32 [rows]


class DecodeGraphs(Captures[Key, Graph]):
    kind = "decode steps"

    def __init__(
        self, model: Model, generator: Generator, staging: Staging, store: KVStore, capture: Capture
    ) -> None:
        super().__init__(staging, capture)
        self.model = model
        self.generator = generator
        self.store = store
        self._uses: Counter[Key] = Counter()
        # Graphs read from the addresses they were captured with, so the buffer fits the largest at once.
        rows = bucket_size(ROWS, generator.max_rows)
        max_blocks = bucket_size(MAX_BLOCKS, store.keys.shape[1] // BLOCK_SIZE)
        # None: the model takes no adapters.
        self.adapter_sites: AdapterSites | None = getattr(model, "adapter_sites", None)
        size = Layout.of(rows, max_blocks, self._num_slots).size
        self.integers = torch.zeros(size, dtype=torch.int32, device=staging.device)

    @property
    def _num_slots(self) -> int:
        return 0 if self.adapter_sites is None else self.adapter_sites.num_slots

    def key_of(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> Key | None:
        """None: such a step is never replayed."""
        paged, sample = plan.paged, plan.sample
        if not plan.num_tokens == paged.num_rows == len(sample.sampled_tokens):
            return None
        if sample.prompts is not None or plan.num_rows > ROWS[-1] or paged.max_blocks > MAX_BLOCKS[-1]:
            return None
        rows, max_blocks = bucket_size(ROWS, plan.num_rows), bucket_size(MAX_BLOCKS, paged.max_blocks)
        need = self.generator.sampler.plan.need(sample.sampled_slots)
        samples = not need & AFTER_GRAPH and sample.verify is None and use_kernel(self.generator.last)
        rank = 0 if adapters is None else adapters.rank
        return Key(rows, max_blocks, samples, samples and bool(need & Need.FILTER), rank)

    def __call__(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> GeneratedTensors | None:
        """What the generator would give for this step. None: run it without a graph."""
        key = self.key_of(plan, adapters)
        graph = None if key is None else self._graph_for(key)
        if key is None or graph is None:
            return None
        sampler, sample, count = self.generator.sampler, plan.sample, plan.num_rows
        sampler.flush()
        pinned = self.staging.pinned_ints(graph.layout.size)
        graph.layout.write(pinned.numpy(), plan, self.generator.padding_slot)
        if graph.layout.adapters is not None and adapters is not None:
            graph.layout.adapters.write(
                pinned.numpy(), adapters.of_rows(tile_lines=graph.layout.adapters.tile_lines)
            )
        self.integers[: graph.layout.size].copy_(pinned, non_blocking=True)
        graph.replay()
        self.replays += 1
        if not key.samples:
            return choose(self.generator, self.staging, graph.output[:count], sample, graph.slots[:count])
        sampler.plan.step(sample.sampled_slots)
        return GeneratedTensors(graph.output[:count])

    def _graph_for(self, key: Key) -> Graph | None:
        """The key's own graph; one captured now, if its shape keeps coming; or a larger one that fits."""
        if (graph := self.captured.get(key)) is not None:
            return graph
        self._uses[key] += 1
        if self._uses[key] > USES_BEFORE_CAPTURE and (graph := self._capture(key)) is not None:
            return graph
        serving = [other for other in self.captured if other.serves(key)]
        return self.captured[min(serving)] if serving else None

    def ensure(self, key: Key) -> Graph | None:
        """The graph for such steps, captured now if it was not; None if that fails."""
        return self.captured.get(key) or self._capture(key)

    def _capture(self, key: Key) -> Graph | None:
        if key in self.refused or self.gave_up or len(self.captured) >= MAX_GRAPHS:
            return None
        if self.clock() < self._not_before:
            return None
        return self._try_capture(key, lambda: self._make_graph(key), f"decode steps of {key.rows} rows")

    def _make_graph(self, key: Key) -> Graph:
        layout = Layout.of(key.rows, key.max_blocks, self._num_slots if key.adapter_rank else 0)
        # A capture runs its work once before, which must change no sequence: so it runs padding rows. They
        # use one pinned buffer more than a step does, so copies still in flight have to end first.
        if self.staging.device.type == "cuda":
            torch.cuda.current_stream(self.staging.device).synchronize()
        pinned = self.staging.pinned_ints(layout.size)
        layout.write_padding(pinned.numpy(), self.generator.padding_slot)
        if layout.adapters is not None:
            pinned.numpy()[layout.adapters.tiles] = 0
        self.integers[: layout.size].copy_(pinned, non_blocking=True)
        tensors = layout.views(self.integers)
        adapters = self._adapters(key, layout)
        batch, generator = self._batch(key, tensors, adapters), self.generator

        def work() -> list[Tensor]:
            insert_sampled_tokens(tensors.token_ids, tensors.fed_slots, generator.last)
            with adapting(adapters):
                logits = generator.head.project(self.model(batch))
            if not key.samples:
                return [logits]
            return [generator.sampler.plain(logits, tensors.slots, key.filters)]

        replay, (output,) = self.capture(work)
        return Graph(layout, replay, output, tensors.slots)

    def _adapters(self, key: Key, layout: Layout) -> StepAdapters | None:
        if layout.adapters is None or self.adapter_sites is None:
            return None
        lines = padded_lines(layout.adapters, self.integers)
        return StepAdapters(self.adapter_sites.state, key.adapter_rank, lines, lines)

    def _batch(self, key: Key, tensors: DecodeTensors, adapters: StepAdapters | None) -> Batch:
        cu_lengths = torch.arange(key.rows + 1, dtype=torch.int32, device=self.staging.device)
        nothing = tensors.slots[:0]
        kv = KVAccess(
            self.store,
            cu_lengths,
            1,
            read_slots=nothing,
            token_slots=tensors.token_slots,
            new_key_at=nothing,
            cached_key_at=nothing,
            write_tokens=nothing,
            write_slots=nothing,
            paged=PagedTensors(key.rows, tensors.block_tables, tensors.num_keys, BLOCK_SIZE),
        )
        return Batch(
            token_ids=tensors.token_ids,
            positions=tensors.positions,
            type_ids=None,
            cu_lengths=cu_lengths,
            lengths=torch.ones_like(cu_lengths[1:]),
            skip=None,
            groups=NoGroups(),
            max_length=1,
            num_tokens=key.rows,
            num_rows=key.rows,
            kv=kv,
            adapters=adapters,
            is_generation=True,
        )


def bucket_size(sizes: tuple[int, ...], needed: int) -> int:
    return sizes[min(bisect_left(sizes, needed), len(sizes) - 1)]


def choose(
    generator: Generator, staging: Staging, logits: Tensor, sample: SamplePlan, slots: Tensor
) -> GeneratedTensors:
    """Sample from the logits of a graph, and verify proposals if the step has any."""
    verify = None
    if sample.verify is not None:
        verify = VerifyTensors(*staging.send(verify_arrays(sample.verify)))
    return generator.choose(logits, sample, slots, verify)


def warm_up_keys(max_rows: int) -> list[Key]:
    """Graphs for short sequences, up to `max_rows` at a time; a few of them apply filters."""
    plain = [Key(size, MAX_BLOCKS[0], True, False) for size in ROWS if size <= bucket_size(ROWS, max_rows)]
    filtering = [
        Key(key.rows, MAX_BLOCKS[0], True, True) for key in (plain[0], plain[len(plain) // 2], plain[-1])
    ]
    return [*dict.fromkeys(filtering), *reversed(plain)]


def verify_warm_up_keys(max_rows: int) -> list[Key]:
    """Keys of graphs of speculative steps with few short sequences. These graphs end with logits."""
    sizes = [size for size in ROWS if size <= min(bucket_size(ROWS, max_rows), MAX_VERIFY_WARM_UP_ROWS)]
    return [Key(size, MAX_BLOCKS[0], False, False) for size in reversed(sizes)]
