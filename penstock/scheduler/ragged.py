"""Index arithmetic on ragged runs."""

from __future__ import annotations

import numpy as np

from penstock.types import Ints, cumulative


def ragged_arange(starts: Ints, lengths: Ints, cu_lengths: Ints) -> Ints:
    """For each row the indices start, start + 1, … up to its length; all rows concatenated."""
    shift = np.repeat(starts - cu_lengths[:-1], lengths)
    return shift + np.arange(len(shift), dtype=np.int32)


def runs(starts: Ints, lengths: Ints) -> Ints:
    """`ragged_arange` for callers without cumulative lengths."""
    return ragged_arange(starts, lengths, cumulative(lengths))


def tokens_of(rows: Ints, lengths: Ints, starts: Ints) -> Ints:
    """The indices in the flat run of all tokens of these rows, row after row."""
    return runs(starts[rows], lengths[rows])


def consecutive_tokens(rows: Ints, lengths: Ints, starts: Ints) -> slice | None:
    """The tokens of these rows as a slice; None if the rows are not consecutive."""
    count = len(rows)
    if not count:
        return slice(0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first != count - 1 or (count > 2 and not (rows[1:] > rows[:-1]).all()):
        return None
    return slice(int(starts[first]), int(starts[last] + lengths[last]))
