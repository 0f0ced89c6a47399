"""Entities: the spans that a token classifier finds in each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.errors import BadValue
from penstock.inputs.offsets import TokenOffsets, join_with_offsets, require_texts
from penstock.outputs.entities import AGGREGATIONS, Aggregation, Entity, find_entities
from penstock.tasks.model import TextModel
from penstock.tasks.rows import MAX_LOOP_TOKENS, TextTask, concatenate
from penstock.tasks.run import Prepared
from penstock.types import PooledOutput, PoolingParams, Request, Task

_PARAMS = PoolingParams(Task.TOKEN_CLASSIFY)


@dataclass(kw_only=True, eq=False)
class FindEntities(TextTask[list[list[Entity]]]):
    """The entities of each text, with their label, score and place."""

    params: PoolingParams = _PARAMS
    aggregation: Aggregation = "simple"

    def check(self, model: TextModel) -> None:
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
        )
