"""Token, position and segment tables, added up for a flat run of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.layers.batch import Batch


class EncoderEmbedding:
    """word + position + segment. Without segments in a batch, segment 0 is one vector for all."""

    def __init__(
        self, words: Tensor, positions: Tensor, segments: Tensor | None, first_position: int = 0
    ) -> None:
        self.words = words  # [vocabulary, hidden]
        self.positions = positions[first_position:]  # [limit, hidden], so that position 0 is row 0
        self.segments = segments  # [segments, hidden]
        if segments is not None:
            self.plain_positions = self.positions + segments[0]
        else:
            self.plain_positions = self.positions

    def __call__(self, batch: Batch) -> Tensor:
        words = F.embedding(batch.token_ids, self.words)
        if batch.type_ids is None or self.segments is None:
            return words.add_(F.embedding(batch.positions, self.plain_positions))
        words.add_(F.embedding(batch.positions, self.positions))
        return words.add_(F.embedding(batch.type_ids, self.segments))
