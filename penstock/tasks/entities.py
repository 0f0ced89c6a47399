"""Entities: the spans that a token classifier or a GLiNER model finds in each text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from penstock.errors import BadValue, NotPossible
from penstock.inputs.labelled import MAX_LABELS, LabelledOptions, TextWords
from penstock.inputs.offsets import TokenOffsets, join_with_offsets, require_texts
from penstock.outputs.entities import AGGREGATIONS, OUTSIDE, Aggregation, Entity, find_entities
from penstock.outputs.spans import SpanOptions, choose, span_candidates, to_entities, word_candidates
from penstock.tasks.labels import check_labels
from penstock.tasks.model import TextModel
from penstock.tasks.rows import MAX_LOOP_TOKENS, TextTask, concatenate
from penstock.tasks.run import Prepared
from penstock.types import TEXT_MARK, PooledOutput, PoolingParams, Request, Task

_PARAMS = PoolingParams(Task.TOKEN_CLASSIFY)
_SPANS, _ROWS = SpanOptions(), LabelledOptions()


@dataclass(kw_only=True, eq=False)
class FindEntities(TextTask[list[list[Entity]]]):
    """The entities of each text, with their label, score and position."""

    params: PoolingParams = _PARAMS
    aggregation: Aggregation = "simple"
    ignored: Sequence[str] = OUTSIDE  # labels to leave out, or tags if tokens are merged

    def check(self, model: TextModel) -> None:
        if model.spec.entities is not None:
            raise BadValue(
                f"model {model.spec.name} finds the entities that you name; give labels", param="labels"
            )
        super().check(model)
        if self.aggregation not in AGGREGATIONS:
            raise BadValue(
                f"aggregation {self.aggregation!r} is unknown; use {', '.join(AGGREGATIONS)}",
                param="aggregation",
            )

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[list[Entity]]]:
        texts = require_texts(self.inputs, allow_empty_text=self.allows_empty_text)
        prompted = model.processor.with_prompt(texts, self.options)
        limit = model.processor.row_limit(self.params, self.options)
        located = await model.batcher.encode_with_offsets(prompted, self.options.add_special_tokens, limit)
        join = partial(
            join_with_offsets, model.processor, request_id, texts, located, self.params, self.options
        )
        num_tokens = sum(len(row.ids) for row in located)
        is_large = num_tokens > MAX_LOOP_TOKENS
        request, offsets = await model.batcher.call(join, num_tokens) if is_large else join()
        return Prepared(request, partial(self._entities, model, request, offsets), is_slow_to_finish=is_large)

    def merge(self, parts: Sequence[list[list[Entity]]]) -> list[list[Entity]]:
        return concatenate(parts)

    def _entities(
        self, model: TextModel, request: Request, offsets: TokenOffsets, output: PooledOutput
    ) -> list[list[Entity]]:
        return find_entities(
            offsets.texts,
            output.values,
            request.lengths,
            offsets.chars,
            offsets.words,
            model.spec.labels,
            self.aggregation,
            self.ignored,
        )


@dataclass(kw_only=True, eq=False)
class FindLabelledEntities:
    """The entities of each text that match the caller's labels."""

    texts: str | Sequence[str]
    labels: Sequence[str]
    options: SpanOptions = _SPANS
    rows: LabelledOptions = _ROWS
    allows_empty_text: bool = True

    @property
    def num_rows(self) -> int:
        return 1 if isinstance(self.texts, str) else len(self.texts)

    def check(self, model: TextModel) -> None:
        if model.processor.labelled is None:
            raise NotPossible(
                f"model {model.spec.name} takes no labels: it finds entities of its own labels, or none; "
                "leave labels out, or serve a GLiNER model",
                param="labels",
            )
        check_labels(self.labels, MAX_LABELS)
        if not 0 <= self.options.threshold <= 1:  # refuses NaN as well
            raise BadValue(f"threshold is {self.options.threshold:g}; use 0 to 1", param="threshold")

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[list[Entity]]]:
        texts = require_texts(self.texts, allow_empty_text=self.allows_empty_text)
        inputs = model.processor.labelled
        assert inputs is not None
        make = partial(inputs.prepare, request_id, texts, self.labels, self.rows)
        request, words = await model.batcher.call(make, sum(map(len, texts)))
        finish = partial(self._entities, model, request, words)
        is_slow = request.num_tokens * len(self.labels) > MAX_LOOP_TOKENS
        return Prepared(request, finish, is_slow_to_finish=is_slow)

    def windows(self, size: int) -> Iterator[FindLabelledEntities]:
        texts = require_texts(self.texts)
        return (replace(self, texts=texts[first : first + size]) for first in range(0, len(texts), size))

    def merge(self, parts: Sequence[list[list[Entity]]]) -> list[list[Entity]]:
        return concatenate(parts)

    def _entities(
        self, model: TextModel, request: Request, words: TextWords, output: PooledOutput
    ) -> list[list[Entity]]:
        assert request.token_mask is not None
        entities, ends = model.spec.entities, np.cumsum(words.counts).tolist()
        is_token_level = entities is not None and entities.is_token_level
        candidates = word_candidates if is_token_level else span_candidates
        scores = output.values[(request.token_mask & TEXT_MARK) != 0].astype(np.float32)
        out: list[list[Entity]] = []
        for text, first, end in zip(words.texts, [0, *ends[:-1]], ends, strict=True):
            found = candidates(scores[first:end], len(self.labels), self.options.threshold)
            out.append(to_entities(text, choose(found, self.options), words.chars[first:end], self.labels))
        return out
