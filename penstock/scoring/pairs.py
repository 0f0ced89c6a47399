"""Scores of all pairs of a step, computed on the device from the step's vectors; only scores are returned.

A vector store on the device keeps queries, and documents if they are cached, for later steps.
`scheduler.vector_cache` assigns the offsets.
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
    """Scores pairs: late interaction of token vectors, or a similarity of one vector per row."""

    def __init__(self, store: Tensor, *, late: bool, similarity: str) -> None:
        self.store = store  # [capacity, dim]
        self.late = late
        self.similarity = similarity

    def __call__(self, vectors: Tensor, pairs: PairTensors) -> Tensor:
        """Score the pairs of a step from its vectors [n, dim], fp32 [pairs, 1]."""
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
        num_own = total - stored
        of_run = self._scores(vectors, pairs, *(each[:num_own] for each in which))
        of_store = self._scores(self.store, pairs, *(each[num_own:] for each in which))
        return torch.cat([of_run, of_store])[:, None]

    def _scores(
        self, documents: Tensor, pairs: PairTensors, queries: Tensor, starts: Tensor, lengths: Tensor
    ) -> Tensor:
        """Score pairs, given the query of each, and the start and length of its document in `documents`."""
        if not self.late:
            query = self.store.index_select(0, pairs.query_starts.index_select(0, queries))
            return similarity(query, documents.index_select(0, starts), self.similarity)
        return maxsim(
            self.store,
            documents,
            pairs.query_starts,
            pairs.query_lengths,
            starts,
            lengths,
            queries,
            max_query_length=pairs.plan.max_query_length,
            max_document_length=pairs.plan.max_document_length,
        )


SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def similarity(query: Tensor, document: Tensor, kind: str) -> Tensor:
    """Similarity of vectors, [pairs, dim] twice → [pairs]. Distances are negated, so larger is nearer."""
    if kind == "cosine":
        return torch.nn.functional.cosine_similarity(query, document, dim=-1)
    if kind == "dot":
        return (query * document).sum(dim=-1)
    distance: Tensor = torch.linalg.vector_norm(query - document, ord=2 if kind == "euclidean" else 1, dim=-1)
    return -distance
