"""The vectors of chunks, and of the texts that they make up, from what the engine gave."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.outputs.finish import finish
from penstock.types import Array, Chunks, Ints, PoolingParams, cumulative

Floats = NDArray[np.float32]


def combine(values: Array, chunks: Chunks, params: PoolingParams, normalizes: bool) -> tuple[Array, Array]:
    """(one vector a text, one a chunk), finished. `values` are fp32: a row for each chunk, or where the
    chunks have spans a row for each token. `normalizes` is what the model does by itself."""
    rows = values.astype(np.float32, copy=False)
    vectors = rows if chunks.spans is None else span_means(rows, chunks.flat_spans)
    texts = weighted_means(vectors, chunks.weights, chunks.counts)
    return finish(texts, params, normalizes), finish(vectors, params, normalizes)


def span_means(values: Floats, spans: Ints) -> Floats:
    """The mean of each [begin, end) of the rows of `values`; spans ascend, do not overlap, are not empty."""
    edges = spans.ravel()
    if edges[-1] == len(values):
        edges = edges[:-1]
    sums = np.add.reduceat(values, edges, axis=0)[::2]  # every other one is a gap
    return np.asarray(sums / (spans[:, 1] - spans[:, 0])[:, None], dtype=np.float32)


def weighted_means(vectors: Floats, weights: Ints, counts: Ints) -> Floats:
    """The mean of each text's vectors, [texts, dim]; text t has the next `counts[t]` of them."""
    starts = cumulative(counts)[:-1]
    share = np.maximum(weights, 1).astype(np.float32)  # a text of special tokens alone has no weight
    sums = np.add.reduceat(vectors * share[:, None], starts, axis=0)
    return np.asarray(sums / np.add.reduceat(share, starts)[:, None], dtype=np.float32)
