"""Runs checks in Penstock: all inputs in one call. Records the tokens that reach the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from penstock.errors import NotPossible
from penstock.handle import EngineHandle, EngineStats, StreamListener, Unsubscribe
from penstock.inputs.generation import SamplingParams
from penstock.offline.engine import Engine
from penstock.offline.local import LocalEngine
from penstock.offline.open import DescribedModel, LocalModel
from penstock.types import MAX_TOP_K, Comparison, PooledOutput, Request, Task
from penstock.verify.references import MAX_GENERATED_TEXTS, MAX_GENERATED_TOKENS
from penstock.verify.samples import Answers, Check, Sample, array


class RecordingEngine(EngineHandle):
    """An engine that records the token ids of every row that it receives."""

    def __init__(self, inner: EngineHandle) -> None:
        self.inner = inner
        self.rows: list[list[int]] = []

    def _note(self, request: Request) -> None:
        ends = np.cumsum(request.lengths)
        self.rows += [row.tolist() for row in np.split(request.token_ids, ends[:-1])]

    async def run(self, request: Request) -> PooledOutput:
        self._note(request)
        return await self.inner.run(request)

    async def compare(self, comparison: Comparison) -> PooledOutput:
        return await self.inner.compare(comparison)

    def stream(self, request: Request, listener: StreamListener) -> Unsubscribe:
        self._note(request)
        return self.inner.stream(request, listener)

    @property
    def ready(self) -> bool:
        return self.inner.ready

    @property
    def unavailable_reason(self) -> str:
        return self.inner.unavailable_reason

    def stats(self) -> EngineStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class Penstock:
    """A loaded model that answers checks."""

    def __init__(self, described: DescribedModel) -> None:
        local = described.load()
        self._recorder = RecordingEngine(local.engine)
        recorder = cast(LocalEngine, self._recorder)
        recorded = LocalModel(local.spec, local.settings, local.text, recorder, local.adapters)
        self._engine = Engine.over(recorded)

    def __enter__(self) -> Penstock:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def answer(self, check: Check, sample: Sample) -> Answers:
        self._recorder.rows = []
        values = [array(value) for value in self._values(check, sample)]
        rows = self._recorder.rows
        return Answers(values, rows if len(rows) == len(values) else None)

    def _values(self, check: Check, sample: Sample) -> Any:
        engine, texts, options = self._engine, list(sample.texts), dict(check.options)
        cut: Mapping[str, Any] = {"truncate_prompt_tokens": -1, "progress": False}
        if check.task is Task.EMBED:
            return engine.embed(texts, **cut, **options)
        if check.task is Task.TOKEN_EMBED:
            return engine.token_embed(texts, **cut, **options)
        if check.task is Task.CLASSIFY:
            return engine.classify(texts, use_activation=False, **cut)
        if check.task is Task.TOKEN_CLASSIFY:
            return engine.token_classify(texts, use_activation=False, **cut)
        if check.task is Task.SPARSE:
            width = engine.spec.vocab_size
            top_k = min(MAX_TOP_K, width)
            return [_dense(row, width) for row in engine.sparse(texts, top_k=top_k, **cut, **options)]
        if check.task is Task.SCORE:
            queries, documents = zip(*sample.pairs, strict=True)
            return engine.score(list(queries), list(documents), **cut)
        if check.task is Task.GENERATE:
            sampling = SamplingParams(temperature=0.0, max_tokens=MAX_GENERATED_TOKENS)
            return [list(each.token_ids) for each in engine.generate(texts[:MAX_GENERATED_TEXTS], sampling)]
        raise NotPossible(f"task {check.task.value!r} is not compared", param="task")


def _dense(weights: Mapping[int, float], width: int) -> Any:
    row = np.zeros(width)
    row[list(weights)] = list(weights.values())
    return row
