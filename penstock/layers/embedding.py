"""The sum of token, position and segment embeddings of a ragged batch. Image features replace
placeholders."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.embedding import embed
from penstock.kernels.language import use_kernel
from penstock.layers.adapted_table import AdaptedTable
from penstock.layers.batch import Batch
from penstock.layers.norm import LayerNorm


class EncoderEmbedding:
    """norm(word + position + segment); positions, segments and norm are optional.

    A batch without segments uses segment 0 for every token.
    """

    def __init__(
        self,
        words: Tensor,
        positions: Tensor | None,
        segments: Tensor | None,
        first_position: int = 0,
        norm: LayerNorm | None = None,
    ) -> None:
        self.words = words  # [vocabulary, hidden]
        self.segments = segments  # [segments, hidden]
        self.positions: Tensor | None = None  # [positions, hidden]; row 0 is position 0
        self.plain_positions: Tensor | None = None  # `positions` with segment 0 added
        if positions is not None:
            self.positions = positions[first_position:]
            self.plain_positions = self.positions if segments is None else self.positions + segments[0]
        self.norm = norm
        self.adapted: tuple[AdaptedTable | None, AdaptedTable | None] = (None, None)  # words and segments

    def __call__(self, batch: Batch) -> Tensor:
        if batch.images is None and use_kernel(self.words) and not self._is_adapted:
            return self._fused(batch)
        out = self._adapted_sum(batch) if self._is_adapted else self.sum(batch)
        if batch.images is not None:
            out = batch.images.embed(out)
        return out if self.norm is None else self.norm(out)

    @property
    def _is_adapted(self) -> bool:
        return any(table is not None and table.is_active for table in self.adapted)

    def _fused(self, batch: Batch) -> Tensor:
        norm = None if self.norm is None else (self.norm.weight, self.norm.bias, self.norm.eps)
        return embed(
            batch.token_ids, self.words, batch.positions, self.positions, batch.type_ids, self.segments, norm
        )

    def _adapted_sum(self, batch: Batch) -> Tensor:
        words, segments = self.adapted
        out = F.embedding(batch.token_ids, self.words)
        if words is not None:
            words.change_(out, batch.token_ids)
        if self.segments is not None:
            ids = batch.token_ids.new_zeros(len(out)) if batch.type_ids is None else batch.type_ids
            added = F.embedding(ids, self.segments)
            out += added if segments is None else segments.change_(added, ids)
        return out if self.positions is None else out.add_(F.embedding(batch.positions, self.positions))

    def sum(self, batch: Batch) -> Tensor:
        """The sum, without the norm."""
        out = F.embedding(batch.token_ids, self.words)
        if self.segments is not None and batch.type_ids is not None:
            out.add_(F.embedding(batch.type_ids, self.segments))
            return out if self.positions is None else out.add_(F.embedding(batch.positions, self.positions))
        if self.plain_positions is not None:
            return out.add_(F.embedding(batch.positions, self.plain_positions))
        return out if self.segments is None else out.add_(self.segments[0])
