"""Scores of query–document pairs, and rankings of documents by score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.inputs.pair_options import DEFAULT_PAIR_OPTIONS, Pair, PairOptions
from penstock.inputs.pairs import check_pairs, finish_pairs, prepare_pairs
from penstock.outputs.ranking import top_indices
from penstock.tasks.model import TextModel
from penstock.tasks.rows import MAX_LOOP_TOKENS
from penstock.tasks.run import Prepared
from penstock.types import PooledOutput, PoolingParams, Request, Task

_PARAMS = PoolingParams(Task.SCORE)


@dataclass(kw_only=True, eq=False)
class Score:
    """How well each document answers its query, [pairs]."""

    pairs: Sequence[Pair]
    params: PoolingParams = _PARAMS
    options: PairOptions = DEFAULT_PAIR_OPTIONS

    @property
    def num_rows(self) -> int:
        return len(self.pairs)

    def check(self, model: TextModel) -> None:
        check_pairs(model.processor, self.params, self.options)

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[NDArray[Any]]:
        make = partial(prepare_pairs, model.processor, request_id, self.pairs, self.params, self.options)
        size = sum(len(text) for pair in self.pairs for text in pair if isinstance(text, str))
        request = await model.batcher.call(make, size)
        is_slow = request.num_tokens > MAX_LOOP_TOKENS and model.spec.score_kind == "list"
        return Prepared(request, partial(self._scores, model, request), is_slow_to_finish=is_slow)

    def _scores(self, model: TextModel, request: Request, output: PooledOutput) -> NDArray[Any]:
        return finish_pairs(model.spec, self.pairs, request, output).values[:, 0]

    def windows(self, size: int) -> Iterator[Score]:
        for first in range(0, len(self.pairs), size):
            yield replace(self, pairs=self.pairs[first : first + size])

    def merge(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """One document of a ranking."""

    index: int  # position in the caller's list
    score: float
    document: str


def rank(scores: NDArray[Any], documents: Sequence[str], top_n: int | None = None) -> list[RankedDocument]:
    """The documents from best to worst, at most `top_n`; equal scores keep the caller's order."""
    return [
        RankedDocument(index, float(scores[index]), documents[index]) for index in top_indices(scores, top_n)
    ]
