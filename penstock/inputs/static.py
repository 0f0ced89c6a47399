"""Rows of a model with static embeddings, laid out as in its library."""

from __future__ import annotations

import numpy as np

from penstock.checkpoint.static import StaticSpec
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Ints, cumulative


class StaticInputs:
    """Drops unknown tokens if model2vec does. A text without tokens gets a token whose vector is zero."""

    def __init__(self, spec: StaticSpec, tokenizer: Tokenizer) -> None:
        tokenizer.without_special_tokens()
        self._unknown = tokenizer.unknown_id if spec.drops_unknown else None
        self._empty = spec.vocab_size  # index of an extra row after the table

    def __call__(self, token_ids: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Convert the truncated rows of texts to the rows to run."""
        if self._unknown is not None and not (kept := token_ids != self._unknown).all():
            ends = np.concatenate(([0], np.cumsum(kept)))[cumulative(lengths)]
            token_ids, lengths = token_ids[kept], np.diff(ends).astype(np.int32)
        if not lengths.all():
            is_empty = lengths == 0
            token_ids = np.insert(token_ids, cumulative(lengths)[:-1][is_empty], self._empty)
            lengths = np.where(is_empty, 1, lengths).astype(np.int32)
        return token_ids, lengths
