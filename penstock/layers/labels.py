"""States of labels and words of rows whose prompt names labels, gathered from a step's hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from penstock.types import LabelPlan


class LabelTensors(NamedTuple):
    """A `LabelPlan` on the device."""

    label_tokens: Tensor  # int32 [rows · labels]
    word_tokens: Tensor  # int32 [words]
    word_slots: Tensor  # int32 [words]
    output_rows: Tensor  # int32 [words]
    num_words: Tensor  # int32 [rows]
    num_labels: int
    max_words: int
    num_tokens: int

    @classmethod
    def take(cls, plan: LabelPlan, sent: Iterator[Tensor]) -> LabelTensors:
        """Take the arrays of the plan, which were sent in its order."""
        return cls(
            label_tokens=next(sent),
            word_tokens=next(sent),
            word_slots=next(sent),
            output_rows=next(sent),
            num_words=next(sent),
            num_labels=plan.num_labels,
            max_words=plan.max_words,
            num_tokens=plan.num_tokens,
        )

    @property
    def num_rows(self) -> int:
        return len(self.num_words)

    def labels(self, states: Tensor) -> Tensor:
        """The states of the labels, [rows, labels, width]."""
        found = states.index_select(0, self.label_tokens)
        return found.view(self.num_rows, self.num_labels, -1)

    def words(self, states: Tensor) -> Tensor:
        """The states of the words, [rows, max words, width], with zeros after the last word of a row."""
        padded = states.new_zeros((self.num_rows * self.max_words, states.shape[-1]))
        padded.index_copy_(0, self.word_slots.long(), states.index_select(0, self.word_tokens))
        return padded.view(self.num_rows, self.max_words, -1)

    def by_token(self, values: Tensor) -> Tensor:
        """Scatter values of words [rows, max words, width] to all tokens, with zeros for other tokens."""
        flat = values.reshape(self.num_rows * self.max_words, -1).index_select(0, self.word_slots)
        out = flat.new_zeros((self.num_tokens, flat.shape[-1]))
        return out.index_copy_(0, self.output_rows.long(), flat)
