"""Chunked rows give the same answers as whole rows, and leak no KV cache blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import Engine
from penstock.errors import ConfigError
from tests.checkpoints import write_bert
from tests.engine.chunked import LENGTHS, check_no_memory_is_held, chunked, engine, rows


@pytest.mark.parametrize("pooling", ["last", "mean", "mean_sqrt_len"])
def test_a_chunked_row_has_the_vector_of_a_whole_one(folder: Path, pooling: str) -> None:
    config = {"pooler_config": {"pooling_type": pooling}}
    with engine(folder, **config) as whole, chunked(folder, **config) as cut:
        inputs = rows(LENGTHS)
        np.testing.assert_allclose(cut.embed(inputs), whole.embed(inputs), atol=1e-5)
        check_no_memory_is_held(cut)


def test_token_vectors_are_gathered_across_steps(folder: Path) -> None:
    with engine(folder) as whole, chunked(folder) as cut:
        inputs = rows(LENGTHS)
        for got, expected in zip(cut.token_embed(inputs), whole.token_embed(inputs), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
        check_no_memory_is_held(cut)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    with engine(folder) as whole, chunked(folder, enable_prefix_caching=True, kv_cache_gb=1e-6) as cut:
        yield whole, cut


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.booleans(), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_any_mix_of_requests_gives_each_its_own_answer(
    pair: tuple[Engine, Engine], calls: list[tuple[list[int], bool, int]]
) -> None:
    """With few blocks, cached prefixes and mixed tasks, answers equal those of rows run alone."""
    whole, cut = pair
    submitted = []
    for number, (lengths, per_token, seed) in enumerate(calls):
        inputs = [[7] * (n // 2) + row[n // 2 :] for n, row in zip(lengths, rows(lengths, seed), strict=True)]
        submitted.append((number, inputs, per_token))
    for _, inputs, per_token in submitted:
        if per_token:
            for got, row in zip(cut.token_embed(inputs), inputs, strict=True):
                np.testing.assert_allclose(got, whole.token_embed([row])[0], atol=1e-5)
        else:
            got = cut.embed(inputs)
            for vector, row in zip(got, inputs, strict=True):
                np.testing.assert_allclose(vector, whole.embed([row])[0], atol=1e-5)
    check_no_memory_is_held(cut)


def test_a_cached_prefix_gives_the_vector_of_a_cold_one_and_is_counted(folder: Path) -> None:
    prefix = rows([64], seed=5)[0]
    inputs = [prefix + row for row in rows([9, 20, 33], seed=6)]
    with engine(folder) as cold, chunked(folder, enable_prefix_caching=True) as warm:
        warm.embed([inputs[0]])
        pool = warm.local.engine.core.scheduler.chunking.pool  # type: ignore[union-attr]
        before = pool.hit_tokens
        np.testing.assert_allclose(warm.embed(inputs), cold.embed(inputs), atol=1e-5)
        assert pool.hit_tokens - before >= 3 * 64
        salted = pool.hit_tokens
        np.testing.assert_allclose(warm.embed(inputs, cache_salt="other"), cold.embed(inputs), atol=1e-5)
        assert pool.hit_tokens - salted < 3 * 64
        check_no_memory_is_held(warm)


def test_rows_are_chunked_by_default_where_the_length_limit_exceeds_a_step(folder: Path) -> None:
    with engine(folder, max_num_batched_tokens=64) as small, engine(folder) as large:
        assert small.settings.chunked and not large.settings.chunked
        inputs = rows([250, 100, 5])
        np.testing.assert_allclose(small.embed(inputs), large.embed(inputs), atol=1e-5)


@pytest.mark.parametrize("flag", ["enable_chunked_prefill", "enable_prefix_caching"])
def test_chunking_is_refused_for_models_that_attend_in_both_directions(
    tmp_path: Path, folder: Path, flag: str
) -> None:
    with pytest.raises(ConfigError, match="is not causal"):
        Engine(str(write_bert(tmp_path / "bert")), device="cpu", **{flag: True})
    with pytest.raises(ConfigError, match="max pooling needs the whole row"):
        engine(folder, pooler_config={"pooling_type": "max"}, **{flag: True})
