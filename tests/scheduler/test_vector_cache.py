"""The vector cache: no range leaks or is allocated twice, vectors of successful requests are reused, and
vectors in use are not evicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduler.vector_cache import VectorCache, vector_counts
from penstock.types import PoolingParams, Request, Task
from tests.helpers import ints


def request(name: str, queries: list[list[int]], documents: list[list[int]], **more: object) -> Request:
    rows = queries + documents
    return Request(
        name,
        np.array([token for row in rows for token in row], dtype=np.int32),
        np.array([len(row) for row in rows], dtype=np.int32),
        PoolingParams(Task.SCORE, late=True),
        pairs=np.zeros(len(documents), dtype=np.int32),
        **more,  # type: ignore[arg-type]
    )


def test_the_vectors_of_a_query_that_succeeded_are_reused() -> None:
    cache = VectorCache(16)
    first = cache.hold(request("a", [[1, 2, 3]], [[9]]))
    assert first is not None and not first.ready.any() and first.starts[1] == -1
    again = cache.hold(request("b", [[1, 2, 3]], [[8]]))
    assert again is not None and not again.ready.any(), "the first request has not succeeded yet"
    cache.release("a", succeeded=True)
    cache.release("b", succeeded=False)
    hit = cache.hold(request("c", [[1, 2, 3]], [[7]]))
    assert hit is not None and hit.ready.tolist() == [True, False]
    assert hit.starts[0] == first.starts[0]
    assert (cache.query_hits, cache.query_lookups) == (1, 3)
    cache.check_integrity()


def test_the_vectors_of_a_failed_request_are_not_reused() -> None:
    cache = VectorCache(16)
    cache.hold(request("a", [[1, 2, 3]], [[9]]))
    cache.release("a", succeeded=False)
    held = cache.hold(request("b", [[1, 2, 3]], [[9]]))
    assert held is not None and not held.ready.any()


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "x"},
        {"key_limits": [1, 1]},
        {"adapters": [1, 1]},
        {"type_ids": [0, 0, 1]},
        {"skip": [1, 0]},
        {"token_mask": [1, 0, 1]},
    ],
    ids=str,
)
def test_rows_of_other_content_share_no_vectors(more: dict[str, Any]) -> None:
    cache = VectorCache(64, documents=True)
    changes = {name: ints(value) if isinstance(value, list) else value for name, value in more.items()}
    cache.hold(request("a", [[1, 2]], [[9]]))
    cache.release("a", succeeded=True)
    for name, cached in (("b", [False, False]), ("c", [True, True])):
        held = cache.hold(request(name, [[1, 2]], [[9]], **changes))
        assert held is not None and held.ready.tolist() == cached
        cache.release(name, succeeded=True)


def test_a_full_cache_makes_queries_wait_and_leaves_documents_uncached() -> None:
    cache = VectorCache(4, documents=True)
    held = cache.hold(request("a", [[1, 2, 3]], [[5, 6]]))
    assert held is not None and held.starts.tolist() == [0, -1]
    assert cache.hold(request("b", [[4, 4]], [[5]])) is None
    cache.release("a", succeeded=True)
    held = cache.hold(request("b", [[4, 4]], [[5]]))  # evicts the idle query
    assert held is not None and (held.starts >= 0).all()
    cache.check_integrity()


def test_rows_without_a_kept_token_have_no_vectors() -> None:
    asked = request("a", [[1]], [[5, 6], [7]], token_mask=np.array([1, 0, 0, 1], dtype=np.int32))
    assert vector_counts(asked).tolist() == [1, 0, 1]
    assert VectorCache(8, documents=True).hold(asked) is not None


ROWS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(ROWS, ROWS, st.booleans(), st.booleans()), max_size=25), size=st.integers(1, 24)
)
def test_no_range_is_lost_or_given_twice(
    steps: list[tuple[list[list[int]], list[list[int]], bool, bool]], size: int
) -> None:
    cache = VectorCache(size, documents=True)
    held: dict[str, dict[int, int]] = {}
    for number, (queries, documents, end_one, succeeded) in enumerate(steps):
        if (got := cache.hold(asked := request(f"r{number}", queries, documents))) is not None:
            held[asked.id] = {int(s): int(n) for s, n in zip(got.starts, got.lengths, strict=True) if s >= 0}
        if end_one and held:
            name = next(iter(held))
            del held[name]
            cache.release(name, succeeded=succeeded)
        cache.check_integrity()
    for name in list(held):
        cache.release(name, succeeded=True)
    cache.check_integrity()


def test_no_vectors_are_reused_without_reuse() -> None:
    cache = VectorCache(16, reuse=False)
    cache.hold(request("a", [[1, 2, 3]], [[9]]))
    cache.release("a", succeeded=True)
    held = cache.hold(request("b", [[1, 2, 3]], [[9]]))
    assert held is not None and not held.ready.any()
    cache.release("b", succeeded=True)
    cache.check_integrity()
