"""CUDA graphs of mixed steps, with decodes and prompt chunks: one copy in, one replay, tokens out.

Decodes read their keys through block tables, prompts by a run of slots, as in an eager step. Tokens are
contiguous: first one of each decode, then those of the prompts. Padding decodes have no keys, and the kernel
writes nothing for them. Attention of prompts and of decodes are parallel branches of the graph.

A row may sample at any of its tokens: the indices of tokens whose logits are read are an input of the graph.
"""

from __future__ import annotations

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
from penstock.runner.buckets import BufferSpace, LineLayout, NoGroups, fill
from penstock.runner.capture import Capture, Captures
from penstock.runner.decode import AFTER_GRAPH, bucket_size, choose
from penstock.runner.generator import GeneratedTensors, Generator
from penstock.runner.graphs import padded_lines
from penstock.runner.inputs import AdapterPlan
from penstock.runner.staging import Staging
from penstock.sampling.plan import Need
from penstock.scheduler.prefill_budget import STEP_SIZES
from penstock.types import GeneratePlan, Ints

DECODES = (8, 16, 32, 64, 128, 256, 512, 1024)  # fewer decodes: attention splits their keys into more parts
PROMPTS = (4, 16, 64, 256, 1024)  # rows of more than one token
SHORT_PROMPTS = (16, 64, 256, 1024)  # tokens of the longest prompt chunk, if there are many rows
MAX_LONG_PROMPTS = 16  # up to here, rows may have any length; most attention programs then have no work
MAX_BLOCKS = (256, 1024, 4096, 16384)  # blocks of the longest decode
MAX_CACHED_KEYS = 1 << 17  # of all prompts of a step
MAX_GRAPHS = 128
USES_BEFORE_CAPTURE = 2  # uses of a shape; a capture takes about as much host time as three eager steps
MAX_OVERSIZE = 1.5  # tokens of a graph, as a multiple of those of a step that it replays
ALWAYS_SERVES = 512  # a graph of up to this many tokens replays smaller steps of any size
_CAPTURE_PAUSE = 4.0  # pause between captures, as a multiple of a capture's duration, because decodes wait
_MAX_PAUSE_S = 1.0  # longest pause, even after a capture that compiled kernels


