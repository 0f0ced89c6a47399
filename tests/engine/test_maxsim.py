"""`engine.maxsim` gives the scores that NumPy computes, also while the engine runs other steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock import Engine
from penstock.inputs.vectors import make_comparison
from penstock.types import Comparison
from penstock.wire.messages import Compare, decode_to_engine, pack_comparison, unpack_comparison
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", threads=1) as running:
        yield running


def matrices(count: int, seed: int = 0, dim: int = 12) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((int(draw.integers(0, 9)), dim)).astype(np.float32) for _ in range(count)]


def by_hand(query: Any, document: Any) -> float:
    return float((query @ document.T).max(axis=1).sum()) if len(document) and len(query) else 0.0


def test_scores_equal_those_computed_with_numpy(engine: Engine) -> None:
    query, documents = np.random.default_rng(5).standard_normal((4, 12)).astype(np.float32), matrices(20)
    expected = [by_hand(query, document) for document in documents]
    np.testing.assert_allclose(engine.maxsim(query, documents), expected, atol=1e-5)
    queries = matrices(20, seed=1)
    expected = [by_hand(q, d) for q, d in zip(queries, documents, strict=True)]
    np.testing.assert_allclose(engine.maxsim(queries, documents), expected, atol=1e-5)


def test_int8_vectors_with_scales_score_like_their_originals(engine: Engine) -> None:
    query, documents = np.random.default_rng(6).standard_normal((4, 12)).astype(np.float32), matrices(20)

    def rounded(matrix: Any) -> tuple[Any, Any]:
        scales = np.abs(matrix).max(axis=1) / 127 if len(matrix) else np.zeros(0)
        return np.rint(matrix / np.maximum(scales, 1e-9)[:, None]).astype(np.int8), scales

    coarse, scales = rounded(query)
    pairs = [rounded(document) for document in documents]
    found = engine.maxsim(
        coarse, [d for d, _ in pairs], query_scales=[scales], document_scales=[s for _, s in pairs]
    )
    expected = [by_hand(query, document) for document in documents]
    np.testing.assert_allclose(found, expected, atol=0.15)


def test_a_comparison_crosses_the_wire_whole() -> None:
    made = make_comparison(
        "a", [matrices(1)[0]], matrices(3), document_scales=[np.ones(len(m)) for m in matrices(3)]
    )
    header, *frames = pack_comparison(made)
    message = decode_to_engine(header)
    assert isinstance(message, Compare)
    back = unpack_comparison(message, [frame.tobytes() for frame in frames])
    assert back.id == "a" and back.query_scales is None
    for name in Comparison.__slots__:
        if isinstance(getattr(made, name), np.ndarray):
            np.testing.assert_array_equal(getattr(back, name), getattr(made, name))


def test_a_comparison_that_fails_fails_alone(engine: Engine) -> None:
    broken = make_comparison("broken", [[[1.0, 2.0]]], [[[1.0, 2.0]]])
    broken.pairs = np.array([7], dtype=np.int32)  # no such query
    with pytest.raises(Exception, match="the comparison failed"):
        engine.local.engine.submit(broken).result(timeout=PATIENCE_S)
    assert engine.embed("still here").shape == (1, 384)
