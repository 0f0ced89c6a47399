from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.outputs.sparse import check_min_weight, lexical_terms, sparse_rows, with_tokens
from penstock.types import PoolingParams, Task
from tests.helpers import ints, make_request

LEXICAL = PoolingParams(Task.SPARSE, lexical=True)


def test_absent_and_light_terms_are_dropped() -> None:
    values = np.array([[[7, 2.0], [3, 0.5], [-1, 0]], [[-1, 0]] * 3, [[0, 9.0], [2, 8.0], [1, 7.0]]], "f4")
    request = make_request("a", [2, 2, 2], params=PoolingParams(Task.SPARSE))
    rows = [row.as_dict() for row in sparse_rows(request, values, ints([]), None, 0.0)]
    assert rows == [{7: 2.0, 3: 0.5}, {}, {0: 9.0, 2: 8.0, 1: 7.0}]
    rows = [row.as_dict() for row in sparse_rows(request, values, ints([]), 1, 1.0)]
    assert rows == [{7: 2.0}, {}, {0: 9.0}]


def test_lexical_weights_equal_a_plain_loop() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, 50).astype(np.int32)
    ids = draw.integers(0, 30, lengths.sum()).astype(np.int32)
    weights = np.maximum(draw.normal(size=len(ids)), 0).astype(np.float32)
    request = make_request("a", lengths.tolist(), params=LEXICAL)
    request.token_ids = ids
    got = sparse_rows(request, weights[:, None], ints([0, 2]), None, 0.0)
    at = 0
    for row, length in zip(got, lengths, strict=True):
        expected: dict[int, float] = {}
        for number, weight in zip(ids[at : at + length].tolist(), weights[at : at + length], strict=True):
            if number not in (0, 2) and weight > 0:
                expected[number] = max(float(weight), expected.get(number, 0.0))
        assert row.as_dict() == expected
        assert (np.diff(row.weights) <= 0).all()
        at += int(length)


def test_rows_of_only_special_tokens_have_no_terms() -> None:
    rows, ids, weights = lexical_terms(ints([0, 2, 0]), ints([2, 1]), np.ones(3, "f4"), ints([0, 2]))
    assert len(rows) == len(ids) == len(weights) == 0


def test_terms_carry_their_token_strings() -> None:
    request = make_request("a", [1, 1], params=PoolingParams(Task.SPARSE))
    values = np.array([[[7, 2.0], [-1, 0]], [[5, 1.5], [7, 0.5]]], "f4")
    rows = sparse_rows(request, values, ints([]), None, 0.0)
    terms = with_tokens(rows, lambda ids: [f"t{number}" for number in ids])
    assert terms == [[(7, "t7", 2.0)], [(5, "t5", 1.5), (7, "t7", 0.5)]]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_min_weight_is_rejected(weight: float) -> None:
    with pytest.raises(BadValue, match="min_weight"):
        check_min_weight(weight)
