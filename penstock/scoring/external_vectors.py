"""Late-interaction scores of vectors that the caller supplies; only scores are returned from the device.

A comparison of any size runs in parts. Between two parts the engine's steps run, and a cancelled comparison
stops. A part has bounded scratch memory, so a comparison needs little more memory than its vectors.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from penstock.errors import BadValue
from penstock.kernels.maxsim import EXACT_INT8_DIM, TILE_PRODUCTS, maxsim
from penstock.types import MIN_PRODUCT_WIDTH, Array, Comparison, Ints


@dataclass(frozen=True, slots=True)
class PartLimits:
    """Limits of a part. A single pair that exceeds one of them is divided."""

    max_operations: int  # multiplications of values; bounds the time of a part
    max_bytes: int  # size of a part's vectors in fp32
    max_products: int = TILE_PRODUCTS  # products of vectors of one pair


CPU_LIMITS = PartLimits(max_operations=1 << 28, max_bytes=32 << 20)
CUDA_LIMITS = PartLimits(max_operations=1 << 34, max_bytes=256 << 20)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive documents that are scored together, or one document that is divided further."""

    first: int
    end: int
    is_divided: bool = False


def plan_parts(comparison: Comparison, limits: PartLimits) -> Iterator[Part]:
    """Divide a comparison by documents. All parts stay within the limits, except those with `is_divided`."""
    width = comparison.queries.shape[1]
    products = comparison.query_lengths.astype(np.int64)[comparison.pairs] * comparison.document_lengths
    operations = products * max(width, MIN_PRODUCT_WIDTH)
    query_bytes, document_bytes = (
        4 * width * lengths.astype(np.int64)
        for lengths in (comparison.query_lengths[comparison.pairs], comparison.document_lengths)
    )
    too_large = (products > limits.max_products) | (operations > limits.max_operations)
    too_large |= query_bytes + document_bytes > limits.max_bytes
    first, spent, held, query = 0, 0, 0, -1
    sizes = (each.tolist() for each in (operations, query_bytes, document_bytes, comparison.pairs, too_large))
    for index, (cost, for_query, for_document, which, divide) in enumerate(zip(*sizes, strict=True)):
        size = for_document + (for_query if which != query or index == first else 0)
        is_full = spent + cost > limits.max_operations or held + size > limits.max_bytes
        if index > first and (divide or is_full):
            yield Part(first, index)
            first, spent, held = index, 0, 0
            size = for_document + for_query
        if divide:
            yield Part(index, index + 1, is_divided=True)
            first, spent, held, query = index + 1, 0, 0, -1
            continue
        spent, held, query = spent + cost, held + size, which
    if first < len(comparison.pairs):
        yield Part(first, len(comparison.pairs))


