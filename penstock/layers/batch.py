"""The ragged batch as the model sees it: device tensors, made from a plan before the first launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.core import LengthGroup


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    token_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    type_ids: Tensor | None  # int32 [tokens]; None: all zero
    cu_lengths: Tensor  # int32 [rows + 1]
    lengths: Tensor  # int32 [rows]
    skip: Tensor | None  # int32 [rows], leading tokens left out of pooling
    groups: tuple[LengthGroup, ...]  # rows of equal length, known on the CPU
    max_length: int
    num_tokens: int
    num_rows: int
