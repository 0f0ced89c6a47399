from __future__ import annotations

import numpy as np

from penstock.outputs.tokens import select_tokens, token_rows
from tests.helpers import ints, make_request

VALUES = np.arange(12, dtype=np.float32).reshape(6, 2)


def test_without_a_mask_rows_have_all_tokens() -> None:
    rows = token_rows(make_request("a", [1, 3, 2]), VALUES)
    assert [row[:, 0].tolist() for row in rows] == [[0], [2, 4, 6], [8, 10]]


def test_masked_tokens_are_left_out() -> None:
    request = make_request("a", [1, 3, 2])
    request.token_mask = ints([1, 0, 1, 1, 1, 0])
    assert [row[:, 0].tolist() for row in token_rows(request, VALUES)] == [[0], [4, 6], [8]]
    values, lengths = select_tokens(request, VALUES)
    assert values[:, 0].tolist() == [0, 4, 6, 8] and lengths.tolist() == [1, 2, 1]
