"""Per-token values of a request, row by row, without masked tokens."""

from __future__ import annotations

import numpy as np

from penstock.types import Array, Ints, Request, split_rows


def select_tokens(request: Request, values: Array) -> tuple[Array, Ints]:
    """The values [tokens, width] of the tokens that are not masked, and their number in each row."""
    if request.token_mask is None:
        return values, request.lengths
    kept = request.token_mask > 0
    return values[kept], np.add.reduceat(kept, request.starts, dtype=np.int32)


def token_rows(request: Request, values: Array) -> list[Array]:
    """One matrix [tokens, width] per row."""
    values, lengths = select_tokens(request, values)
    return split_rows(values, lengths)
