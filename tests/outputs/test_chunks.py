from __future__ import annotations

import numpy as np
import pytest

from penstock.outputs.chunks import span_means, weighted_means
from tests.helpers import ints


@pytest.mark.parametrize("seed", range(20))
def test_span_means_equal_a_plain_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens = int(random.integers(2, 60))
    values = random.standard_normal((tokens, 5)).astype(np.float32)
    cuts = np.sort(
        random.choice(tokens + 1, size=2 * int(random.integers(1, tokens // 2 + 1)), replace=False)
    )
    spans = ints(cuts.tolist()).reshape(-1, 2)
    wanted = np.stack([values[begin:end].mean(axis=0) for begin, end in spans])
    np.testing.assert_allclose(span_means(values, spans), wanted, atol=1e-6)


def test_adjacent_spans_share_no_token() -> None:
    values = np.arange(6, dtype=np.float32)[:, None]
    np.testing.assert_allclose(
        span_means(values, ints([0, 2, 2, 3, 3, 6]).reshape(-1, 2)).ravel(), [0.5, 2, 4]
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_texts_vector_is_the_weighted_mean_of_its_chunks(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = ints(random.integers(1, 5, size=7).tolist())
    total = int(counts.sum())
    vectors = random.standard_normal((total, 4)).astype(np.float32)
    weights = ints(random.integers(1, 30, size=total).tolist())
    parts = np.split(np.arange(total), np.cumsum(counts)[:-1])
    wanted = np.stack([np.average(vectors[part], axis=0, weights=weights[part]) for part in parts])
    np.testing.assert_allclose(weighted_means(vectors, weights, counts), wanted, atol=1e-5)


def test_a_text_without_tokens_of_its_own_keeps_its_vector() -> None:
    one = np.ones((1, 3), dtype=np.float32)
    np.testing.assert_array_equal(weighted_means(one, ints([0]), ints([1])), one)
