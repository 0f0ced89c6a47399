"""Tables of vectors as a job passes them to a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.jobs.stamp import Stamp

STAMP = Stamp(model="model-a", revision="one", dimension=8)


def vectors(rows: int, width: int = 8, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def fixed_lists(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def table(ids: Sequence[Any], values: np.ndarray | None = None, **columns: Any) -> pa.Table:
    """Rows with the given ids and columns. Without `values`, the vectors are random."""
    dense = vectors(len(ids)) if values is None else values
    return pa.table({"id": pa.array(ids), **columns, "vector": fixed_lists(dense)})


def sparse(rows: Sequence[dict[int, float]]) -> pa.Array:
    indices = pa.array([list(row) for row in rows], pa.list_(pa.int32()))
    values = pa.array([list(row.values()) for row in rows], pa.list_(pa.float32()))
    return pa.StructArray.from_arrays([indices, values], ["indices", "values"])


def multi(rows: Sequence[np.ndarray]) -> pa.Array:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), fixed_lists(np.concatenate(rows)))
