"""Opens the store that a URL names."""

from __future__ import annotations

from importlib import import_module

from penstock.errors import NotPossible
from penstock.stores.base import VectorStore
from penstock.stores.locations import Location, Metric, parse

_CLASSES = {
    "lancedb": "LanceStore",
    "qdrant": "QdrantStore",
    "pgvector": "PgvectorStore",
    "opensearch": "OpenSearchStore",
}

_METRICS = {
    "cosine": Metric.COSINE,
    "dot": Metric.DOT,
    "euclidean": Metric.L2,
}


def open_store(url: str | Location, *, metric: str | None = None, adopt: bool = False) -> VectorStore:
    """The store of a URL such as `qdrant:http://localhost:6333/docs`.

    `metric` is the distance that the model is made for; the URL may name another one. With `adopt` a
    collection without a stamp gets the writer's.
    """
    location = parse(url) if isinstance(url, str) else url
    module = import_module(f"penstock.stores.{location.kind}_store")
    store: VectorStore = getattr(module, _CLASSES[location.kind])(location)
    store.model_metric = location.metric or _model_metric(metric or Metric.COSINE)
    store.may_adopt = adopt
    return store


def _model_metric(similarity: str) -> Metric:
    if similarity not in _METRICS:
        raise NotPossible(
            f"the model compares vectors by {similarity}, which vector stores do not; add metric=cosine, "
            "metric=dot or metric=l2 to the URL",
            param="--to",
        )
    return _METRICS[similarity]
