from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.sparse import SparseSpec
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.layers.linear import Linear
from penstock.pooling.sparse import Splade, blocks
from penstock.types import LengthGroup, PoolingParams, Task, Variant
from tests.helpers import ints
from tests.pooling.ragged import batch_of

LENGTHS = [1, 1, 2, 2, 2, 5, 9, 30]
VOCABULARY = 50


def ragged() -> Batch:
    batch, groups, row, token = batch_of(LENGTHS), [], 0, 0
    for length in dict.fromkeys(LENGTHS):
        rows = LENGTHS.count(length)
        groups.append(LengthGroup(row, rows, length, token))
        row, token = row + rows, token + rows * length
    return replace(batch, groups=tuple(groups))


class Watched:
    """A projection that records the largest number of tokens in a call."""

    def __init__(self, weight: Tensor) -> None:
        self.linear, self.most = Linear(weight, None), 0

    def __call__(self, x: Tensor) -> Tensor:
        self.most = max(self.most, len(x))
        return self.linear(x)


def weights_of(logits: Tensor, reduce: str, logs: int) -> Tensor:
    out = logits.relu()
    for _ in range(logs):
        out = out.log1p()
    return out.amax(0) if reduce == "max" else out.sum(0)


@pytest.mark.parametrize("tile", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize("logs", [1, 2])
@pytest.mark.parametrize("rows", [None, [7, 0, 3, 2, 6]])
def test_any_tile_size_gives_the_same_terms(
    tile: int, reduce: Literal["max", "sum"], logs: int, rows: list[int] | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(sum(LENGTHS), 8, generator=generator)
    project = Watched(torch.randn(VOCABULARY, 8, generator=generator))
    splade = Splade(
        TaskHead("all", project, VOCABULARY), SparseSpec("splade", reduce, logs), tile * VOCABULARY
    )
    parts = hidden.split(LENGTHS)
    chosen = range(len(LENGTHS)) if rows is None else rows
    tokens = None
    if rows is not None:
        places = torch.arange(len(hidden), dtype=torch.int32).split(LENGTHS)
        tokens = torch.cat([places[row] for row in rows])
    variant = Variant(PoolingParams(Task.SPARSE, top_k=6), None if rows is None else ints(rows))
    out = splade(hidden, ragged(), variant, tokens)
    assert project.most <= tile
    assert out.shape == (len(chosen), 6, 2)
    for got, row in zip(out, chosen, strict=True):
        expected = weights_of(project(parts[row]), reduce, logs)
        torch.testing.assert_close(got[:, 1], expected.topk(6).values)
        torch.testing.assert_close(expected[got[:, 0].long()], got[:, 1])


def test_terms_without_weight_are_marked_absent() -> None:
    hidden = torch.ones(sum(LENGTHS), 1)
    weight = torch.tensor([[-1.0], [2.0], [0.0], [1.0]])
    splade = Splade(TaskHead("all", Linear(weight, None), 4), SparseSpec("splade"))
    out = splade(hidden, ragged(), Variant(PoolingParams(Task.SPARSE), None), None)
    expected = [[1, np.log(3)], [3, np.log(2)], [-1, 0], [-1, 0]]
    np.testing.assert_allclose(out[0], expected, rtol=1e-6)


def test_values_that_are_not_finite_reach_the_output() -> None:
    hidden = torch.ones(sum(LENGTHS), 1)
    hidden[-1] = float("nan")
    splade = Splade(TaskHead("all", Linear(torch.ones(9, 1), None), 9), SparseSpec("splade"))
    out = splade(hidden, ragged(), Variant(PoolingParams(Task.SPARSE, top_k=2), None), None)
    assert out[:-1].isfinite().all()
    assert not out[-1].isfinite().all()


def test_blocks_hold_whole_rows_and_every_row_once() -> None:
    made = list(blocks(LENGTHS, 8))
    assert [block.lengths for block in made] == [[1, 1, 2, 2, 2], [5], [9], [30]]
    assert [block.first_row for block in made] == [0, 5, 6, 7]
    assert [block.first_token for block in made] == [0, 8, 13, 22]
