"""Pooling methods against plain loops over rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.checkpoint.pooling import POOLING_METHODS
from penstock.pooling.methods import METHODS
from tests.pooling.ragged import batch_of


def _weighted(row: Tensor, skip: int) -> Tensor:
    total, weights = torch.zeros(row.shape[1]), 0.0
    for i in range(skip, len(row)):
        total += (i + 1) * row[i]
        weights += i + 1
    return total / weights


def _maximum(row: Tensor, skip: int) -> Tensor:
    best = row[skip].clone()
    for token in row[skip + 1 :]:
        best = torch.where(token > best, token, best)
    return best


# method → (tokens of one row [length, width], tokens to leave out) → [width]
LOOPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda row, skip: row[skip],
    "last": lambda row, skip: row[-1],
    "mean": lambda row, skip: sum(row[skip:], torch.zeros(row.shape[1])) / (len(row) - skip),
    "mean_sqrt_len": lambda row, skip: (
        sum(row[skip:], torch.zeros(row.shape[1])) / math.sqrt(len(row) - skip)
    ),
    "weighted_mean": _weighted,
    "max": _maximum,
}


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[int], list[int] | None, int, int]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    skip = draw(st.none() | st.just([draw(st.integers(0, length - 1)) for length in lengths]))
    return lengths, skip, draw(st.integers(1, 9)), draw(st.integers(0, 2**16))


def by_loop(method: str, hidden: Tensor, lengths: list[int], skip: list[int] | None) -> Tensor:
    rows = hidden.float().split(lengths)
    return torch.stack([LOOPS[method](row, skip[i] if skip else 0) for i, row in enumerate(rows)])


def test_every_method_that_a_model_may_name_exists_and_is_tested() -> None:
    assert set(METHODS) == set(POOLING_METHODS) == set(LOOPS)


@pytest.mark.parametrize("method", METHODS)
@given(ragged())
@settings(max_examples=60, deadline=None)
def test_a_method_equals_a_plain_loop_over_ragged_rows(
    method: str, shape: tuple[list[int], list[int] | None, int, int]
) -> None:
    lengths, skip, width, seed = shape
    hidden = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    pooled = METHODS[method](hidden, batch_of(lengths, skip))
    torch.testing.assert_close(pooled, by_loop(method, hidden, lengths, skip), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_hidden_states_are_accumulated_in_fp32(method: str) -> None:
    """A bfloat16 sum of 4,000 numbers near 1 stops growing at 256."""
    lengths = [4000, 3]
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.1 * torch.randn(sum(lengths), 16, generator=generator)).to(torch.bfloat16)
    pooled = METHODS[method](hidden, batch_of(lengths))
    assert pooled.dtype == torch.float32
    wanted = by_loop(method, hidden.double().float(), lengths, None)
    torch.testing.assert_close(pooled, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_row_pools_to_the_same_vector_alone_and_in_a_batch(method: str) -> None:
    hidden = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    together = METHODS[method](hidden, batch_of([10, 4, 16]))
    alone = METHODS[method](hidden[10:14], batch_of([4]))
    torch.testing.assert_close(together[1:2], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", ["cls", "mean", "mean_sqrt_len", "weighted_mean", "max"])
def test_skipped_tokens_do_not_matter(method: str) -> None:
    hidden = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))
    changed = hidden.clone()
    changed[:3] = 1000.0
    changed[7:9] = -1000.0
    batch = batch_of([7, 5], [3, 2])
    torch.testing.assert_close(METHODS[method](hidden, batch), METHODS[method](changed, batch))
    assert not torch.allclose(METHODS[method](hidden, batch_of([7, 5])), METHODS[method](hidden, batch))


@pytest.mark.parametrize("method", ["cls", "last"])
def test_an_empty_row_in_front_reads_no_token_before_the_first(method: str) -> None:
    """A CUDA graph is captured with empty rows in front, where index -1 would be an illegal access."""
    hidden = torch.randn(4, 8)
    pooled = METHODS[method](hidden, batch_of([0, 4]))
    assert torch.equal(pooled[1], hidden[0 if method == "cls" else 3])