class Key(NamedTuple):
    """The steps that one graph can replay."""

    tokens: int
    decodes: int
    prompts: int
    max_length: int  # tokens of the longest prompt chunk
    max_blocks: int
    sampled: int  # tokens whose logits are read
    samples: bool  # the graph returns sampled tokens instead of logits
    filters: bool  # sampling applies top-k, top-p and min-p
    adapter_rank: int = 0  # bucket of the adapters' ranks; 0: no adapters

    def serves(self, other: Key) -> bool:
        """Whether this key's graph can replay the steps of another key at little extra device time."""
        fits = all(size >= needed for size, needed in zip(self[:6], other[:6], strict=True))
        fits = fits and self.tokens <= max(ALWAYS_SERVES, MAX_OVERSIZE * other.tokens)
        same = self.samples == other.samples and self.adapter_rank == other.adapter_rank
        return fits and same and self.filters >= other.filters


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Offsets of a step's arrays in one buffer of integers, each with room for the graph's shape."""

    key: Key
    token_ids: slice
    fed_slots: slice  # the slot whose last token is fed; -1: `token_ids` holds the token
    positions: slice
    token_slots: slice
    num_keys: slice  # [decodes]
    block_tables: slice  # [decodes · max_blocks]
    cu_lengths: slice  # [decodes + prompts + 1], of which those of the decodes are not read
    cu_keys: slice  # the same
    sampled_tokens: slice
    sampled_slots: slice
    token_adapters: LineLayout | None  # None: no adapters
    sampled_adapters: LineLayout | None
    read_slots: slice  # last, so that only the used part is copied

    @classmethod
    def of(cls, key: Key, num_slots: int = 0) -> Layout:
        """`num_slots`: adapter slots; 0: no adapters."""
        space, rows = BufferSpace(), key.decodes + key.prompts + 1
        return cls(
            key,
            token_ids=space.take(key.tokens),
            fed_slots=space.take(key.tokens),
            positions=space.take(key.tokens),
            token_slots=space.take(key.tokens),
            num_keys=space.take(key.decodes),
            block_tables=space.take(key.decodes * key.max_blocks),
            cu_lengths=space.take(rows),
            cu_keys=space.take(rows),
            sampled_tokens=space.take(key.sampled),
            sampled_slots=space.take(key.sampled),
            token_adapters=LineLayout.of(space, key.tokens, num_slots) if num_slots else None,
            sampled_adapters=LineLayout.of(space, key.sampled, num_slots) if num_slots else None,
            read_slots=space.take(MAX_CACHED_KEYS),
        )

    def size(self, num_cached: int) -> int:
        """Number of integers of a step with this many cached keys."""
        return int(self.read_slots.start) + num_cached

    def write(self, out: Ints, plan: GeneratePlan, padding_slot: int, adapters: AdapterPlan | None) -> None:
        """Write the step's integers, with padding after each array."""
        paged, sample, kv, count = plan.paged, plan.sample, plan.kv, plan.paged.num_rows
        fill(out[self.token_ids], plan.token_ids)
        fill(out[self.positions], plan.positions)
        fill(out[self.token_slots], kv.token_slots, padding=-1)
        out[self.fed_slots] = -1
        out[self.fed_slots][sample.fed_tokens] = sample.fed_slots
        fill(out[self.num_keys], paged.num_keys)
        tables = out[self.block_tables].reshape(self.key.decodes, self.key.max_blocks)
        tables[:count, : paged.max_blocks] = paged.block_tables.reshape(count, paged.max_blocks)
        prompts = slice(self.key.decodes, None)
        fill(out[self.cu_lengths][prompts], plan.cu_lengths[count:], padding=plan.num_tokens)
        fill(out[self.cu_keys][prompts], kv.cu_keys[count:], padding=int(kv.cu_keys[-1]))
        fill(out[self.sampled_tokens], sample.sampled_tokens)
        fill(out[self.sampled_slots], sample.sampled_slots, padding=padding_slot)
        out[self.read_slots.start :][: len(kv.read_slots)] = kv.read_slots
        if adapters is None or self.token_adapters is None or self.sampled_adapters is None:
            return
        self.token_adapters.write(out, adapters.of_tokens(plan, self.token_adapters.tile_lines))
        lines = adapters.of_rows(sample.sampled_rows, self.sampled_adapters.tile_lines)
        self.sampled_adapters.write(out, lines)

    def write_padding(self, out: Ints, padding_slot: int) -> None:
        """A step of padding only: it writes nothing to the cache, and only `padding_slot` samples."""
        out[: self.read_slots.start] = 0
        out[self.token_slots] = out[self.fed_slots] = -1
        out[self.sampled_slots] = padding_slot


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    layout: Layout
    replay: Callable[[], None]
    output: Tensor  # int32 [sampled] tokens, or [sampled, vocabulary] logits
    sampled_slots: Tensor  # int32 [sampled]


