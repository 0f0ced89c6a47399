"""M-RoPE positions of a row's tokens (time, row, column), which depend on its images."""

from __future__ import annotations

import numpy as np

from penstock.types import Ints, cumulative, runs


def rope_positions(lengths: Ints, rows: Ints, starts: Ints, grids: Ints) -> Ints:
    """Positions [tokens · 3] of rows with `lengths` tokens.

    Image i begins at token `starts`[i] of row `rows`[i], and has one token for each cell of `grids`[i]
    (tokens down and across). Images are in the order of their tokens. A text token has the same position on
    all axes. All tokens of an image have the time of its first token; their other positions count from there
    by row and column. The text after an image continues after the largest position in it.
    """
    counts, row_starts = grids[:, 0] * grids[:, 1], cumulative(lengths)[:-1]
    first_tokens = row_starts[rows] + starts  # first token of each image among all tokens
    jump = np.ones(int(lengths.sum()) + 1, dtype=np.int32)  # difference from the previous position
    jump[first_tokens + counts] += grids.max(axis=1, initial=0) - counts
    reached = np.cumsum(jump, dtype=np.int32)
    position = reached[:-1] - np.repeat(reached[row_starts], lengths)
    out = np.repeat(position[:, None], 3, axis=1)
    tokens = runs(first_tokens, counts)
    cell = runs(np.zeros_like(counts), counts)
    across = np.repeat(grids[:, 1], counts)
    out[tokens] = np.repeat(position[first_tokens], counts)[:, None]
    out[tokens, 1] += cell // across
    out[tokens, 2] += cell % across
    return out.reshape(-1)


def rope_delta(positions: Ints) -> int:
    """The offset from index to position for tokens after a row with these positions [tokens · 3]."""
    return int(positions.max(initial=-1)) + 1 - len(positions) // 3
