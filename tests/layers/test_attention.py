"""Attention over a ragged run against a softmax written out row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.layers.attention import BIDIRECTIONAL, attend_fused
from penstock.layers.batch import Batch
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import Share
from tests.helpers import ints, make_request


def ordered_batch(lengths: list[int]) -> Batch:
    plan = build_plan([Share(make_request("a", sorted(lengths)), ints(range(len(lengths))))])
    return Batch(
        token_ids=torch.from_numpy(plan.token_ids),
        positions=torch.from_numpy(plan.positions),
        type_ids=None,
        cu_lengths=torch.from_numpy(plan.cu_lengths),
        lengths=torch.from_numpy(plan.lengths),
        skip=None,
        groups=plan.groups,
        max_length=plan.max_length,
        num_tokens=plan.num_tokens,
        num_rows=plan.num_rows,
    )


def by_rows(qkv: Tensor, heads: int, lengths: list[int], bias: dict[int, Tensor] | None = None) -> Tensor:
    rows = []
    for row in qkv.split(sorted(lengths)):
        query, key, value = row.view(len(row), 3, heads, -1).permute(1, 2, 0, 3)  # [heads, length, dim]
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        if bias is not None:
            scores = scores + bias[len(row)]
        rows.append((scores.softmax(-1) @ value).transpose(0, 1).reshape(len(row), -1))
    return torch.cat(rows)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8), st.sampled_from([1, 3, 4]), st.sampled_from([4, 8])
)
@settings(max_examples=30, deadline=None)
def test_each_token_attends_to_its_own_row_only(lengths: list[int], heads: int, dim: int) -> None:
    qkv = torch.randn(sum(lengths), 3 * heads * dim, generator=torch.Generator().manual_seed(sum(lengths)))
    out = attend_fused(qkv, heads, ordered_batch(lengths))
    torch.testing.assert_close(out, by_rows(qkv, heads, lengths), atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_a_position_bias_is_added_to_the_scores(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    bias = {n: torch.randn(4, n, n, generator=generator) for n in set(lengths)}
    qkv = torch.randn(sum(lengths), 3 * 32, generator=generator)
    out = attend_fused(qkv, 4, ordered_batch(lengths), BIDIRECTIONAL, lambda length: bias[length])
    torch.testing.assert_close(out, by_rows(qkv, 4, lengths, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [1], [1, 2, 3]])
def test_half_precision_stays_near_the_exact_answer(lengths: list[int]) -> None:
    qkv = torch.randn(sum(lengths), 3 * 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = attend_fused(qkv, 4, ordered_batch(lengths))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), by_rows(qkv.float(), 4, lengths), atol=0.03, rtol=0.03)
