"""The last layer computes only the tokens that are read, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.kernels.pooling import pool_reference
from penstock.layers.cpu_shapes import padded_size
from penstock.pooling.methods import METHODS, read_tokens
from penstock.runner import model_runner
from penstock.runner.model_runner import ModelRunner
from penstock.types import PoolingParams, Task, cumulative
from tests.runner.small_models import (
    FAMILIES,
    LENGTHS,
    SIZES,
    make_runner,
    plan_of,
    seen,
)


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    made = make_runner(*request.param)
    yield made
    made.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip", [True, False])
def test_a_pooling_method_reads_only_the_tokens_that_read_tokens_names(method: str, skip: bool) -> None:
    for lengths in (LENGTHS, (9, 9, 70, 80), (3,)):
        plan = plan_of(skip=skip, lengths=lengths)
        hidden = torch.randn(plan.num_tokens, 8)
        left = None if plan.skip is None else torch.from_numpy(plan.skip)
        expected = pool_reference(hidden, torch.from_numpy(plan.cu_lengths), method, skip=left)
        found = read_tokens(method, plan)
        if method in ("cls", "last"):
            assert found is not None
        if found is None:
            continue
        tokens, counts = found
        assert tokens.dtype == counts.dtype == np.int32 and counts.sum() == len(tokens)
        narrow = torch.from_numpy(cumulative(counts))
        torch.testing.assert_close(pool_reference(hidden[torch.from_numpy(tokens)], narrow, method), expected)


@pytest.mark.parametrize(
    ("runner", "task"),
    [
        ((name, "cls" if "Class" in name else "mean", more), Task.CLASSIFY if "Class" in name else Task.EMBED)
        for name, more in FAMILIES.items()
    ],
    indirect=["runner"],
    ids=list(FAMILIES),
)
def test_every_family_gives_the_same_output_with_a_pruned_last_layer(runner: ModelRunner, task: Task) -> None:
    plan = plan_of(PoolingParams(task))
    (got,), tokens = seen(runner, plan)
    assert plan.skip is not None
    if task is Task.CLASSIFY:
        assert tokens == plan.num_rows
    else:
        assert tokens == np.maximum(plan.lengths - plan.skip, 0).sum()
    runner.model.prunes_last_layer = False
    (expected,), tokens = seen(runner, plan)
    assert tokens == padded_size(plan.num_tokens)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip", [True, False])
def test_every_pooling_method_gives_the_same_output_with_a_pruned_last_layer(method: str, skip: bool) -> None:
    made = make_runner("BertModel", method, {})
    try:
        plan = plan_of(PoolingParams(), PoolingParams(dimensions=16), skip=skip)
        got, tokens = seen(made, plan)
        prunes_last_layer = method in ("cls", "last") or (skip and method != "weighted_mean")
        assert (tokens < plan.num_tokens) == prunes_last_layer
        made.model.prunes_last_layer = False
        for one, other in zip(got, seen(made, plan)[0], strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    finally:
        made.close()


@pytest.mark.parametrize("method", ["mean", "mean_sqrt_len", "max"])
def test_a_row_whose_tokens_are_all_skipped_pools_to_zeros(method: str) -> None:
    plan = replace(plan_of(), skip=np.where(plan_of().lengths == 9, 9, 0).astype(np.int32))
    found = read_tokens(method, plan)
    if method == "max":
        assert found is None  # not pruned, because the maximum of no tokens is undefined
        return
    assert found is not None
    tokens, counts = found
    assert counts.tolist() == np.where(plan.lengths == 9, 0, plan.lengths).tolist()
    hidden, narrow = torch.randn(plan.num_tokens, 8), torch.from_numpy(cumulative(counts))
    pooled = pool_reference(hidden[torch.from_numpy(tokens)], narrow, method)
    assert bool((pooled[torch.from_numpy(plan.lengths == 9)] == 0).all())


@pytest.mark.parametrize("runner", [("BertModel", "cls", {})], indirect=True)
def test_the_last_layer_is_not_pruned_if_a_variant_reads_all_tokens(runner: ModelRunner) -> None:
    plan = plan_of(PoolingParams(), PoolingParams(Task.TOKEN_EMBED))
    (vectors, tokens), count = seen(runner, plan)
    assert (
        count == padded_size(plan.num_tokens)
        and plan.num_tokens == 2 * len(tokens)
        and len(vectors) == len(LENGTHS)
    )
    assert seen(runner, plan_of(PoolingParams()))[1] == len(LENGTHS)


@pytest.mark.parametrize("runner", [("BertForSequenceClassification", "mean", {})], indirect=True)
def test_the_last_layer_is_not_pruned_if_variants_use_different_methods(runner: ModelRunner) -> None:
    plan = plan_of(PoolingParams(), PoolingParams(Task.CLASSIFY))
    assert seen(runner, plan)[1] == padded_size(plan.num_tokens)


@pytest.mark.parametrize("runner", [("BertModel", "cls", {})], indirect=True)
def test_variants_with_row_indices_select_the_same_rows_after_pruning(runner: ModelRunner) -> None:
    """Two requests with different parameters: each variant has an index of its rows."""
    both = plan_of(PoolingParams(), PoolingParams(dimensions=8), skip=False)
    assert all(variant.index is not None for variant in both.variants)
    got, tokens = seen(runner, both)
    assert tokens == both.num_rows
    runner.model.prunes_last_layer = False
    for one, other in zip(got, seen(runner, both)[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("runner", [("BertModel", "last", {})], indirect=True)
def test_small_cached_or_dense_steps_are_not_pruned(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(skip=False)
    assert runner._output_plan(plan)
    assert not runner._output_plan(plan_of(skip=False, lengths=(1, 1, 1, 2)))  # most tokens are read anyway
    assert not runner._output_plan(replace(plan, kv=SimpleNamespace()))  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    assert not runner._output_plan(plan)  # too small to be worth more launches
    monkeypatch.setattr(model_runner, "MIN_PRUNED_SIZE_EAGER", plan.num_tokens * SIZES["hidden_size"])
    assert runner._output_plan(plan)
