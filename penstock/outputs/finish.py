"""NumPy counterpart of `pooling.heads`, for vectors that are computed on the CPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.types import Array, OutputDtype, PoolingParams

Floats = NDArray[np.float32]


def finish(vectors: Floats, params: PoolingParams, normalizes: bool) -> Array:
    """Truncate, normalise and cast like the pooler. `normalizes` is the model's default."""
    default = normalizes or params.dimensions is not None
    if params.dimensions is not None:
        vectors = vectors[:, : params.dimensions]
    if default if params.normalize is None else params.normalize:
        vectors = unit(vectors)
    return cast(vectors, params.dtype)


def unit(vectors: Floats) -> Floats:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, 1e-12), dtype=np.float32)


def cast(vectors: Floats, dtype: OutputDtype) -> Array:
    """Cast fp32 vectors to the output dtype. `pooling.heads.cast` defines each dtype."""
    match dtype:
        case OutputDtype.FLOAT32:
            return np.ascontiguousarray(vectors)
        case OutputDtype.FLOAT16:
            return vectors.astype(np.float16)
        case OutputDtype.BFLOAT16:
            return _bfloat16(vectors)
        case OutputDtype.INT8:
            return _scaled(vectors).astype(np.int8)
        case OutputDtype.UINT8:
            return (_scaled(vectors) + 128).astype(np.uint8)
        case OutputDtype.UBINARY:
            return np.packbits(vectors > 0, axis=-1)
        case OutputDtype.BINARY:
            return (np.packbits(vectors > 0, axis=-1).astype(np.int16) - 128).astype(np.int8)


def _bfloat16(vectors: Floats) -> NDArray[np.uint16]:
    """The upper 16 bits of each value, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(vectors, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _scaled(vectors: Floats) -> Floats:
    largest = np.maximum(np.abs(vectors).max(axis=-1, keepdims=True), np.float32(1e-12))
    return np.asarray(np.rint(vectors * (np.float32(127.0) / largest)), dtype=np.float32)
