"""Scores of queries and documents for offline use: the part of `Engine` and `AsyncEngine` that ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadValue
from penstock.inputs.pair_options import Pair, PairOptions, make_pairs
from penstock.inputs.pairs import check_pairs, finish_pairs, prepare_pairs
from penstock.inputs.processor import InputProcessor
from penstock.inputs.vectors import DTYPES, make_comparison
from penstock.offline.local import LocalEngine
from penstock.outputs.ranking import best, check_top_n
from penstock.types import PooledOutput, PoolingParams, Request, Task

Texts = str | Sequence[str]
_Pairs = Sequence[Pair]
_Prepare = Callable[[str, Any], tuple[Request, _Pairs]]


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document in its place."""

    index: int  # in the caller's list
    score: float
    document: str


class Ranking(ABC):
    _processor: InputProcessor
    _engine: LocalEngine

    @abstractmethod
    def _new_id(self) -> str: ...

    @abstractmethod
    def _in_windows(
        self, rows: Sequence[Any], prepare: _Prepare, progress: bool | None, priority: int
    ) -> Iterator[tuple[Request, _Pairs, PooledOutput]]: ...

    def score(
        self,
        queries: Texts,
        documents: Texts,
        *,
        use_activation: bool | None = None,
        progress: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> NDArray[Any]:
        """How well each document answers its query, [documents]: one query for all, or one a document.

        Cross-encoders read each pair together, embedders compare vectors. `options` are those of
        `PairOptions`: instruction, truncate_prompt_tokens (-1: cut at the model's limit),
        truncation_side, max_tokens_per_query, max_tokens_per_doc. Without `use_activation` scores come
        as the model's configuration says; false gives them raw.
        """
        pairs = make_pairs(queries, documents)
        prepare = scoring(self._processor, use_activation, pair_options(options))
        done = self._in_windows(pairs, prepare, progress, priority)
        return np.concatenate([_scores(self._processor, *each) for each in done])

    def maxsim(
        self,
        queries: Any,
        documents: Sequence[Any],
        *,
        query_scales: Sequence[Any] | None = None,
        document_scales: Sequence[Any] | None = None,
    ) -> NDArray[Any]:
        """Late-interaction scores of token vectors that the caller has, [documents]: `queries` is one
        matrix [tokens, dim] for all documents, or a list with one for each; `documents` is a list of
        matrices. float32, float16, or int8 with optional scales, one a vector."""
        one = isinstance(queries, np.ndarray) and queries.ndim == 2
        given = [queries] if one else list(queries)
        kinds = {np.asarray(matrix).dtype for matrix in (*given, *documents) if len(matrix)}
        dtype = str(next(iter(kinds))) if len(kinds) == 1 else "float32"
        comparison = make_comparison(
            self._new_id(),
            given,
            documents,
            dtype=dtype if dtype in DTYPES else "float32",
            query_scales=query_scales,
            document_scales=document_scales,
        )
        return self._engine.submit(comparison).result().values[:, 0]

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[Ranked]:
        """The documents from best to worst, the first `top_n` of them; equals stay in their order."""
        check_top_n(top_n)
        return ranked(self.score(query, list(documents), **options), documents, top_n)


class AsyncRanking(ABC):
    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    async def _submit(
        self, texts: Any, prepare: _Prepare, priority: int
    ) -> tuple[Request, _Pairs, PooledOutput]: ...

    async def score(
        self,
        queries: Texts,
        documents: Texts,
        *,
        use_activation: bool | None = None,
        priority: int = 0,
        **options: Any,
    ) -> NDArray[Any]:
        """As `Engine.score`."""
        pairs = make_pairs(queries, documents)
        processor: InputProcessor = self._open()._processor
        prepare = scoring(processor, use_activation, pair_options(options))
        return _scores(processor, *await self._submit(pairs, prepare, priority))

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[Ranked]:
        """As `Engine.rerank`."""
        check_top_n(top_n)
        return ranked(await self.score(query, list(documents), **options), documents, top_n)


def scoring(processor: InputProcessor, use_activation: bool | None, options: PairOptions) -> _Prepare:
    """Checks now, prepares later."""
    params = PoolingParams(Task.SCORE, normalize=use_activation)
    check_pairs(processor, params, options)

    def prepare(request_id: str, pairs: _Pairs) -> tuple[Request, _Pairs]:
        return prepare_pairs(processor, request_id, pairs, params, options), pairs

    return prepare


def _scores(processor: InputProcessor, request: Request, pairs: _Pairs, answer: PooledOutput) -> NDArray[Any]:
    return finish_pairs(processor.spec, pairs, request, answer).values[:, 0]


def ranked(scores: NDArray[Any], documents: Sequence[str], top_n: int | None) -> list[Ranked]:
    return [Ranked(index, float(scores[index]), documents[index]) for index in best(scores, top_n)]


def pair_options(values: dict[str, Any]) -> PairOptions:
    try:
        return PairOptions(**values)
    except TypeError:
        unknown = sorted(set(values) - set(PairOptions.__dataclass_fields__))
        raise BadValue(f"unknown option {unknown[0]!r}", param=unknown[0]) from None
