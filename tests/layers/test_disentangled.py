"""Disentangled attention against scores computed pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.layers import disentangled
from penstock.layers.disentangled import Distances, DistanceTerms, attend_disentangled, log_bucket
from tests.layers.inputs import ordered_batch

CPU = torch.device("cpu")
HEADS, DIM, SPAN = 3, 8, 8


def by_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: DistanceTerms,
    bucket: list[int],
    scale: float,
    keys: int | None = None,
) -> Tensor:
    """Attention of one row: q, k, v are [length, heads, dim]; only the first `keys` tokens are keys."""
    length = len(q)
    out = torch.empty_like(q)
    for head in range(HEADS):
        scores = torch.empty(length, length)
        for i in range(length):
            for j in range(length):
                near = bucket[abs(i - j)] * (1 if i > j else -1)
                row = min(max(near + SPAN, 0), 2 * SPAN - 1)
                scores[i, j] = q[i, head] @ k[j, head]
                if terms.key is not None:
                    scores[i, j] += q[i, head] @ terms.key[head, row]
                if terms.query is not None:
                    scores[i, j] += k[j, head] @ terms.query[head, row]
        out[:, head] = (scores * scale)[:, :keys].softmax(-1) @ v[:keys, head]
    return out.flatten(1)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("buckets", [-1, SPAN])
@pytest.mark.parametrize("kinds", ["key", "query", "both"])
def test_scores_are_content_and_both_distance_terms(buckets: int, kinds: str) -> None:
    lengths = [1, 2, 2, 7, 19, 19]
    query, key, value = random(3, sum(lengths), HEADS, DIM, seed=1).unbind(0)
    distances = Distances(SPAN, 32, CPU, buckets=buckets, max_distance=16)
    terms = DistanceTerms(
        distances,
        None if kinds == "query" else random(HEADS, 2 * SPAN, DIM, seed=2),
        None if kinds == "key" else random(HEADS, 2 * SPAN, DIM, seed=3),
    )
    away = torch.arange(32)
    bucket = (log_bucket(away, buckets, 16) if buckets > 0 else away).tolist()
    scale = 1 / math.sqrt(DIM * 2)
    ours = attend_disentangled(query, key, value, ordered_batch(lengths), terms, scale)
    rows = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    theirs = torch.cat([by_pairs(q, k, v, terms, bucket, scale) for q, k, v in rows])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_rows_with_a_key_limit_attend_to_their_leading_tokens() -> None:
    lengths, keys = [2, 7, 7, 19], [2, 3, 7, 11]
    query, key, value = random(3, sum(lengths), HEADS, DIM, seed=6).unbind(0)
    distances = Distances(SPAN, 32, CPU, buckets=SPAN, max_distance=16)
    tables = [random(HEADS, 2 * SPAN, DIM, seed=seed) for seed in (7, 8)]
    terms = DistanceTerms(distances, *tables)
    ours = attend_disentangled(query, key, value, ordered_batch(lengths, keys), terms, 0.2)
    bucket = log_bucket(torch.arange(32), SPAN, 16).tolist()
    rows = zip(*(x.split(lengths) for x in (query, key, value)), keys, strict=True)
    theirs = torch.cat([by_pairs(q, k, v, terms, bucket, 0.2, seen) for q, k, v, seen in rows])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_large_group_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [5] * 7
    query, key, value = random(3, 35, HEADS, DIM, seed=4).unbind(0)
    distances = Distances(SPAN, 32, CPU, buckets=SPAN, max_distance=16)
    terms = DistanceTerms(distances, random(HEADS, 2 * SPAN, DIM, seed=5), None)
    whole = attend_disentangled(query, key, value, ordered_batch(lengths), terms, 0.3)
    monkeypatch.setattr(disentangled, "_MAX_SCORES", 2 * HEADS * 5 * 5)
    pieces = attend_disentangled(query, key, value, ordered_batch(lengths), terms, 0.3)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-6)


def test_near_distances_keep_their_bucket_and_far_ones_share() -> None:
    buckets = log_bucket(torch.arange(512), 256, 512).tolist()
    assert buckets[:129] == list(range(129))
    assert buckets[129] == 129
    assert buckets == sorted(buckets)
    assert buckets[511] in (255, 256)
    assert len(set(buckets[129:])) < 129


def test_only_a_few_lengths_are_cached() -> None:
    distances = Distances(SPAN, 64, CPU, buckets=SPAN, max_distance=16)
    for length in range(1, 60):
        index = distances.index(length)
        rows = distances.rows(length)
        assert index.min() == 0
        assert index.max() == rows.stop - rows.start - 1 if length > 1 else True
        assert 0 <= rows.start < rows.stop <= 2 * SPAN
    assert len(distances._by_length) == Distances.MAX_CACHED_LENGTHS
