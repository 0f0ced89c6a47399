"""The pair plan of a step, executed on fake vectors that name their row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.scheduler.plan import build_plan
from penstock.scheduler.ragged import consecutive_tokens, tokens_of
from penstock.scheduler.scheduler import Budget, ScheduledRows, Scheduler
from penstock.scheduler.vector_cache import VectorCache
from penstock.types import PairPlan, PoolingParams, Request, Task, Variant


def random_request(rng: np.random.Generator, name: str, late: bool) -> Request:
    queries, documents = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    lengths = rng.integers(1, 7, queries + documents).astype(np.int32)
    size = int(lengths.sum())
    keep = rng.integers(0, 2, size).astype(np.int32) if late and rng.random() < 0.5 else None
    return Request(
        name,
        rng.integers(0, 3, size).astype(np.int32),  # few different tokens, so that rows repeat
        lengths,
        PoolingParams(Task.SCORE, late=late),
        token_mask=keep,
        pairs=rng.integers(0, queries, documents).astype(np.int32),
    )


def vectors_of(request: Request, row: int) -> list[Any]:
    """The names of a row's vectors: one per kept token, or one for all of its tokens."""
    begin = int(request.starts[row])
    span = slice(begin, begin + int(request.lengths[row]))
    ids = request.token_ids[span].tolist()
    if not request.params.late:
        return [tuple(ids)]
    flags = [1] * len(ids) if request.token_mask is None else request.token_mask[span].tolist()
    return [token for token, flag in zip(ids, flags, strict=True) if flag]


def step_vectors(plan: Any, variant: Variant) -> list[Any]:
    """The names of the vectors that a step computes for this variant."""
    if not variant.params.late:
        ends = plan.cu_lengths.tolist()
        return [tuple(plan.token_ids[a:b].tolist()) for a, b in pairwise(ends)]
    return (plan.token_ids if variant.tokens is None else plan.token_ids[variant.tokens]).tolist()


def scored(pairs: PairPlan, vectors: list[Any], store: dict[int, Any]) -> list[Any]:
    """The query and document vectors of each pair. The last documents are read from the store."""
    for source, target in zip(pairs.write_from.tolist(), pairs.write_to.tolist(), strict=True):
        store[target] = vectors[source]
    found = []
    total = len(pairs.pair_queries)
    for i in range(total):
        query, begin = int(pairs.pair_queries[i]), int(pairs.document_starts[i])
        at = int(pairs.query_starts[query])
        span = range(begin, begin + int(pairs.document_lengths[i]))
        where: Any = store if i >= total - pairs.num_from_store else vectors
        found.append(
            ([store[at + k] for k in range(int(pairs.query_lengths[query]))], [where[k] for k in span])
        )
    return found


def expected(scheduled: list[ScheduledRows]) -> list[Any]:
    found = []
    for stored in (False, True):
        for entry in scheduled:
            request = entry.request
            assert request.pairs is not None
            rows = entry.cached_documents if stored else entry.rows
            for row in [] if rows is None else rows.tolist():
                if row >= request.num_queries:
                    query = int(request.pairs[row - request.num_queries])
                    found.append((vectors_of(request, query), vectors_of(request, row)))
    return found


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_document_is_scored_once_against_its_query(late: bool, reuse: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(Budget(24, 8, 1 << 20), vector_cache=VectorCache(400, documents=True, reuse=reuse))
    requests = [random_request(rng, str(i), late) for i in range(12)]
    store: dict[int, Any] = {}
    seen = 0
    for request in requests:
        scheduler.add(request)
    while scheduled := scheduler.schedule():
        plan = build_plan(scheduled)
        (variant,) = plan.variants
        assert variant.pairs is not None
        assert scored(variant.pairs, step_vectors(plan, variant), store) == expected(scheduled)
        seen += len(variant.pairs.pair_queries)
        for entry in scheduled:
            if scheduler.queue.find(entry.request.id) is None:
                scheduler.finish(entry.request, succeeded=True)
    assert seen == sum(request.num_rows - request.num_queries for request in requests)


@pytest.mark.parametrize(
    "rows", [[], [2], [0, 1], [1, 0], [1, 2, 3], [0, 2, 1, 3], [0, 2], [0, 0], [3, 1, 2, 4]]
)
def test_consecutive_rows_are_the_slice_of_their_tokens(rows: list[int]) -> None:
    lengths = np.array([3, 1, 4, 1, 5], dtype=np.int32)
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    numbers, flat = np.array(rows, dtype=np.int32), np.arange(14)
    found = consecutive_tokens(numbers, lengths, starts)
    assert (found is not None) == (rows == list(range(rows[0], rows[0] + len(rows))) if rows else True)
    if found is not None:
        assert flat[found].tolist() == tokens_of(numbers, lengths, starts).tolist()
