"""Vectors from the caller: every format gives the same arrays, and errors name the bad value."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadValue
from penstock.inputs.vectors import make_comparison

QUERY = [[1.0, 0.5], [0.25, -1.0]]
DOCUMENTS = [[[1.0, 0.0]], [], [[0.5, 0.5], [2.0, 1.0], [0.0, 0.0]]]


def packed(matrix: Any, dtype: str) -> str:
    return base64.b64encode(np.array(matrix, dtype=dtype).tobytes()).decode()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers_base64_and_arrays_give_equal_vectors(dtype: str) -> None:
    plain = make_comparison("a", [QUERY], DOCUMENTS, dtype=dtype)
    coded = make_comparison(
        "b", [packed(QUERY, dtype)], [packed(d, dtype) for d in DOCUMENTS], dtype=dtype, dim=2
    )
    arrays = [np.array(d, dtype=dtype).reshape(-1, 2) for d in DOCUMENTS]
    brought = make_comparison("c", [np.array(QUERY, dtype=dtype)], arrays, dtype=dtype)
    for other in (coded, brought):
        np.testing.assert_array_equal(plain.queries, other.queries)
        np.testing.assert_array_equal(plain.documents, other.documents)
        assert other.document_lengths.tolist() == [1, 0, 3]
        assert other.pairs.tolist() == [0, 0, 0]
    assert plain.documents.dtype == dtype


def test_as_many_queries_as_documents_are_paired() -> None:
    made = make_comparison("a", [QUERY] * 3, DOCUMENTS)
    assert made.pairs.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": []}, "queries is empty"),
        ({"documents": []}, "documents is empty"),
        ({"queries": [QUERY, QUERY]}, "2 queries for 3 documents"),
        ({"documents": [[[1.0, 2.0, 3.0]]]}, "2 and 3 values"),
        ({"documents": [[[1.0, 2.0], [3.0]]]}, r"documents\[0\] has rows of different lengths"),
        ({"documents": [[["x", "y"]]]}, r"documents\[0\] is not a matrix of numbers"),
        ({"documents": [[[1.0, float("nan")]]]}, r"documents\[0\] has values that are not finite"),
        ({"documents": ["AAAA"]}, r"documents\[0\] is base64; set dim"),
        ({"documents": ["no!"], "dim": 2}, r"documents\[0\] is not valid base64"),
        ({"documents": ["AAAA"], "dim": 2}, "3 bytes, which is not a multiple of 2 float32"),
        ({"dim": 0}, "dim is 0"),
        ({"queries": [[[]]], "documents": [[[]]]}, "vectors have no values"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
        ({"dtype": "int8"}, r"queries\[0\] has fractions"),
        ({"dtype": "int8", "queries": [[[300, 1]]], "documents": [[[1, 1]]]}, "outside int8"),
        ({"query_scales": [[1.0]]}, "query_scales must have one number for each vector"),
        ({"query_scales": [[1.0, -1.0]]}, "not negative"),
    ],
)
def test_a_bad_value_is_rejected_with_a_message_that_names_it(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"queries": [QUERY], "documents": DOCUMENTS} | change
    with pytest.raises(BadValue, match=message):
        make_comparison("a", given.pop("queries"), given.pop("documents"), **given)
