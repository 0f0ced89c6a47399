"""CUDA graphs of mixed steps, with decodes and prompt chunks.

Decodes read their keys through block tables, prompts through a list of slots, as in an eager step. Tokens are
contiguous: first one of each decode, then those of the prompts. Padding decodes have no keys, and the kernel
writes nothing for them. Attention of prompts and of decodes are parallel branches of the graph.

A row may sample at any of its tokens: the indices of tokens whose logits are read are an input of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.kernels.language import use_kernel
from penstock.layers.batch import Batch, KVAccess, PagedTensors
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import BufferSpace, LineLayout, NoGroups, bucket_size, fill
from penstock.runner.generation_graphs import GenerationGraphs, Graph, GraphInputs
from penstock.runner.inputs import AdapterPlan
from penstock.scheduler.prefill_budget import STEP_SIZES
from penstock.types import GeneratePlan, Ints

DECODES = (8, 16, 32, 64, 128, 256, 512, 1024)  # the fewer decodes, the more parts attention splits keys into
PROMPTS = (4, 16, 64, 256, 1024)  # rows of more than one token
SHORT_PROMPTS = (16, 64, 256, 1024)  # tokens of the longest prompt chunk, if there are many rows
MAX_LONG_PROMPTS = 16  # up to here, prompts may have any length; most attention programs have no work
MAX_BLOCKS = (256, 1024, 4096, 16384)  # blocks of the longest decode
MAX_CACHED_KEYS = 1 << 17  # cached keys of all prompts of a step
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
    cu_lengths: slice  # [decodes + prompts + 1]; entries of decodes are not read
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

    @property
    def max_size(self) -> int:
        return int(self.read_slots.stop)

    def size(self, plan: GeneratePlan | None = None) -> int:
        num_cached = 0 if plan is None else len(plan.kv.read_slots)
        return int(self.read_slots.start) + num_cached

    def write(self, out: Ints, plan: GeneratePlan, padding_slot: int, adapters: AdapterPlan | None) -> None:
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
        out[: self.read_slots.start] = 0
        out[self.token_slots] = out[self.fed_slots] = -1
        out[self.sampled_slots] = padding_slot


class MixedGraphs(GenerationGraphs[Key, Layout]):
    kind = "mixed steps of prompts and decodes"
    max_graphs = 128
    uses_before_capture = 2  # a capture takes about as much host time as three eager steps

    @property
    def is_usable(self) -> bool:
        """Whether mixed steps have graphs, or may get them. An eager mixed step takes several times as long,
        because it waits for the host."""
        return not self.gave_up and (bool(self.captured) or self.clock() >= self._not_before)

    def key_of(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> Key | None:
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
        samples, filters = self._sampling(sample)
        rank = 0 if adapters is None else adapters.rank
        length = _length_bucket(prompts, tokens, plan.max_length)
        return Key(tokens, decodes, prompts, length, max_blocks, sampled, samples, filters, rank)

    def ensure(self, key: Key) -> Graph[Layout] | None:
        self._not_before = 0.0
        return super().ensure(key)

    def _capture(self, key: Key) -> Graph[Layout] | None:
        began = self.clock()
        graph = super()._capture(key)
        if graph is not None:
            now = self.clock()
            self._not_before = now + min(_CAPTURE_PAUSE * (now - began), _MAX_PAUSE_S)
        return graph

    def _largest_key(self) -> Key:
        rows = bucket_size(DECODES, self.generator.max_rows)
        max_blocks = bucket_size(MAX_BLOCKS, self.store.keys.shape[1] // BLOCK_SIZE)
        return Key(STEP_SIZES[-1], rows, PROMPTS[-1], 0, max_blocks, STEP_SIZES[-1], True, True)

    def _layout(self, key: Key, num_slots: int) -> Layout:
        return Layout.of(key, num_slots)

    def _describe(self, key: Key) -> str:
        return f"steps of {key.tokens} tokens, {key.decodes} of them decodes"

    def _inputs(self, key: Key, layout: Layout) -> GraphInputs:
        integers = self.integers
        return GraphInputs(
            self._batch(key, layout),
            fed_slots=integers[layout.fed_slots],
            sampled_slots=integers[layout.sampled_slots],
            sampled_tokens=integers[layout.sampled_tokens],
        )

    def _batch(self, key: Key, layout: Layout) -> Batch:
        integers = self.integers
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
            lengths=cu_lengths[1:],  # not read in generation steps
            skip=None,
            groups=NoGroups(),
            max_length=key.max_length,
            num_tokens=key.tokens,
            num_rows=key.decodes + key.prompts,
            kv=kv,
            adapters=self._adapters(key, layout.token_adapters, layout.sampled_adapters),
            is_generation=True,
        )


def _length_bucket(prompts: int, tokens: int, max_length: int) -> int:
    """The longest prompt chunk that a graph allows. It decides how many programs attention has."""
    if prompts <= MAX_LONG_PROMPTS:
        return tokens
    return min(tokens, next((size for size in SHORT_PROMPTS if size >= max_length), tokens))


def warm_up_keys(max_rows: int) -> list[Key]:
    """Keys of graphs for the first prompts that arrive while sequences decode."""
    # Each number of decodes needs another variant of the attention kernel, which is compiled here.
    shapes = [(256, decodes, PROMPTS[0]) for decodes in (16, 64, 32, 8)]
    shapes += [(tokens, decodes, PROMPTS[0]) for tokens in (192, 512, 384, 128, 768) for decodes in (16, 64)]
    shapes += [(tokens, decodes, PROMPTS[1]) for tokens in (256, 512) for decodes in (16, 64)]
    return [
        Key(tokens, decodes, prompts, tokens, MAX_BLOCKS[0], decodes + prompts, True, False)
        for tokens, decodes, prompts in shapes
        if decodes <= bucket_size(DECODES, max_rows)
    ]
