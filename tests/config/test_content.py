from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.content import contents
from tests.helpers import ints, make_request

LENGTHS = [4, 1, 7]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"type_ids": [1] * 12},
        {"skip": [1, 0, 2]},
        {"type_ids": [0, 1] * 6, "skip": [3, 0, 1], "keys": [2, 1, 5]},
    ],
)
def test_a_row_has_the_same_key_alone_as_among_others(more: dict[str, Any]) -> None:
    """Or a request of one row would never follow one of many."""
    together = make_request("all", LENGTHS, **more)
    ends = np.cumsum(LENGTHS)
    for row, key in enumerate(contents(together)):
        alone = make_request("one", [LENGTHS[row]])
        tokens = slice(int(ends[row]) - LENGTHS[row], int(ends[row]))
        alone.token_ids = together.token_ids[tokens]
        for name in more:
            part = tokens if name == "type_ids" else slice(row, row + 1)
            setattr(alone, name, getattr(together, name)[part])
        assert contents(alone) == [key]


def test_adapters_and_kept_tokens_are_part_of_the_key() -> None:
    plain, kept, adapted = (make_request("a", [3]) for _ in range(3))
    kept.keep = ints([1, 0, 1])
    adapted.adapters = ints([1])
    assert len({contents(request)[0] for request in (plain, kept, adapted)}) == 3
