"""Vectors of chunks and of their texts, computed from the engine's output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.outputs.finish import finish
from penstock.types import Array, Chunks, Ints, PoolingParams, cumulative

Floats = NDArray[np.float32]


def combine(values: Array, chunks: Chunks, params: PoolingParams, normalizes: bool) -> tuple[Array, Array]:
    """Return (one vector per text, one per chunk), truncated, normalised and cast.

    `values` are fp32: one row per chunk, or one per token if the chunks have spans. `normalizes` says whether
    the model normalises by default.
    """
    rows = values.astype(np.float32, copy=False)
    vectors = rows if chunks.run_spans is None else span_means(rows, chunks.run_spans)
    texts = weighted_means(vectors, chunks.weights, chunks.counts)
    return finish(texts, params, normalizes), finish(vectors, params, normalizes)


def span_means(values: Floats, spans: Ints) -> Floats:
    """The mean of `values` over each span [begin, end). Spans are ascending, disjoint and not empty."""
    edges = spans.ravel()
    if edges[-1] == len(values):
        edges = edges[:-1]
    sums = np.add.reduceat(values, edges, axis=0)[::2]  # every second sum belongs to a gap
    return np.asarray(sums / (spans[:, 1] - spans[:, 0])[:, None], dtype=np.float32)


def weighted_means(vectors: Floats, weights: Ints, counts: Ints) -> Floats:
    """The weighted mean of each text's vectors, [texts, dim]. Text t has `counts[t]` consecutive vectors."""
    starts = cumulative(counts)[:-1]
    share = np.maximum(weights, 1).astype(np.float32)  # a text of only special tokens has weight 0
    sums = np.add.reduceat(vectors * share[:, None], starts, axis=0)
    return np.asarray(sums / np.add.reduceat(share, starts)[:, None], dtype=np.float32)
