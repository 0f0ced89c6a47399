"""Opening of stores by URL."""

from __future__ import annotations

from importlib import import_module

from penstock.stores.base import VectorStore
from penstock.stores.locations import Location, parse

_CLASSES = {
    "lancedb": "LanceStore",
    "qdrant": "QdrantStore",
    "pgvector": "PgvectorStore",
    "opensearch": "OpenSearchStore",
}


def open_store(url: str | Location, *, adopt: bool = False) -> VectorStore:
    """Open the store of a URL such as `qdrant:http://localhost:6333/docs`.

    With `adopt`, a collection without a stamp gets the writer's stamp.
    """
    location = parse(url) if isinstance(url, str) else url
    module = import_module(f"penstock.stores.{location.kind}_store")
    store: VectorStore = getattr(module, _CLASSES[location.kind])(location)
    store.may_adopt = adopt
    return store
