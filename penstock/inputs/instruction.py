"""Finds the end of the instruction in each row of a request, on the CPU.

Models like GritLM mark the end of the instruction in the text, and pool only the tokens after it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Ints, cumulative


class InstructionEnd:
    """Finds the first mark in each row.

    A mark tokenises differently at the start of a text and after a line break, so both forms are searched.
    """

    def __init__(self, tokenizer: Tokenizer, mark: str) -> None:
        (alone,) = tokenizer.encode([mark], add_special_tokens=False)
        (before,) = tokenizer.encode(["a\n"], add_special_tokens=False)
        (after,) = tokenizer.encode(["a\n" + mark], add_special_tokens=False)
        self.forms = [alone, after[len(before) :]]
        self.num_leading = tokenizer.prefix

    def __call__(self, token_ids: Ints, lengths: Ints) -> Ints:
        """Number of leading tokens to skip in each row: up to and including the mark.

        Without a mark, only the special tokens are skipped.
        """
        starts = cumulative(lengths)
        row_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        skip = np.full(len(lengths), len(token_ids) + 1, dtype=np.int64)
        for form in self.forms:
            ends = np.flatnonzero(_occurrences(token_ids, form)) + len(form)  # one past the mark
            rows = row_of[ends - 1]
            inside = ends - starts[rows] >= len(form)  # a mark that spans two rows does not count
            np.minimum.at(skip, rows[inside], ends[inside] - starts[rows[inside]])
        skip = np.where(skip > len(token_ids), self.num_leading, skip)
        return np.minimum(skip, lengths - 1).astype(np.int32)


def _occurrences(token_ids: Ints, form: Ints) -> NDArray[np.bool_]:
    """True where `form` begins."""
    num_positions = len(token_ids) - len(form) + 1
    found = np.ones(max(num_positions, 0), dtype=bool)
    for offset, token in enumerate(form):
        found &= token_ids[offset : offset + len(found)] == token
    return found
