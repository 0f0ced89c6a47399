"""Classification of texts, of pairs of texts and of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.errors import BadValue
from penstock.inputs.pair_options import TWO_TEXTS, Pair, PairOptions, check_are_pairs
from penstock.inputs.pairs import prepare_classified_pairs
from penstock.inputs.processor import DEFAULT_OPTIONS, InputOptions
from penstock.outputs.tokens import token_rows
from penstock.tasks.model import TextModel
from penstock.tasks.rows import ListTask, Matrix, MatrixTask
from penstock.tasks.run import Prepared
from penstock.types import Array, PooledOutput, PoolingParams, Request, Task

_PARAMS = PoolingParams(Task.CLASSIFY)
_NOT_FOR_PAIRS = ("prompt_name", "prompt", "instruction", "input_type", "adapter")


class Classify(MatrixTask):
    """The probability of each label for each text, [texts, labels]."""


@dataclass(kw_only=True, eq=False)
class ClassifyPairs:
    """The probability of each label for each pair of texts, read as one row, [pairs, labels]."""

    pairs: Sequence[Pair]
    params: PoolingParams = _PARAMS
    options: InputOptions = DEFAULT_OPTIONS
    allows_empty_text: bool = True
    max_request_tokens: int | None = None  # total of all rows; None: no limit

    @property
    def num_rows(self) -> int:
        return len(self.pairs)

    def check(self, model: TextModel) -> None:
        model.processor.check(self.params)
        check_are_pairs(self.pairs, allow_empty_text=self.allows_empty_text)
        for name in _NOT_FOR_PAIRS:
            if getattr(self.options, name) is not None:
                raise BadValue(f"{name} does not apply to pairs of texts; leave it out", param=name)
        if not self.options.add_special_tokens:
            raise BadValue(
                "add_special_tokens is false, but the special tokens tell the two texts of a pair apart; "
                "leave it out",
                param="add_special_tokens",
            )

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[Matrix]:
        options = PairOptions(
            truncate_prompt_tokens=self.options.truncate_prompt_tokens,
            truncation_side=self.options.truncation_side,
            cache_salt=self.options.cache_salt,
            max_request_tokens=self.max_request_tokens,
            names=TWO_TEXTS,
        )
        make = partial(
            prepare_classified_pairs, model.processor, request_id, self.pairs, self.params, options
        )
        size = sum(len(first) + len(second) for first, second in self.pairs)
        request = await model.batcher.call(make, size)
        return Prepared(request, lambda output: output.values)

    def windows(self, size: int) -> Iterator[ClassifyPairs]:
        for first in range(0, len(self.pairs), size):
            yield replace(self, pairs=self.pairs[first : first + size])

    def merge(self, parts: Sequence[Matrix]) -> Matrix:
        return np.concatenate(parts)


class TokenClassify(ListTask[Array]):
    """The probability of each label for each token: for each text a matrix [tokens, labels]."""

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[Array]:
        return token_rows(request, output.values)
