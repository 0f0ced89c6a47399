"""Quality metrics in NumPy: rank correlation, and ranking metrics as trec_eval defines them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Ranking = Sequence[str]  # document ids, best first
Judgements = Mapping[str, int]  # document id → grade; 0 without a judgement


def spearman(left: Values, right: Values) -> float:
    """Pearson's correlation of ranks; equal values share the mean of their ranks.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    0.5
    """
    return float(np.round(np.corrcoef(_ranks(left), _ranks(right))[0, 1], 12))


def _ranks(values: Values) -> Values:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)


def ndcg(ranking: Ranking, judged: Judgements, k: int = 10) -> float:
    """Sum of grade / log2(rank + 1) over the first k, divided by that of the best possible order.

    >>> ndcg(["b", "a"], {"a": 1})  # found at rank 2
    0.6309297535714575
    """
    grades = [judged.get(document, 0) for document in ranking[:k]]
    best = sorted((grade for grade in judged.values() if grade > 0), reverse=True)[:k]
    ideal = _gain(best)
    return _gain(grades) / ideal if ideal else 0.0


def _gain(grades: Sequence[int]) -> float:
    return sum(max(grade, 0) / float(np.log2(rank + 2)) for rank, grade in enumerate(grades))


def reciprocal_rank(ranking: Ranking, judged: Judgements, k: int = 10) -> float:
    """1 / rank of the first relevant document among the first k."""
    for rank, document in enumerate(ranking[:k], 1):
        if judged.get(document, 0) > 0:
            return 1 / rank
    return 0.0


def recall(ranking: Ranking, judged: Judgements, k: int) -> float:
    """Share of the relevant documents among the first k."""
    relevant = {document for document, grade in judged.items() if grade > 0}
    return len(relevant & set(ranking[:k])) / len(relevant) if relevant else 0.0


def evaluate(
    rankings: Mapping[str, Ranking], qrels: Mapping[str, Judgements], recall_at: int = 100
) -> dict[str, float]:
    """Means over the queries that have a relevant document."""
    queries = [query for query in rankings if any(grade > 0 for grade in qrels.get(query, {}).values())]
    if not queries:
        return {"ndcg@10": 0.0, "mrr@10": 0.0, f"recall@{recall_at}": 0.0}
    rows = [
        (
            ndcg(rankings[query], qrels[query]),
            reciprocal_rank(rankings[query], qrels[query]),
            recall(rankings[query], qrels[query], recall_at),
        )
        for query in queries
    ]
    means = np.mean(np.array(rows), axis=0)
    return dict(zip(("ndcg@10", "mrr@10", f"recall@{recall_at}"), (float(m) for m in means), strict=True))


def cosines(left: NDArray[np.float32], right: NDArray[np.float32]) -> Values:
    """Cosine of each row of `left` with the same row of `right`; 0 if either is a zero vector."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.asarray((a * b).sum(axis=1) / np.maximum(norms, 1e-30), np.float64)


def maxsim(query: NDArray[np.float32], document: NDArray[np.float32]) -> float:
    """Sum over the query tokens of each one's best match in the document.

    >>> maxsim(np.eye(2, dtype=np.float32), np.array([[1, 0], [0.5, 0.5]], dtype=np.float32))
    1.5
    """
    return float((query @ document.T).max(axis=1).sum())
