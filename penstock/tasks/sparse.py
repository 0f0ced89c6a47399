"""Sparse embeddings: the tokens that matter to each text, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.inputs.static_queries import NO_SPECIAL_IDS
from penstock.outputs.sparse import SparseRow, check_min_weight, sparse_rows
from penstock.tasks.model import TextModel
from penstock.tasks.rows import ListTask
from penstock.tasks.run import Prepared
from penstock.types import PooledOutput, Request


@dataclass(kw_only=True, eq=False)
class Sparse(ListTask[SparseRow]):
    """Token ids and weights of each text, heaviest first. `params.top_k` limits the number of terms."""

    min_weight: float = 0.0  # lighter terms are dropped

    def check(self, model: TextModel) -> None:
        check_min_weight(self.min_weight)
        super().check(model)

    async def prepare(self, model: TextModel, request_id: str) -> Prepared[list[SparseRow]]:
        queries = model.queries
        if queries is None or not queries.reads(self.options):
            return await super().prepare(model, request_id)
        request = await queries.request(request_id, self.inputs, self.params, self.options, model.batcher)
        output = queries.output(request)
        return Prepared(request, partial(self._finish_queries, request), output=output)

    def _finish_queries(self, request: Request, output: PooledOutput) -> list[SparseRow]:
        return sparse_rows(request, output.values, NO_SPECIAL_IDS, self.params.top_k, self.min_weight)

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[SparseRow]:
        special = model.tokenizer.special_ids
        return sparse_rows(request, output.values, special, self.params.top_k, self.min_weight)
