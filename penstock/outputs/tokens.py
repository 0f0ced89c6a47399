"""The values of a request's tokens, row by row, without those that take part in no score."""

from __future__ import annotations

import numpy as np

from penstock.types import Array, Ints, Request, split_rows


def select_tokens(request: Request, values: Array) -> tuple[Array, Ints]:
    """The values that are left of [tokens, width], and how many each row has."""
    if request.token_mask is None:
        return values, request.lengths
    kept = request.token_mask > 0
    return values[kept], np.add.reduceat(kept, request.starts, dtype=np.int32)


def token_rows(request: Request, values: Array) -> list[Array]:
    """For each row a matrix [tokens, width]."""
    values, lengths = select_tokens(request, values)
    return split_rows(values, lengths)