def tile_shape(num_queries: int, num_documents: int, width: int, limits: PartLimits) -> tuple[int, int]:
    """The number of query and document vectors of a divided pair that are multiplied at once."""
    max_vectors = max(1, limits.max_bytes // (8 * width))
    max_products = max(1, min(limits.max_products, limits.max_operations // max(width, MIN_PRODUCT_WIDTH)))
    queries = min(num_queries, max_vectors, max(1, int(max_products**0.5)))
    documents = min(num_documents, max_vectors, max(1, max_products // queries))
    return min(num_queries, max_vectors, max(1, max_products // documents)), documents


def compare_in_parts(
    comparison: Comparison, device: torch.device, limits: PartLimits | None = None
) -> Iterator[Array | None]:
    """Yield None after each part or tile, and at the end the scores, fp32 [documents, 1].

    A part waits for the device, so it must not run on the engine loop's thread.
    """
    _check(comparison)
    if limits is None:
        limits = CUDA_LIMITS if device.type == "cuda" else CPU_LIMITS
    scores = np.zeros(len(comparison.pairs), dtype=np.float32)
    spans = _Spans(_starts(comparison.query_lengths), _starts(comparison.document_lengths))
    for part in plan_parts(comparison, limits):
        if part.is_divided:
            score = yield from _score_divided(comparison, part.first, spans, device, limits)
            with np.errstate(over="ignore"):  # refused below
                scores[part.first] = score
        else:
            scores[part.first : part.end] = _score_whole(comparison, part, spans, device)
        if not np.isfinite(scores[part.first : part.end]).all():
            index = part.first + int(np.flatnonzero(~np.isfinite(scores[part.first : part.end]))[0])
            raise BadValue(
                f"documents[{index}] has a score beyond float32; use smaller values or scales",
                param="documents",
            )
        yield None
    yield scores[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    query_starts: Array  # [queries + 1], int64
    document_starts: Array  # [documents + 1], int64


def _starts(lengths: Ints) -> Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _check(comparison: Comparison) -> None:
    """Check lengths and pairs: kernels read vectors by them, so none may point outside."""
    pairs = comparison.pairs
    sides = (
        (comparison.queries, comparison.query_lengths, comparison.query_scales),
        (comparison.documents, comparison.document_lengths, comparison.document_scales),
    )
    for vectors, lengths, scales in sides:
        if (lengths < 0).any() or int(lengths.sum(dtype=np.int64)) != len(vectors):
            raise ValueError("the lengths do not add up to the number of vectors")
        if scales is not None and len(scales) != len(vectors):
            raise ValueError("there must be one scale for each vector")
    if len(pairs) != len(comparison.document_lengths):
        raise ValueError("there must be one query for each document")
    if len(pairs) and not 0 <= pairs.min() <= pairs.max() < len(comparison.query_lengths):
        raise ValueError("a document is paired with a query that does not exist")


def _score_whole(comparison: Comparison, part: Part, spans: _Spans, device: torch.device) -> Array:
    """Score the documents of a part with the kernel."""
    pairs = comparison.pairs[part.first : part.end]
    lengths = comparison.document_lengths[part.first : part.end]
    first_query, end_query = int(pairs.min()), int(pairs.max()) + 1
    query_lengths = comparison.query_lengths[first_query:end_query]
    queries = slice(int(spans.query_starts[first_query]), int(spans.query_starts[end_query]))
    documents = slice(int(spans.document_starts[part.first]), int(spans.document_starts[part.end]))

    def sent(array: Array) -> torch.Tensor:
        writable = array if array.flags.writeable else array.copy()
        return torch.from_numpy(writable).to(device, non_blocking=True)

    def scales(array: Array | None, vectors: slice) -> torch.Tensor | None:
        return None if array is None else sent(array[vectors])

    scores = maxsim(
        sent(comparison.queries[queries]),
        sent(comparison.documents[documents]),
        sent(_starts(query_lengths)[:-1].astype(np.int32)),
        sent(query_lengths),
        sent(_starts(lengths)[:-1].astype(np.int32)),
        sent(lengths),
        sent(pairs - np.int32(first_query)),
        query_scales=scales(comparison.query_scales, queries),
        document_scales=scales(comparison.document_scales, documents),
        max_query_length=int(query_lengths.max()),
        max_document_length=int(lengths.max()),
    )
    return np.asarray(scores.cpu().numpy())


def _score_divided(
    comparison: Comparison, index: int, spans: _Spans, device: torch.device, limits: PartLimits
) -> Generator[None, None, float]:
    """Score one pair tile by tile: maxima over tiles of the document, summed over the query."""
    which, width = int(comparison.pairs[index]), comparison.queries.shape[1]
    first_query, end_query = spans.query_starts[which : which + 2].tolist()
    first_document, end_document = spans.document_starts[index : index + 2].tolist()
    if first_query == end_query or first_document == end_document:
        return 0.0
    shape = tile_shape(end_query - first_query, end_document - first_document, width, limits)
    is_wide_int8 = comparison.queries.dtype == np.int8 and width > EXACT_INT8_DIM
    kind = torch.float64 if is_wide_int8 else torch.float32

    def sent(array: Array, begin: int, end: int) -> torch.Tensor:
        return torch.from_numpy(array[begin:end].copy()).to(device).to(kind)

    total = 0.0
    for query in range(first_query, end_query, shape[0]):
        query_end = min(query + shape[0], end_query)
        queries = sent(comparison.queries, query, query_end)
        if comparison.query_scales is not None:
            queries = queries * sent(comparison.query_scales, query, query_end)[:, None]
        best = queries.new_full((len(queries),), -torch.inf)
        for document in range(first_document, end_document, shape[1]):
            document_end = min(document + shape[1], end_document)
            found = sent(comparison.documents, document, document_end) @ queries.T
            if comparison.document_scales is not None:
                found *= sent(comparison.document_scales, document, document_end)[:, None]
            best = torch.maximum(best, found.amax(dim=0))  # keeps NaN
            if device.type == "cuda":
                # Without this, all tiles would be queued before the engine's next step.
                torch.cuda.current_stream(device).synchronize()
            yield
        total += float(best.sum(dtype=torch.float64))
    return total
