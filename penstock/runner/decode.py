"""CUDA graphs of decode steps, in which every sequence runs one token.

A decode step does little on the device except read weights, and every generated token needs one. Launching
its kernels one by one would take several times as long. A graph contains the model and the logits. It also
contains sampling, unless a row needs more than a temperature and filters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from penstock.layers.batch import Batch, KVAccess, PagedTensors
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.buckets import BufferSpace, LineLayout, NoGroups, bucket_size
from penstock.runner.generation_graphs import GenerationGraphs, GraphInputs
from penstock.runner.inputs import AdapterPlan
from penstock.types import GeneratePlan, Ints

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MAX_BLOCKS = (16, 64, 256, 1024, 4096, 16384)  # blocks of the longest row
MAX_VERIFY_WARM_UP_ROWS = 128  # rows of steps with proposals; larger graphs are captured on demand


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


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Offsets of a step's arrays in one buffer of integers, each with room for the bucket's rows."""

    rows: int
    max_blocks: int
    token_ids: slice
    fed_slots: slice  # the slot whose last token is fed; -1: `token_ids` holds the token
    positions: slice
    token_slots: slice
    num_keys: slice
    slots: slice  # of the sampler
    block_tables: slice
    adapters: LineLayout | None  # None: no adapters
    max_size: int

    @classmethod
    def of(cls, rows: int, max_blocks: int, num_slots: int = 0) -> Layout:
        """`num_slots`: adapter slots; 0: no adapters."""
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
            max_size=space.size,
        )

    def size(self, plan: GeneratePlan | None = None) -> int:
        return self.max_size

    def write(self, out: Ints, plan: GeneratePlan, padding_slot: int, adapters: AdapterPlan | None) -> None:
        paged, sample, count = plan.paged, plan.sample, plan.num_rows
        out[self.token_ids][:count] = plan.token_ids
        out[self.positions][:count] = plan.positions
        out[self.token_slots][:count] = plan.kv.token_slots
        out[self.num_keys][:count] = paged.num_keys
        out[self.slots][:count] = sample.sampled_slots
        self._write_padding_rows(out, padding_slot, first_row=count)
        out[self.fed_slots][sample.fed_tokens] = sample.fed_slots
        tables = out[self.block_tables].reshape(self.rows, self.max_blocks)
        tables[:count, : paged.max_blocks] = paged.block_tables.reshape(count, paged.max_blocks)
        if adapters is not None and self.adapters is not None:
            self.adapters.write(out, adapters.of_rows(tile_lines=self.adapters.tile_lines))

    def write_padding(self, out: Ints, padding_slot: int) -> None:
        self._write_padding_rows(out, padding_slot, first_row=0)
        if self.adapters is not None:
            out[self.adapters.tiles] = 0

    def _write_padding_rows(self, out: Ints, padding_slot: int, first_row: int) -> None:
        """Rows without a sequence: token 0 at position 0, which reads one key, is written to no cache slot,
        and is sampled for `padding_slot`."""
        out[self.token_ids][first_row:] = 0
        out[self.positions][first_row:] = 0
        out[self.token_slots][first_row:] = -1
        out[self.num_keys][first_row:] = 1
        out[self.slots][first_row:] = padding_slot
        out[self.fed_slots] = -1  # for all rows; a step sets its fed rows afterwards
        out[self.block_tables].reshape(self.rows, self.max_blocks)[first_row:, 0] = 0


class DecodeGraphs(GenerationGraphs[Key, Layout]):
    kind = "decode steps"
    max_graphs = 192
    uses_before_capture = 4  # while the batch grows, most shapes are used only once

    def key_of(self, plan: GeneratePlan, adapters: AdapterPlan | None = None) -> Key | None:
        paged, sample = plan.paged, plan.sample
        if not plan.num_tokens == paged.num_rows == len(sample.sampled_tokens):
            return None
        if sample.prompts is not None or plan.num_rows > ROWS[-1] or paged.max_blocks > MAX_BLOCKS[-1]:
            return None
        rows, max_blocks = bucket_size(ROWS, plan.num_rows), bucket_size(MAX_BLOCKS, paged.max_blocks)
        samples, filters = self._sampling(sample)
        return Key(rows, max_blocks, samples, filters, 0 if adapters is None else adapters.rank)

    def _largest_key(self) -> Key:
        rows = bucket_size(ROWS, self.generator.max_rows)
        max_blocks = bucket_size(MAX_BLOCKS, self.store.keys.shape[1] // BLOCK_SIZE)
        return Key(rows, max_blocks, True, True)

    def _layout(self, key: Key, num_slots: int) -> Layout:
        return Layout.of(key.rows, key.max_blocks, num_slots)

    def _describe(self, key: Key) -> str:
        return f"decode steps of {key.rows} rows"

    def _inputs(self, key: Key, layout: Layout) -> GraphInputs:
        return GraphInputs(
            self._batch(key, layout),
            fed_slots=self.integers[layout.fed_slots],
            sampled_slots=self.integers[layout.slots],
            sampled_tokens=None,
        )

    def _batch(self, key: Key, layout: Layout) -> Batch:
        integers = self.integers
        cu_lengths = torch.arange(key.rows + 1, dtype=torch.int32, device=self.staging.device)
        tables = integers[layout.block_tables].view(key.rows, key.max_blocks)
        nothing = integers[:0]
        kv = KVAccess(
            self.store,
            cu_lengths,
            1,
            read_slots=nothing,
            token_slots=integers[layout.token_slots],
            new_key_at=nothing,
            cached_key_at=nothing,
            write_tokens=nothing,
            write_slots=nothing,
            paged=PagedTensors(key.rows, tables, integers[layout.num_keys], BLOCK_SIZE),
        )
        return Batch(
            token_ids=integers[layout.token_ids],
            positions=integers[layout.positions],
            type_ids=None,
            cu_lengths=cu_lengths,
            lengths=torch.ones_like(cu_lengths[1:]),
            skip=None,
            groups=NoGroups(),
            max_length=1,
            num_tokens=key.rows,
            num_rows=key.rows,
            kv=kv,
            adapters=self._adapters(key, layout.adapters, layout.adapters),
            is_generation=True,
        )


def warm_up_keys(max_rows: int) -> list[Key]:
    """Keys of graphs for up to `max_rows` short sequences. A few of the graphs apply filters."""
    plain = [Key(size, MAX_BLOCKS[0], True, False) for size in ROWS if size <= bucket_size(ROWS, max_rows)]
    filtering = [
        Key(key.rows, MAX_BLOCKS[0], True, True) for key in (plain[0], plain[len(plain) // 2], plain[-1])
    ]
    return [*dict.fromkeys(filtering), *reversed(plain)]


def verify_warm_up_keys(max_rows: int) -> list[Key]:
    """Keys of graphs of speculative steps with few short sequences. These graphs end with logits."""
    sizes = [size for size in ROWS if size <= min(bucket_size(ROWS, max_rows), MAX_VERIFY_WARM_UP_ROWS)]
    return [Key(size, MAX_BLOCKS[0], False, False) for size in reversed(sizes)]
