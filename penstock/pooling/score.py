"""Scores of cross-encoders, from the outputs of their heads."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.checkpoint.score import ScoreSpec


class ScoreHead:
    """Scores from head outputs, [rows, outputs] → [rows, 1]: the first score output, minus the second if any.

    If the spec names no output, the outputs are returned unchanged.
    """

    def __init__(self, spec: ScoreSpec) -> None:
        self.outputs = spec.outputs
        self.activation = spec.activation
        self.scale = spec.scale

    def __call__(self, values: Tensor) -> Tensor:
        if not self.outputs:
            return values
        first, *rest = (values[:, output : output + 1] for output in self.outputs)
        return first - rest[0] if rest else first

    def activate(self, scores: Tensor) -> Tensor:
        if self.activation == "identity":
            return scores
        return torch.sigmoid(scores if self.scale == 1.0 else scores / self.scale)
