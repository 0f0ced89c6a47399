"""Scores all pairs of a step beside the vectors that the step has made; only scores leave.

Queries, and documents where they are kept, lie in a store on the device, so that what a later step needs
of an earlier one is there. Its places are given out by `scheduler.vectors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.language import use_kernel
from penstock.kernels.maxsim import maxsim
from penstock.kernels.pooling import copy_rows, copy_rows_reference
from penstock.types import PairPlan


@dataclass(frozen=True, slots=True, eq=False)
class PairTensors:
    """A `PairPlan` on the device."""

    plan: PairPlan
    query_starts: Tensor  # int32 [queries]
    query_lengths: Tensor
    pair_queries: Tensor  # int32 [pairs]
    document_starts: Tensor
    document_lengths: Tensor
    write_from: Tensor  # int32 [written]
    write_to: Tensor

    @classmethod
    def take(cls, plan: PairPlan, sent: Iterator[Tensor]) -> PairTensors:
        """The tensors of `plan.arrays()`, in the same order."""
        return cls(plan, *(next(sent) for _ in plan.arrays()))


class PairScorer:
    """Late interaction of token vectors, or a similarity of one vector a row."""

    def __init__(self, store: Tensor, *, late: bool, similarity: str) -> None:
        self.store = store  # [places, dim]
        self.late = late
        self.similarity = similarity

    def __call__(self, vectors: Tensor, pairs: PairTensors) -> Tensor:
        """vectors [n, dim] of the step's run → fp32 scores [pairs, 1]."""
        vectors = vectors.to(self.store.dtype)
        if len(pairs.write_from):
            write = copy_rows if use_kernel(vectors) else copy_rows_reference
            write(vectors, pairs.write_from, self.store, pairs.write_to)
        total, stored = len(pairs.pair_queries), pairs.plan.num_from_store
        if not total:
            return vectors.new_empty((0, 1), dtype=torch.float32)
        which = pairs.pair_queries, pairs.document_starts, pairs.document_lengths
        if not stored or stored == total:
            return self._scores(self.store if stored else vectors, pairs, *which)[:, None]
        own = total - stored
        of_run = self._scores(vectors, pairs, *(each[:own] for each in which))
        of_store = self._scores(self.store, pairs, *(each[own:] for each in which))
        return torch.cat([of_run, of_store])[:, None]

    def _scores(
        self, documents: Tensor, pairs: PairTensors, of: Tensor, starts: Tensor, lengths: Tensor
    ) -> Tensor:
        """Of pairs of a query and of a document that begins there and is so long."""
        if not self.late:
            query = self.store.index_select(0, pairs.query_starts.index_select(0, of))
            return similarity(query, documents.index_select(0, starts), self.similarity)
        return maxsim(
            self.store,
            documents,
            pairs.query_starts,
            pairs.query_lengths,
            starts,
            lengths,
            of,
            max_query_length=pairs.plan.max_query_length,
            max_document_length=pairs.plan.max_document_length,
        )


SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def similarity(query: Tensor, document: Tensor, kind: str) -> Tensor:
    """[pairs, dim] twice → [pairs]. Distances are negative, so that more is always nearer."""
    if kind == "cosine":
        return torch.nn.functional.cosine_similarity(query, document, dim=-1)
    if kind == "dot":
        return (query * document).sum(dim=-1)
    distance: Tensor = torch.linalg.vector_norm(query - document, ord=2 if kind == "euclidean" else 1, dim=-1)
    return -distance
