"""The evaluations of `bench quality`. Each function returns named figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.bench.offline.embedders import Vectors
from penstock.bench.quality.bm25 import Bm25
from penstock.bench.quality.data import Pairs, RetrievalData
from penstock.bench.quality.scores import cosines, evaluate, maxsim, spearman

Figures = dict[str, float]
MAX_RANKED = 1000  # documents per ranking that are evaluated


class Embeds(Protocol):
    def embed(self, texts: Sequence[str]) -> Vectors: ...


class Reranks(Protocol):
    def rerank_all(
        self, queries: Sequence[str], documents: Sequence[Sequence[str]]
    ) -> list[NDArray[np.float64]]: ...


class TokenEmbeds(Protocol):
    def token_vectors(self, texts: Sequence[str], input_type: str) -> list[Vectors]: ...


def agreement(embedder: Embeds, reference: Embeds, texts: Sequence[str]) -> Figures:
    """Cosine of the two engines' vectors for the same texts."""
    found = cosines(embedder.embed(texts), reference.embed(texts))
    return {
        "cosine mean": float(found.mean()),
        "cosine p1": float(np.percentile(found, 1)),
        "cosine min": float(found.min()),
    }


def similarity(embedder: Embeds, pairs: Pairs) -> Figures:
    left, right = embedder.embed(pairs.left), embedder.embed(pairs.right)
    return {"spearman": spearman(cosines(left, right), pairs.scores)}


def retrieval(
    embedder: Embeds, judged: RetrievalData, query_prompt: str = "", document_prompt: str = ""
) -> Figures:
    """Rank all documents for every query, by cosine."""
    ids = np.array(list(judged.documents))
    documents = _unit(embedder.embed([document_prompt + text for text in judged.documents.values()]))
    queries = _unit(embedder.embed([query_prompt + text for text in judged.queries.values()]))
    rankings = {}
    for name, vector in zip(judged.queries, queries, strict=True):
        order = np.argsort(-(documents @ vector), kind="stable")[:MAX_RANKED]
        rankings[name] = [document for document in ids[order].tolist() if document != name]
    return evaluate(rankings, judged.qrels)


def candidates(judged: RetrievalData, how: str, count: int) -> dict[str, list[str]]:
    """The documents to rerank for each query: the best by BM25, or those with a judgement."""
    if how == "judged":
        return {
            name: [document for document in grades if document in judged.documents]
            for name, grades in judged.qrels.items()
        }
    index = Bm25(judged.documents)
    return {name: index.top(text, count) for name, text in judged.queries.items()}


def reranking(ranker: Reranks, judged: RetrievalData, offered: Mapping[str, Sequence[str]]) -> Figures:
    """Figures of the reranked candidates, and of their original order."""
    names = [name for name in judged.queries if offered.get(name)]
    texts = [[judged.documents[document] for document in offered[name]] for name in names]
    scores = ranker.rerank_all([judged.queries[name] for name in names], texts)
    rankings = {
        name: [offered[name][i] for i in np.argsort(-found, kind="stable")]
        for name, found in zip(names, scores, strict=True)
    }
    before = evaluate({name: list(offered[name]) for name in names}, judged.qrels)
    return evaluate(rankings, judged.qrels) | {"ndcg@10 before": before["ndcg@10"]}


def late_interaction(
    server: TokenEmbeds, ranker: Reranks, judged: RetrievalData, offered: Mapping[str, Sequence[str]]
) -> Figures:
    """Figures of the server's reranking, and of MaxSim computed here from the server's token vectors."""
    figures = reranking(ranker, judged, offered)
    names = [name for name in judged.queries if offered.get(name)]
    vectors = server.token_vectors([judged.queries[name] for name in names], "query")
    rankings, max_difference = {}, 0.0
    for name, query in zip(names, vectors, strict=True):
        texts = [judged.documents[document] for document in offered[name]]
        found = server.token_vectors(texts, "document")
        here = np.array([maxsim(query, document) for document in found])
        (by_server,) = ranker.rerank_all([judged.queries[name]], [texts])
        max_difference = max(max_difference, float(np.abs(here - by_server).max()))
        rankings[name] = [offered[name][i] for i in np.argsort(-here, kind="stable")]
    own = evaluate(rankings, judged.qrels)
    return figures | {"ndcg@10 by MaxSim here": own["ndcg@10"], "score difference": max_difference}


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)
