"""Rows of token ids in one flat array, so that thousands of short rows need no Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import overload

import numpy as np

from penstock.types import Ints, cumulative


class TokenRows(Sequence[Ints]):
    """Token ids of all rows, concatenated. As a sequence, it has one array for each row."""

    def __init__(self, token_ids: Ints, lengths: Ints) -> None:
        self.token_ids = token_ids  # int32 [tokens]
        self.lengths = lengths  # int32 [rows]

    @cached_property
    def _starts(self) -> Ints:
        return cumulative(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Ints: ...

    @overload
    def __getitem__(self, index: slice) -> list[Ints]: ...

    def __getitem__(self, index: int | slice) -> Ints | list[Ints]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self.token_ids[self._starts[at] : self._starts[at + 1]]

    @property
    def max_length(self) -> int:
        return int(self.lengths.max(initial=0))


Rows = list[Ints] | TokenRows


def num_tokens(rows: Rows) -> int:
    return sum(map(len, rows)) if isinstance(rows, list) else len(rows.token_ids)


def longest(rows: Rows) -> int:
    """Tokens of the longest row."""
    return max(map(len, rows), default=0) if isinstance(rows, list) else rows.max_length


def row_lengths(rows: Rows) -> Ints:
    if not isinstance(rows, list):
        return rows.lengths
    return _one_length(len(rows[0])) if len(rows) == 1 else np.array(list(map(len, rows)), dtype=np.int32)


@lru_cache(maxsize=1024)
def _one_length(length: int) -> Ints:
    """The lengths of a request of one row, which most have. Requests share the array, so nothing may write to
    it."""
    lengths = np.array([length], dtype=np.int32)
    lengths.flags.writeable = False
    return lengths


def flat_ids(rows: Rows) -> Ints:
    if not isinstance(rows, list):
        return rows.token_ids
    return rows[0] if len(rows) == 1 else np.concatenate(rows)
