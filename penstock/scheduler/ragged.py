"""Index arithmetic on ragged runs."""

from __future__ import annotations

from penstock.types import Ints, runs


def tokens_of(rows: Ints, lengths: Ints, starts: Ints) -> Ints:
    """The indices of all tokens of these rows in the flat run, row after row."""
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
