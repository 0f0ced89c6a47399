"""Sparse embeddings: the tokens that matter to each text, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.outputs.sparse import SparseRow, check_min_weight, sparse_rows
from penstock.tasks.model import TextModel
from penstock.tasks.rows import ListTask
from penstock.types import PooledOutput, Request


@dataclass(kw_only=True, eq=False)
class Sparse(ListTask[SparseRow]):
    """Token ids and weights of each text, heaviest first. `params.top_k` keeps the heaviest terms."""

    min_weight: float = 0.0  # lighter terms are dropped

    def check(self, model: TextModel) -> None:
        check_min_weight(self.min_weight)
        super().check(model)

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[SparseRow]:
        special = model.tokenizer.special_ids
        return sparse_rows(request, output.values, special, self.params.top_k, self.min_weight)
