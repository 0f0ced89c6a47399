"""Where an instruction ends inside a row: found once, on the CPU, for the whole batch.

Models like GritLM mark the end of the instruction in the text itself and leave everything up to it
out of the mean. Token ids never travel to a device for this.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Ints, cumulative


class InstructionEnd:
    """Finds the first mark of each row. A mark is tokenised one way at the start of a text and another
    after a line break, so both forms are looked for."""

    def __init__(self, tokenizer: Tokenizer, mark: str) -> None:
        (alone,) = tokenizer.encode([mark], add_special_tokens=False)
        (before,) = tokenizer.encode(["a\n"], add_special_tokens=False)
        (after,) = tokenizer.encode(["a\n" + mark], add_special_tokens=False)
        self.forms = [alone, after[len(before) :]]
        self.at_start = tokenizer.prefix

    def __call__(self, token_ids: Ints, lengths: Ints) -> Ints:
        """Tokens to leave out of each row: through the mark, or the leading special tokens without one."""
        starts = cumulative(lengths)
        row_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        skip = np.full(len(lengths), len(token_ids) + 1, dtype=np.int64)
        for form in self.forms:
            ends = np.flatnonzero(_occurrences(token_ids, form)) + len(form)  # one past the mark
            rows = row_of[ends - 1]
            inside = ends - starts[rows] >= len(form)  # a mark does not span rows
            np.minimum.at(skip, rows[inside], ends[inside] - starts[rows[inside]])
        skip = np.where(skip > len(token_ids), self.at_start, skip)
        return np.minimum(skip, lengths - 1).astype(np.int32)


def _occurrences(token_ids: Ints, form: Ints) -> NDArray[np.bool_]:
    """True where `form` begins."""
    places = len(token_ids) - len(form) + 1
    found = np.ones(max(places, 0), dtype=bool)
    for offset, token in enumerate(form):
        found &= token_ids[offset : offset + len(found)] == token
    return found
