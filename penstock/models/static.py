"""Static embeddings: the mean of the tokens' stored vectors, without layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.static import StaticSpec
from penstock.errors import ModelLoadError
from penstock.layers.batch import Batch
from penstock.layers.head import TaskHead
from penstock.types import Task
from penstock.weights.stream import WeightSource


class StaticModel:
    """A table of token vectors in fp32. Its last row is zero: the vector of a text without tokens."""

    is_causal = False
    prunes_last_layer = False
    ignored_tensors: tuple[str, ...] = ()

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [vocabulary + 1, dim]
        self.hidden_size = table.shape[1]
        self.heads: dict[Task, TaskHead] = {}

    def __call__(self, batch: Batch) -> Tensor:
        return F.embedding(batch.token_ids, self.table)

    def row_means(self, batch: Batch) -> Tensor:
        """[rows, dim], the mean of each row, computed without copying token vectors."""
        token_ids = batch.token_ids[: batch.num_tokens]
        return F.embedding_bag(token_ids, self.table, batch.cu_lengths, mode="mean", include_last_offset=True)


def build_static_model(spec: StaticSpec, weights: WeightSource) -> StaticModel:
    """Build a table with one row per token id. Rows shared by tokens are repeated, and weights applied."""
    stored = weights.read(spec.tensor, (spec.rows, spec.dim)).to(weights.device)
    table = torch.zeros((spec.vocab_size + 1, spec.dim), dtype=torch.float32, device=weights.device)
    if spec.has_mapping:
        mapping = weights.read("mapping", (spec.vocab_size,)).to(weights.device).long()
        if int(mapping.min()) < 0 or int(mapping.max()) >= spec.rows:
            raise ModelLoadError(
                f"the tensor mapping has numbers beyond the {spec.rows} rows of {spec.tensor}", param="model"
            )
        stored = stored[mapping]
    table[:-1] = stored
    if spec.has_weights:
        table[:-1] *= weights.read("weights", (spec.vocab_size,)).to(weights.device, torch.float32)[:, None]
    weights.check_all_read(())
    return StaticModel(table)