class MixedGraphs(Captures[Key, Graph]):
    kind = "mixed steps of prompts and decodes"

    def __init__(
        self, model: Model, generator: Generator, staging: Staging, store: KVStore, capture: Capture
    ) -> None:
        super().__init__(staging, capture)
        self.model = model
        self.generator = generator
        self.store = store
        self._uses: Counter[Key] = Counter()
        # None: the model takes no adapters.
        self.adapter_sites: AdapterSites | None = getattr(model, "adapter_sites", None)
        # Graphs read from the addresses they were captured with, so the buffer fits the largest at once.
        rows = bucket_size(DECODES, generator.max_rows)
        max_blocks = bucket_size(MAX_BLOCKS, store.keys.shape[1] // BLOCK_SIZE)
        largest = Key(STEP_SIZES[-1], rows, PROMPTS[-1], 0, max_blocks, STEP_SIZES[-1], True, True)
        size = Layout.of(largest, self._num_slots).size(MAX_CACHED_KEYS)
        self.integers = torch.zeros(size, dtype=torch.int32, device=staging.device)

    @property
    def _num_slots(self) -> int:
        return 0 if self.adapter_sites is None else self.adapter_sites.num_slots

    @property
    def is_usable(self) -> bool:
        """Whether mixed steps have graphs, or may get them. An eager mixed step takes several times as long,
        because it waits for the host."""
        return not self.gave_up and (bool(self.captured) or self.clock() >= self._not_before)

    def key_of(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> Key | None:
        """The key of a step; None: the step always runs eagerly."""
        paged, sample = plan.paged, plan.sample
        num_prompts, num_sampled = plan.num_rows - paged.num_rows, len(sample.sampled_tokens)
        if not paged.num_rows or not num_prompts or not num_sampled or sample.prompts is not None:
            return None
        if plan.images is not None or plan.rope_positions is not None or not use_kernel(self.store.keys):
            return None
        decodes, prompts = bucket_size(DECODES, paged.num_rows), bucket_size(PROMPTS, num_prompts)
        tokens = bucket_size(STEP_SIZES, max(plan.num_tokens, decodes + 1))
        max_blocks = bucket_size(MAX_BLOCKS, paged.max_blocks)
        sampled = decodes + prompts
        if num_sampled > sampled:  # rows that sample at several tokens
            sampled = bucket_size(STEP_SIZES, num_sampled)
        if paged.num_rows > decodes or num_prompts > prompts or paged.max_blocks > max_blocks:
            return None
        if plan.num_tokens > tokens or decodes >= tokens or num_sampled > sampled:
            return None
        if len(plan.kv.read_slots) > MAX_CACHED_KEYS:
            return None
        need = self.generator.sampler.plan.need(sample.sampled_slots)
        samples = not need & AFTER_GRAPH and sample.verify is None and use_kernel(self.generator.last)
        rank = 0 if adapters is None else adapters.rank
        length = _length_bucket(prompts, tokens, plan.max_length)
        filters = samples and bool(need & Need.FILTER)
        return Key(tokens, decodes, prompts, length, max_blocks, sampled, samples, filters, rank)

    def __call__(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> GeneratedTensors | None:
        """Replay the step and return what the generator would return. None: run it eagerly."""
        key = self.key_of(plan, adapters)
        graph = None if key is None else self._graph_for(key)
        if key is None or graph is None:
            return None
        sampler, sample, count = self.generator.sampler, plan.sample, len(plan.sample.sampled_tokens)
        sampler.flush()
        size = graph.layout.size(len(plan.kv.read_slots))
        pinned = self.staging.pinned_ints(size)
        graph.layout.write(pinned.numpy(), plan, self.generator.padding_slot, adapters)
        self.integers[:size].copy_(pinned, non_blocking=True)
        graph.replay()
        self.replays += 1
        if not key.samples:
            slots = graph.sampled_slots[:count]
            return choose(self.generator, self.staging, graph.output[:count], sample, slots)
        sampler.plan.step(sample.sampled_slots)
        return GeneratedTensors(graph.output[:count])

    def _graph_for(self, key: Key) -> Graph | None:
        """The key's own graph, captured now if its shape is frequent, or a larger graph that can replay
        it."""
        if (graph := self.captured.get(key)) is not None:
            return graph
        self._uses[key] += 1
        if self._uses[key] > USES_BEFORE_CAPTURE and (graph := self._capture(key)) is not None:
            return graph
        serving = [other for other in self.captured if other.serves(key)]
        return self.captured[min(serving)] if serving else None

    def ensure(self, key: Key) -> Graph | None:
        """The graph of this key, captured now if necessary; None if the capture fails."""
        self._not_before = 0.0
        return self.captured.get(key) or self._capture(key)

    def _capture(self, key: Key) -> Graph | None:
        if key in self.refused or self.gave_up or len(self.captured) >= MAX_GRAPHS:
            return None
        if (began := self.clock()) < self._not_before:
            return None
        steps = f"steps of {key.tokens} tokens, {key.decodes} of them decodes"
        graph = self._try_capture(key, lambda: self._make_graph(key), steps)
        if graph is not None:
            now = self.clock()
            self._not_before = now + min(_CAPTURE_PAUSE * (now - began), _MAX_PAUSE_S)
        return graph

    def _make_graph(self, key: Key) -> Graph:
        layout = Layout.of(key, self._num_slots if key.adapter_rank else 0)
        # A capture first runs its work once, which must not change any sequence. Its padding uses one more
        # pinned buffer than a step, so copies in flight have to finish first.
        if self.staging.device.type == "cuda":
            torch.cuda.current_stream(self.staging.device).synchronize()
        pinned = self.staging.pinned_ints(layout.size(0))
        layout.write_padding(pinned.numpy(), self.generator.padding_slot)
        self.integers[: layout.size(0)].copy_(pinned, non_blocking=True)
        integers, generator = self.integers, self.generator
        batch, slots = self._batch(layout), integers[layout.sampled_slots]
        sampled, adapters = integers[layout.sampled_tokens], batch.adapters

        def work() -> list[Tensor]:
            insert_sampled_tokens(batch.token_ids, integers[layout.fed_slots], generator.last)
            with adapting(adapters):
                hidden = self.model(batch)
                if adapters is not None:
                    adapters.use("rows")
                logits = generator.head.project(hidden.index_select(0, sampled))
            return [generator.sampler.plain(logits, slots, key.filters) if key.samples else logits]

        replay, (output,) = self.capture(work)
        return Graph(layout, replay, output, slots)

    def _adapters(self, layout: Layout) -> StepAdapters | None:
        tokens, sampled = layout.token_adapters, layout.sampled_adapters
        if tokens is None or sampled is None or self.adapter_sites is None:
            return None
        lines = padded_lines(tokens, self.integers), padded_lines(sampled, self.integers)
        return StepAdapters(self.adapter_sites.state, layout.key.adapter_rank, *lines)

    def _batch(self, layout: Layout) -> Batch:
        key, integers = layout.key, self.integers
        tables = integers[layout.block_tables].view(key.decodes, key.max_blocks)
        cu_lengths = integers[layout.cu_lengths]
        nothing = cu_lengths[:0]
        kv = KVAccess(
            self.store,
            integers[layout.cu_keys],
            MAX_CACHED_KEYS,
            read_slots=integers[layout.read_slots],
            token_slots=integers[layout.token_slots],
            new_key_at=nothing,
            cached_key_at=nothing,
            write_tokens=nothing,
            write_slots=nothing,
            paged=PagedTensors(key.decodes, tables, integers[layout.num_keys], BLOCK_SIZE),
        )
        return Batch(
            token_ids=integers[layout.token_ids],
            positions=integers[layout.positions],
            type_ids=None,
            cu_lengths=cu_lengths,
            lengths=cu_lengths[1:],  # lengths of rows that generate are not read
            skip=None,
            groups=NoGroups(),
            max_length=key.max_length,
            num_tokens=key.tokens,
            num_rows=key.decodes + key.prompts,
            kv=kv,
            adapters=self._adapters(layout),
            is_generation=True,
        )


def _length_bucket(prompts: int, tokens: int, max_length: int) -> int:
    """How long a piece of a prompt may be in a graph. It decides how many programs attention has."""
    if prompts <= MAX_LONG_PROMPTS:
        return tokens
    return min(tokens, next((size for size in SHORT_PROMPTS if size >= max_length), tokens))


def warm_up_keys(max_rows: int) -> list[Key]:
    """Graphs for the first prompts that come beside decodes."""
    # Each number of decodes needs another variant of the attention kernel, which is compiled here.
    shapes = [(256, decodes, PROMPTS[0]) for decodes in (16, 64, 32, 8)]
    shapes += [(tokens, decodes, PROMPTS[0]) for tokens in (192, 512, 384, 128, 768) for decodes in (16, 64)]
    shapes += [(tokens, decodes, PROMPTS[1]) for tokens in (256, 512) for decodes in (16, 64)]
    return [
        Key(tokens, decodes, prompts, tokens, MAX_BLOCKS[0], decodes + prompts, True, False)
        for tokens, decodes, prompts in shapes
        if decodes <= bucket_size(DECODES, max_rows)
    ]
