"""Joins the caller's token vectors (numbers, base64 or arrays) into one `Comparison`."""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import BadValue
from penstock.types import Array, Comparison, Ints

DTYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
MAX_DIM = 65_536
MAX_VECTORS = 2**31 - 1  # in all queries or all documents: positions are int32
MAX_OPERATIONS = 2.0**38  # maximum products of values in one HTTP request


def make_comparison(
    request_id: str,
    queries: Sequence[Any],
    documents: Sequence[Any],
    *,
    dtype: str = "float32",
    dim: int | None = None,
    query_scales: Sequence[Any] | None = None,
    document_scales: Sequence[Any] | None = None,
) -> Comparison:
    """Compare one query with all documents, or each document with its own query. Base64 needs `dim`."""
    if dtype not in DTYPES:
        raise BadValue(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}", param="dtype")
    if dim is not None and not 1 <= dim <= MAX_DIM:
        raise BadValue(f"dim is {dim}; use 1 to {MAX_DIM}", param="dim")
    sides = {}
    for name, given in (("queries", queries), ("documents", documents)):
        if not len(given):
            raise BadValue(f"{name} is empty; give at least one matrix", param=name)
        sides[name] = [_matrix(rows, f"{name}[{i}]", name, dtype, dim) for i, rows in enumerate(given)]
    width = _width([*sides["queries"], *sides["documents"]])
    sides = {name: [_with_width(matrix, width) for matrix in side] for name, side in sides.items()}
    if len(queries) not in (1, len(documents)):
        raise BadValue(
            f"{len(queries)} queries for {len(documents)} documents; give one query, or one for each "
            "document",
            param="queries",
        )
    query_of = np.arange(len(documents)) if len(queries) > 1 else np.zeros(len(documents))
    for name, side in sides.items():
        if sum(map(len, side)) > MAX_VECTORS:
            raise BadValue(f"{name} has more than {MAX_VECTORS} vectors", param=name)
    return Comparison(
        request_id,
        np.concatenate(sides["queries"]),
        _lengths(sides["queries"]),
        np.concatenate(sides["documents"]),
        _lengths(sides["documents"]),
        query_of.astype(np.int32),
        _scales(query_scales, sides["queries"], "query_scales"),
        _scales(document_scales, sides["documents"], "document_scales"),
    )


def check_cost(comparison: Comparison) -> None:
    """Refuse a comparison that would take far longer than other requests."""
    if (needed := comparison.num_operations) > MAX_OPERATIONS:
        raise BadValue(
            f"documents need {needed:.1e} products of values with their queries (narrow vectors count as 32 "
            f"values); one request may need {MAX_OPERATIONS:.1e}. Send fewer or shorter documents",
            param="documents",
        )


def comparison_from_arrays(
    request_id: str,
    queries: Any,
    documents: Sequence[Any],
    query_scales: Sequence[Any] | None = None,
    document_scales: Sequence[Any] | None = None,
) -> Comparison:
    """Compare arrays in their own dtype, or in float32 if they differ or no kernel supports it."""
    is_one_matrix = isinstance(queries, np.ndarray) and queries.ndim == 2
    given = [queries] if is_one_matrix else list(queries)
    dtypes = {np.asarray(matrix).dtype for matrix in (*given, *documents) if len(matrix)}
    dtype = str(next(iter(dtypes))) if len(dtypes) == 1 else "float32"
    return make_comparison(
        request_id,
        given,
        documents,
        dtype=dtype if dtype in DTYPES else "float32",
        query_scales=query_scales,
        document_scales=document_scales,
    )


def _matrix(given: Any, label: str, name: str, dtype: str, dim: int | None) -> Array:
    kind = DTYPES[dtype]
    if isinstance(given, str | bytes):
        return _from_base64(given, label, name, np.dtype(kind), dim)
    if not isinstance(given, np.ndarray) and not len(given):
        return np.zeros((0, dim or 0), dtype=kind)
    try:
        matrix = np.asarray(given)
    except ValueError:
        raise BadValue(f"{label} has rows of different lengths; give a matrix", param=name) from None
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
        raise BadValue(f"{label} is not a matrix of numbers", param=name)
    if dtype == "int8" and matrix.size and (matrix.min() < -128 or matrix.max() > 127):
        raise BadValue(f"{label} has numbers outside int8; use -128 to 127", param=name)
    if dtype == "int8" and matrix.dtype.kind == "f" and (matrix != np.rint(matrix)).any():
        raise BadValue(f"{label} has fractions; int8 needs whole numbers", param=name)
    return _finite(np.ascontiguousarray(matrix, dtype=kind), label, name)


def _from_base64(given: str | bytes, label: str, name: str, kind: np.dtype[Any], dim: int | None) -> Array:
    if dim is None:
        raise BadValue(f"{label} is base64; set dim to the number of values of a vector", param="dim")
    try:
        raw = binascii.a2b_base64(given, strict_mode=True)
    except (binascii.Error, ValueError):
        raise BadValue(f"{label} is not valid base64", param=name) from None
    if len(raw) % (dim * kind.itemsize):
        raise BadValue(
            f"{label} has {len(raw)} bytes, which is not a multiple of {dim} {kind.name} values", param=name
        )
    return _finite(np.frombuffer(raw, dtype=kind).reshape(-1, dim), label, name)


def _finite(matrix: Array, label: str, name: str) -> Array:
    if matrix.dtype.kind == "f" and not np.isfinite(matrix).all():
        raise BadValue(f"{label} has values that are not finite", param=name)
    return matrix


def _width(matrices: list[Array]) -> int:
    widths = sorted({matrix.shape[1] for matrix in matrices if len(matrix)})
    if len(widths) > 1:
        raise BadValue(
            f"vectors have {widths[0]} and {widths[1]} values; all must have the same number",
            param="documents",
        )
    if widths and widths[-1] > MAX_DIM:
        raise BadValue(f"vectors have {widths[-1]} values; use at most {MAX_DIM}", param="documents")
    if widths == [0]:
        raise BadValue("vectors have no values; each needs at least one", param="documents")
    return widths[0] if widths else 1


def _with_width(matrix: Array, width: int) -> Array:
    """Give an empty matrix the width of the others."""
    return matrix if len(matrix) else np.zeros((0, width), dtype=matrix.dtype)


def _scales(given: Sequence[Any] | None, matrices: list[Array], name: str) -> Array | None:
    if given is None:
        return None
    parts = [np.asarray(part, dtype=np.float32).reshape(-1) for part in given]
    if [len(part) for part in parts] != [len(matrix) for matrix in matrices]:
        raise BadValue(f"{name} must have one number for each vector of each matrix", param=name)
    joined = np.concatenate(parts)
    if not np.isfinite(joined).all() or (joined < 0).any():
        raise BadValue(f"{name} must be finite and not negative", param=name)
    return joined


def _lengths(matrices: list[Array]) -> Ints:
    return np.array([len(matrix) for matrix in matrices], dtype=np.int32)
