"""Reads the contents of a store with its own client, without Penstock."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.stores import open_store
from penstock.stores.locations import parse
from tests.stores.opensearch_stand_in import StandIn


def contents(url: str, stand_in: StandIn | None = None) -> dict[Any, np.ndarray]:
    """The dense vector of each row. Fails if an id occurs twice."""
    pairs = list(_pairs(url, stand_in))
    assert len(pairs) == len({each for each, _ in pairs})
    return {each: np.asarray(vector, np.float32) for each, vector in pairs}


def _pairs(url: str, stand_in: StandIn | None) -> list[tuple[Any, Any]]:
    location = parse(url)
    if location.kind == "lancedb":
        import lancedb

        rows = lancedb.connect(location.address).open_table(location.collection).to_arrow().to_pylist()
        return [(row["id"], row["vector"]) for row in rows]
    if location.kind == "pgvector":
        import psycopg
        from pgvector.psycopg import register_vector

        with psycopg.connect(location.address) as connection:
            register_vector(connection)
            rows = connection.execute(f'SELECT id, vector FROM "{location.collection}"').fetchall()
            return [
                (each, vector.to_numpy() if hasattr(vector, "to_numpy") else vector) for each, vector in rows
            ]
    if location.kind == "qdrant":
        store: Any = open_store(url)
        with store:
            points, _ = store._client.scroll(location.collection, limit=100_000, with_vectors=True)
            return [(point.payload.get("id", point.id), point.vector["vector"]) for point in points]
    assert stand_in is not None
    return [(row["id"], row["vector"]) for row in stand_in.rows[location.collection].values()]
