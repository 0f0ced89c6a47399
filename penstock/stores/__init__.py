"""Vector stores as outputs of `penstock embed`, and migration of a store to another model.

`open_store("qdrant:…")` returns a `VectorStore`. Each store's package is imported only when it is opened.
"""

from __future__ import annotations

from penstock.stores.base import Hit, StoreFailed, VectorStore
from penstock.stores.locations import Metric
from penstock.stores.urls import open_store

__all__ = ["Hit", "Metric", "StoreFailed", "VectorStore", "open_store"]
