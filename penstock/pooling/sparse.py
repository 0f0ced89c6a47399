"""SPLADE: sparse term weights, computed on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoint.sparse import SparseSpec
from penstock.kernels.language import use_kernel
from penstock.kernels.splade import log1p_relu, splade_pool
from penstock.layers.adapter_state import StepAdapters
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.types import MAX_TERMS, Ints, Variant

# Maximum number of logits in memory at a time. On a CPU they should fit the caches; a GPU needs large
# products.
_MAX_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 27}


class Block(NamedTuple):
    """Consecutive whole rows whose tokens fit into one tile, or one row that is longer than a tile."""

    first_row: int
    first_token: int
    lengths: list[int]


class _BlockAdapters(NamedTuple):
    """The adapters of a block's rows."""

    adapters: StepAdapters
    slots: Ints  # [rows]

    def use(self, lengths: list[int]) -> None:
        """Set the adapters of the next lines that the head reads: `lengths` tokens of each row."""
        self.adapters.use_runs(self.slots, np.array(lengths, dtype=np.int32))


class Splade:
    """Computes the weight of each vocabulary term in a row: max or sum over tokens of log(1 + relu(logit)).

    Logits are computed and reduced tile by tile, so their memory does not depend on the batch. Only the terms
    with the largest weights are kept.
    """

    def __init__(self, head: TaskHead, spec: SparseSpec, max_logits: int | None = None) -> None:
        self.head = head
        self.spec = spec
        self.max_logits = max_logits

    def __call__(self, hidden: Tensor, batch: Batch, variant: Variant, tokens: Tensor | None) -> Tensor:
        """Return [rows, terms, 2]: token id and weight, largest weight first; absent terms are (-1, 0)."""
        if tokens is not None:
            hidden = hidden.index_select(0, tokens)
        lengths = np.repeat([g.length for g in batch.groups], [g.num_rows for g in batch.groups])
        if variant.rows is not None:
            lengths = lengths[variant.rows]
        terms = min(variant.params.top_k or MAX_TERMS, self.head.outputs)
        out = hidden.new_empty((len(lengths), terms, 2), dtype=torch.float32)
        # If all rows are selected, their starts are already on the device.
        starts = batch.cu_lengths if variant.rows is None and use_kernel(hidden) else None
        budget = self.max_logits or _MAX_LOGITS.get(hidden.device.type, _MAX_LOGITS["cuda"])
        tile = max(1, budget // self.head.outputs)
        slots = None if batch.adapters is None else batch.adapters.row_slots
        if slots is not None and variant.rows is not None:
            slots = slots[variant.rows]
        for block in blocks(lengths.tolist(), tile):
            own = None
            if slots is not None and batch.adapters is not None:
                block_slots = slots[block.first_row : block.first_row + len(block.lengths)]
                own = _BlockAdapters(batch.adapters, block_slots)
            weights, ids = self._reduced(hidden, block, tile, starts, own).topk(terms, dim=-1)
            place = out[block.first_row : block.first_row + len(block.lengths)]
            place[..., 0] = ids.masked_fill_(weights == 0, -1)
            place[..., 1] = weights
        return out

    def _reduced(
        self,
        hidden: Tensor,
        block: Block,
        tile: int,
        starts: Tensor | None,
        adapters: _BlockAdapters | None = None,
    ) -> Tensor:
        """Return fp32 weights of all terms, [rows of the block, vocabulary]."""
        at = block.first_token
        if adapters is not None:
            adapters.use(block.lengths)
        if len(block.lengths) == 1:  # may be longer than a tile
            end, parts = at + block.lengths[0], []
            for i in range(at, end, tile):
                if adapters is not None:
                    adapters.use([min(tile, end - i)])
                parts.append(self._segment(self._logits(hidden[i : min(i + tile, end)]), 1))
            total = parts[0]
            for part in parts[1:]:
                total = torch.maximum(total, part) if self.spec.reduce == "max" else total + part
        elif starts is not None:
            first, count = block.first_row, len(block.lengths)
            return splade_pool(
                self.head.project(hidden[at : at + sum(block.lengths)]),
                starts[first : first + count + 1],
                logs=self.spec.logs,
                reduce=self.spec.reduce,
                first_token=at,
            )
        else:
            logits, parts, at = self._logits(hidden[at : at + sum(block.lengths)]), [], 0
            for length, equal in groupby(block.lengths):
                rows = len(list(equal))
                parts.append(self._segment(logits[at : at + rows * length], rows))
                at += rows * length
            total = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._activate(total) if self.spec.reduce == "max" else total

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.head.project(hidden)
        return logits if self.spec.reduce == "max" else self._activate(logits)

    def _segment(self, values: Tensor, rows: int) -> Tensor:
        values = values.view(rows, -1, values.shape[-1])
        return values.amax(dim=1) if self.spec.reduce == "max" else values.sum(dim=1)

    def _activate(self, logits: Tensor) -> Tensor:
        """log(1 + relu(logit)). This is monotonic, so a maximum may be taken before it."""
        return log1p_relu(logits, self.spec.logs)


def blocks(lengths: list[int], tile: int) -> Iterator[Block]:
    """Group consecutive rows into blocks whose tokens fit into a tile."""
    block, tokens = Block(0, 0, []), 0
    for row, length in enumerate(lengths):
        if block.lengths and tokens + length > tile:
            yield block
            block, tokens = Block(row, block.first_token + tokens, []), 0
        block.lengths.append(length)
        tokens += length
    if block.lengths:
        yield block
