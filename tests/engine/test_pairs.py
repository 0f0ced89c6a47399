"""Pair scores from vectors equal NumPy's, in one step or in many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import Engine
from penstock.errors import ConfigError
from penstock.types import PoolingParams, Task
from tests.checkpoints import write_bert, write_cross_encoder, write_late
from tests.engine.pair_requests import PAIRS, TEXTS, run, score_request
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module", params=[{}, {"max_num_batched_tokens": 8}, {"document_cache_gb": 0.01}])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(**request.param) as engine:
        yield engine


def test_pairs_are_scored_by_cosine_in_one_step_or_many(engine: Engine) -> None:
    vectors = engine.embed(TEXTS)
    expected = [vectors[q] @ vectors[2 + d] for d, q in enumerate(PAIRS)]
    rows = engine.tokenize(TEXTS)
    for name in ("first", "second"):  # the second reuses the cached queries
        answer = run(engine, score_request(name, rows, PAIRS))
        assert answer.values.shape == (5, 1)
        np.testing.assert_allclose(answer.values[:, 0], expected, atol=1e-5)
    cache = engine.local.engine.core.scheduler.vector_cache
    assert cache is not None and cache.query_hits >= 2
    cache.check_integrity()
    if cache.keeps_documents:
        assert cache.document_hits == 5


def test_scores_and_vectors_share_a_step(engine: Engine) -> None:
    rows = engine.tokenize(TEXTS)
    scores = engine.local.engine.submit(score_request("pairs", rows, PAIRS, cache_salt="mixed"))
    vectors = engine.embed(TEXTS)
    expected = [vectors[q] @ vectors[2 + d] for d, q in enumerate(PAIRS)]
    np.testing.assert_allclose(scores.result(timeout=PATIENCE_S).values[:, 0], expected, atol=1e-5)


def test_several_outputs_of_the_same_rows_come_from_one_forward() -> None:
    with Engine() as engine:
        rows = engine.tokenize(TEXTS)
        asked = score_request("many", rows, PAIRS)
        asked.pairs, asked.params = None, PoolingParams(Task.EMBED)
        asked.extra_params = (PoolingParams(Task.TOKEN_EMBED), PoolingParams(Task.EMBED, dimensions=8))
        launched = engine.local.engine.core.runner.launch
        steps = []
        engine.local.engine.core.runner.launch = lambda plan: (steps.append(plan), launched(plan))[1]  # type: ignore[method-assign]
        answer = run(engine, asked)
        assert len(steps) == 1 and steps[0].num_tokens == asked.num_tokens
        np.testing.assert_allclose(answer.values, engine.embed(TEXTS), atol=1e-6)
        np.testing.assert_allclose(
            answer.extra_values[0], np.concatenate(engine.token_embed(TEXTS)), atol=1e-6
        )
        np.testing.assert_allclose(answer.extra_values[1], engine.embed(TEXTS, dimensions=8), atol=1e-6)


def test_a_document_cache_is_refused_for_models_that_score_pairs_in_one_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model that scores by vectors"):
        Engine(str(write_cross_encoder(tmp_path)), device="cpu", document_cache_gb=0.1)


@pytest.mark.parametrize("write", [write_late, write_bert])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_whose_vectors_are_all_cached_is_scored_the_same(
    tmp_path: Path, write: Callable[[Path], Path], dtype: str
) -> None:
    with Engine(str(write(tmp_path)), device="cpu", dtype=dtype, document_cache_gb=0.01) as engine:
        first, *later = (engine.score("hello world", TEXTS[:2]) for _ in range(3))
        for scores in later:
            np.testing.assert_array_equal(scores, first)
