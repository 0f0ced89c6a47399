"""Attention over ragged rows against an explicit softmax, row by row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.layers import attention
from penstock.layers.attention import BIDIRECTIONAL, CAUSAL, AttentionKind, attend_fused
from penstock.layers.distance_bias import DistanceBias
from tests.layers.inputs import ordered_batch


def by_rows(
    qkv: Tensor,
    heads: int,
    lengths: list[int],
    bias: dict[int, Tensor] | None = None,
    keys: list[int] | None = None,
    window: int | None = None,
) -> Tensor:
    rows = []
    for number, row in enumerate(qkv.split(sorted(lengths))):
        query, key, value = row.view(len(row), 3, heads, -1).permute(1, 2, 0, 3)  # [heads, length, dim]
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        if bias is not None:
            scores = scores + bias[len(row)]
        place = torch.arange(len(row))
        hidden = torch.zeros(len(row), len(row), dtype=torch.bool)
        if keys is not None:
            hidden |= place[None, :] >= keys[number]
        if window is not None:
            hidden |= (place[None, :] - place[:, None]).abs() > window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        weights = weights.nan_to_num(0.0)  # a token without keys gets zeros
        rows.append((weights @ value).transpose(0, 1).reshape(len(row), -1))
    return torch.cat(rows)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8), st.sampled_from([1, 3, 4]), st.sampled_from([4, 8])
)
@settings(max_examples=30, deadline=None)
def test_each_token_attends_to_its_own_row_only(lengths: list[int], heads: int, dim: int) -> None:
    qkv = torch.randn(sum(lengths), 3 * heads * dim, generator=torch.Generator().manual_seed(sum(lengths)))
    out = attend_fused(qkv, heads, ordered_batch(lengths))
    torch.testing.assert_close(out, by_rows(qkv, heads, lengths), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reach", [0, 5])
def test_a_bias_by_distance_reaches_rows_of_any_length(reach: int) -> None:
    """The longest row is computed in parts."""
    lengths, keys = [3, 9, 40, 600], [3, 4, 40, 550]
    values = torch.linspace(-1, 1, 2 * (2 * reach + 1)).view(2, -1) if reach else torch.tensor([0.5, 0.1])
    bias = DistanceBias(values, reach)
    whole = {}
    for length in lengths:
        ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
        near = (
            values[:, ahead.clamp(-reach, reach) + reach] if reach else -values[:, None, None] * ahead.abs()
        )
        whole[length] = near
    qkv = torch.randn(sum(lengths), 3 * 16, generator=torch.Generator().manual_seed(1))
    out = attend_fused(qkv, 2, ordered_batch(lengths, keys), AttentionKind(bias=bias))
    torch.testing.assert_close(out, by_rows(qkv, 2, lengths, whole, keys), atol=1e-5, rtol=1e-5)


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


LIMITED = [3, 3, 3, 5, 20, 20, 20, 70, 70]
KEYS = [1, 3, 3, 5, 4, 9, 20, 7, 70]


def _limited_qkv(dim: int = 8) -> Tensor:
    return torch.randn(sum(LIMITED), 3 * 4 * dim, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("window", [None, 4, 64, 100])
def test_rows_with_a_key_limit_attend_to_their_leading_tokens(window: int | None) -> None:
    qkv, kind = _limited_qkv(), AttentionKind(window=window)
    out = attend_fused(qkv, 4, ordered_batch(LIMITED, KEYS), kind)
    torch.testing.assert_close(out, by_rows(qkv, 4, LIMITED, None, KEYS, window), atol=1e-5, rtol=1e-5)


def test_a_key_limit_cuts_the_position_bias_too() -> None:
    qkv, generator = _limited_qkv(), torch.Generator().manual_seed(4)
    bias = {n: torch.randn(4, n, n, generator=generator) for n in set(LIMITED)}
    out = attend_fused(qkv, 4, ordered_batch(LIMITED, KEYS), BIDIRECTIONAL, lambda length: bias[length])
    torch.testing.assert_close(out, by_rows(qkv, 4, LIMITED, bias, KEYS), atol=1e-5, rtol=1e-5)


def test_a_key_limit_of_a_causal_model_hides_later_tokens_too() -> None:
    qkv = _limited_qkv()
    future = {n: torch.full((4, n, n), float("-inf")).triu(1) for n in set(LIMITED)}
    out = attend_fused(qkv, 4, ordered_batch(LIMITED, KEYS), CAUSAL)
    torch.testing.assert_close(out, by_rows(qkv, 4, LIMITED, future, KEYS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 4, 64, 100])
def test_one_call_for_all_rows_and_one_for_the_limited(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA path, with a fake library function that measures windows from the end of a row."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", _varlen_stand_in)
    qkv, kind = _limited_qkv(), AttentionKind(window=window)
    query, key, value = qkv.view(len(qkv), 3, 4, -1).unbind(1)
    out = attention._on_cuda(query, key, value, ordered_batch(LIMITED, KEYS), kind)
    torch.testing.assert_close(out, by_rows(qkv, 4, LIMITED, None, KEYS, window), atol=1e-5, rtol=1e-5)


def _varlen_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_lengths: Tensor,
    cu_keys: Tensor,
    max_length: int,
    max_keys: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int],
) -> Tensor:
    assert max_length == cu_lengths.diff().max() and max_keys == cu_keys.diff().max()
    out = torch.empty_like(query)
    for row in range(len(cu_lengths) - 1):
        of_row, keys = (slice(*cu[row : row + 2].tolist()) for cu in (cu_lengths, cu_keys))
        q, k, v = (x.transpose(0, 1) for x in (query[of_row], key[keys], value[keys]))
        ends = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        apart = torch.arange(k.shape[1])[None, :] - ends
        hidden = torch.zeros_like(apart, dtype=torch.bool)
        if window_size[0] >= 0:
            hidden |= apart.abs() > window_size[0]
        scores = (q @ k.transpose(1, 2)) * (scale or q.shape[-1] ** -0.5)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        out[of_row] = (weights @ v).transpose(0, 1)
    return out


def test_layers_of_a_step_find_once_which_rows_go_where(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ordered_batch([3] * 20 + [64, 65, 300])
    route = attention._route(batch, window_covers_short=True)
    assert route.short is not None and route.flash is not None
    assert route.short.tolist() == batch.cu_lengths[:22].tolist() and route.max_short_length == 64
    assert route.flash.tolist() == batch.cu_lengths[21:].tolist() and route.max_flash_length == 300
    assert attention._route(batch, window_covers_short=True) is route
    narrow = attention._route(batch, window_covers_short=False)  # the window is narrower than short rows
    assert narrow.short is None and narrow.flash is not None and len(narrow.flash) == 24
    assert attention._route(replace(batch), window_covers_short=True) is not route
    monkeypatch.setattr(attention, "_MAX_OWN_LENGTH", 100)
    assert attention._route(batch, window_covers_short=True).num_rows == 22


def test_layers_share_places_where_they_take_any() -> None:
    alone, like = ordered_batch([3, 5]), torch.empty(0, dtype=torch.float16)
    assert alone.scratch_buffers((4, 0, 4), like) == (None, None, None)
    batch = replace(alone, reuses_buffers=True)
    first, none, second = batch.scratch_buffers((4, 0, 4), like)
    assert none is None and first is not None and second is not None and first is not second
    assert first.shape == second.shape == (8, 4) and first.dtype == torch.float16
    again = batch.scratch_buffers((4, 0, 4), like)
    assert again[0] is first and again[2] is second
    assert batch.is_scratch(first) and not batch.is_scratch(first.clone()) and not alone.is_scratch(first)
    assert replace(batch).scratch_buffers((4, 0, 4), like)[0] is not first, "another step has its own"


def test_few_short_rows_among_longer_ones_go_with_them() -> None:
    route = attention._route(ordered_batch([2, 2, 300]), window_covers_short=True)
    assert route.short is None and route.flash is not None and len(route.flash) == 4
