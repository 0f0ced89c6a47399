"""Late-interaction scores (MaxSim): the best match of each query token among a document's tokens, summed.

Queries and documents are ragged token vectors, read in place: nothing is padded or copied, and only the
scores are written. `maxsim` uses the Triton kernel on CUDA and the torch reference elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import BadValue
from penstock.kernels.language import jit
from penstock.kernels.limits import H200, Limits, limits_of, num_stages

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without Triton
    triton = None

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)
TILE_TOKENS = 8192  # document tokens per tile of the reference
TILE_PRODUCTS = 1 << 22  # products per tile of the reference; a single pair may have more
EXACT_INT8_DIM = 2**24 // 128**2  # up to this width, sums of int8 products are exact in fp32


def maxsim(
    queries: Tensor,  # [query tokens, dim]
    documents: Tensor,  # [document tokens, dim]
    query_starts: Tensor,  # [queries]
    query_lengths: Tensor,  # [queries]
    document_starts: Tensor,  # [documents]
    document_lengths: Tensor,  # [documents]
    pair_queries: Tensor | None = None,  # [pairs]
    pair_documents: Tensor | None = None,  # [pairs]
    *,
    query_scales: Tensor | None = None,  # [query tokens]
    document_scales: Tensor | None = None,  # [document tokens]
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    out: Tensor | None = None,  # [pairs] fp32
) -> Tensor:
    """The score of each (query, document) pair, fp32 [pairs].

    Query i is `queries[query_starts[i] :][: query_lengths[i]]`, and likewise for documents. They may overlap
    and be in any order. Pair i has query `pair_queries[i]` and document `pair_documents[i]`. Without
    `pair_queries`, a single query is in every pair, and several queries are paired by index. Without
    `pair_documents`, document i is in pair i. An empty query or document scores 0.

    Scales multiply the products of the vectors, for example of int8 vectors; they must not be negative. The
    maximum lengths only affect tile sizes, so upper bounds suffice. On CUDA the call does not wait for the
    device, and pairs start in the given order: put the longest documents first to balance the load.
    """
    run = maxsim_triton if queries.is_cuda else maxsim_reference
    return run(
        queries,
        documents,
        query_starts,
        query_lengths,
        document_starts,
        document_lengths,
        pair_queries,
        pair_documents,
        query_scales=query_scales,
        document_scales=document_scales,
        max_query_length=max_query_length,
        max_document_length=max_document_length,
        out=out,
    )


def maxsim_packed(
    query: Tensor,  # [query tokens, dim]
    documents: Tensor,  # [document tokens, dim]
    cu_lengths: Tensor,  # [documents + 1]
    *,
    max_document_length: int | None = None,
) -> Tensor:
    """Score one query against packed documents; document i begins at `cu_lengths[i]`."""
    return maxsim(
        query,
        documents,
        cu_lengths.new_zeros(1),
        cu_lengths.new_full((1,), len(query)),
        cu_lengths[:-1],
        cu_lengths.diff(),
        max_query_length=len(query),
        max_document_length=max_document_length,
    )


def maxsim_reference(
    queries: Tensor,
    documents: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    document_starts: Tensor,
    document_lengths: Tensor,
    pair_queries: Tensor | None = None,
    pair_documents: Tensor | None = None,
    *,
    query_scales: Tensor | None = None,
    document_scales: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `maxsim` in torch: a product per query and tile of its documents, then maxima by segment."""
    spans = (query_starts, query_lengths), (document_starts, document_lengths)
    pairs = _check(queries, documents, *spans, pair_queries, pair_documents, out)
    scores = queries.new_zeros(pairs, dtype=torch.float32) if out is None else out.zero_()
    wide = (
        torch.float64 if queries.dtype == torch.int8 and queries.shape[1] > EXACT_INT8_DIM else torch.float32
    )
    starts, lengths = document_starts.long(), document_lengths.long()
    if pair_documents is not None:
        starts, lengths = starts[pair_documents.long()], lengths[pair_documents.long()]
    for which, members in _by_query(pair_queries, len(query_starts), pairs, queries.device):
        first, length = int(query_starts[which]), int(query_lengths[which])
        query = queries[first : first + length].to(wide)
        if query_scales is not None:
            query = query * query_scales[first : first + length, None]
        tile_tokens = max(1, min(TILE_TOKENS, TILE_PRODUCTS // max(1, length)))
        for tile in _tiles(members, lengths, tile_tokens) if length else ():
            rows = _rows(starts[tile], lengths[tile])
            found = documents[rows].to(wide) @ query.T  # [tokens, query length]
            if document_scales is not None:
                found = found * document_scales[rows, None]
            scores[tile] = _segment_max(found, lengths[tile]).sum(dim=1).float()
    return scores


def _by_query(
    pair_queries: Tensor | None, num_queries: int, pairs: int, device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Yield each query that has pairs, and the indices of its pairs."""
    numbers = torch.arange(pairs, device=device)
    if pair_queries is None:
        yield from [(0, numbers)] if num_queries == 1 else enumerate(numbers.split(1))
        return
    found, order = pair_queries.sort(stable=True)
    which, counts = found.unique_consecutive(return_counts=True)
    yield from zip(which.tolist(), order.split(counts.tolist()), strict=True)


def _tiles(members: Tensor, lengths: Tensor, tile_tokens: int) -> Iterator[Tensor]:
    """Pairs whose documents are not empty, in tiles of about `tile_tokens` tokens."""
    members = members[lengths[members] > 0]
    tile = (lengths[members].cumsum(0) - 1) // tile_tokens
    if len(members):
        yield from members.split(tile.unique_consecutive(return_counts=True)[1].tolist())


def _rows(starts: Tensor, lengths: Tensor) -> Tensor | slice:
    """Indices of the documents' rows, in the order of documents; a slice, which copies nothing, if they are
    packed."""
    ends = starts + lengths
    if torch.equal(starts[1:], ends[:-1]):
        return slice(int(starts[0]), int(ends[-1]))
    shift = starts - (lengths.cumsum(0) - lengths)
    shift = shift.repeat_interleave(lengths)
    return shift + torch.arange(len(shift), device=shift.device)


def _segment_max(values: Tensor, lengths: Tensor) -> Tensor:
    """[tokens, width] → [segments, width]"""
    if len(lengths) * 32 > len(values):  # short segments: one call each would take longer
        return torch.segment_reduce(values, "max", lengths=lengths, unsafe=True)
    return torch.stack([segment.amax(dim=0) for segment in values.split(lengths.tolist())])


def _check(
    queries: Tensor,
    documents: Tensor,
    query_spans: tuple[Tensor, Tensor],
    document_spans: tuple[Tensor, Tensor],
    pair_queries: Tensor | None,
    pair_documents: Tensor | None,
    out: Tensor | None,
) -> int:
    """Check the arguments and return the number of pairs."""
    if queries.dtype not in DTYPES or queries.dtype != documents.dtype:
        raise BadValue(
            f"queries and documents must have the same dtype: bfloat16, float16, float32 or int8; "
            f"they have {queries.dtype} and {documents.dtype}"
        )
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise BadValue(
            f"queries and documents must be [tokens, dim] with the same dim; "
            f"they are {tuple(queries.shape)} and {tuple(documents.shape)}"
        )
    for starts, lengths in (query_spans, document_spans):
        if len(starts) != len(lengths):
            raise BadValue(
                f"each start needs a length; there are {len(starts)} starts and {len(lengths)} lengths"
            )
    pairs = len(document_spans[0]) if pair_documents is None else len(pair_documents)
    num_queries = len(query_spans[0]) if pair_queries is None else len(pair_queries)
    if num_queries != pairs and not (pair_queries is None and num_queries == 1):
        raise BadValue(f"cannot pair {num_queries} queries with {pairs} documents; give pair_queries")
    if out is not None and (out.dtype != torch.float32 or out.shape != (pairs,)):
        raise BadValue(f"out must be float32 [{pairs}]; it is {out.dtype} {tuple(out.shape)}")
    return pairs


@dataclass(frozen=True, slots=True)
class Tiling:
    """Number of query tokens, document tokens and components in a tile of the kernel, and its compile
    options."""

    query: int
    document: int
    dim: int
    warps: int
    stages: int  # document tiles that are loaded ahead
    group: int = 1  # pairs per program


def choose_tiling(
    dtype: torch.dtype,
    dim: int,
    max_query_length: int,
    max_document_length: int,
    pairs: int,
    one_query: bool,
    limits: Limits = H200,
) -> Tiling:
    """Choose a tiling by shape, dtype and GPU, without autotuning, which would delay a call."""
    query = min(128, max(16, triton.next_power_of_2(max_query_length)))
    group = 1
    while one_query and group < 16 and group * max_document_length <= 512 and pairs >= 4096 * group:
        group *= 2
    if dtype == torch.float32:  # no tensor cores: larger tiles would spill registers
        return Tiling(min(query, 32), 64, 32, warps=4, stages=3, group=group)
    # Asynchronous products keep no operands in the program's registers.
    warps = 4 if query < 128 or limits.has_async_products else 8
    width = max(32, triton.next_power_of_2(dim))
    if width * dtype.itemsize > 512:
        return Tiling(query, 64, 128 // dtype.itemsize, warps=warps, stages=4, group=group)
    stages = 3
    if pairs <= 2048 and width * dtype.itemsize <= 256:  # few programs: fastest in benchmarks/gpu_maxsim.py
        short = query <= 32 and max_document_length <= 512
        stages, group = (2, 2 if one_query else 1) if short else (4, group)
    row_bytes = width * dtype.itemsize
    stages = num_stages(stages, 64 * row_bytes, limits, other_bytes=query * row_bytes)
    return Tiling(query, 64, width, warps=warps, stages=stages, group=group)


def maxsim_triton(
    queries: Tensor,
    documents: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    document_starts: Tensor,
    document_lengths: Tensor,
    pair_queries: Tensor | None = None,
    pair_documents: Tensor | None = None,
    *,
    query_scales: Tensor | None = None,
    document_scales: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Compute `maxsim` with the Triton kernel."""
    spans = (query_starts, query_lengths), (document_starts, document_lengths)
    pairs = _check(queries, documents, *spans, pair_queries, pair_documents, out)
    if triton is None:
        raise BadValue("maxsim on CUDA needs Triton, which is not installed")
    if queries.stride(1) != 1 or documents.stride(1) != 1:
        raise BadValue("the components of a token vector must be contiguous")
    small = (query_starts, query_lengths, document_starts, document_lengths)
    for array in (*small, pair_queries, pair_documents, query_scales, document_scales, out):
        if array is not None and not array.is_contiguous():
            raise BadValue(
                f"starts, lengths, pairs, scales and out must be contiguous; one has stride {array.stride()}"
            )
    scores = queries.new_empty(pairs, dtype=torch.float32) if out is None else out
    one_query = pair_queries is None and len(query_starts) == 1
    dim = queries.shape[1]
    if tiling is None:
        longest_query = len(queries) if max_query_length is None else max_query_length
        longest = len(documents) if max_document_length is None else max_document_length
        limits = limits_of(queries.device)
        tiling = choose_tiling(queries.dtype, dim, longest_query, longest, pairs, one_query, limits)
    if tiling.group > 1 and not one_query:
        raise BadValue(f"a tiling with {tiling.group} pairs per program needs a single query")
    if pairs:
        _maxsim_kernel[(triton.cdiv(pairs, tiling.group),)](
            queries,
            documents,
            query_starts,
            query_lengths,
            document_starts,
            document_lengths,
            pair_queries,
            pair_documents,
            query_scales,
            document_scales,
            scores,
            pairs,
            QUERY_STRIDE=queries.stride(0),
            DOCUMENT_STRIDE=documents.stride(0),
            ONE_QUERY=one_query,
            DIM=dim,
            GROUP=tiling.group,
            BLOCK_Q=tiling.query,
            BLOCK_D=tiling.document,
            BLOCK_K=tiling.dim,
            STAGES=tiling.stages if dim <= tiling.dim else 1,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return scores


if triton is not None:

    @triton.jit
    def _nan_max(a: tl.tensor, b: tl.tensor) -> tl.tensor:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _dot(documents: tl.tensor, queries: tl.tensor, found: tl.tensor) -> tl.tensor:
        """Documents are the first operand, so that a short query fills the tensor cores."""
        return tl.dot(documents, queries.T, found, input_precision="ieee", out_dtype=found.dtype)

    # The number of pairs and the alignment of small arrays change from call to call and must not recompile.
    _UNSPECIALIZED = (
        *("query_starts", "query_lengths", "document_starts", "document_lengths", "pairs"),
        *("pair_queries", "pair_documents", "query_scales", "document_scales", "scores"),
    )

    @jit(unspecialized=_UNSPECIALIZED)
    def _maxsim_kernel(
        queries: tl.tensor,
        documents: tl.tensor,
        query_starts: tl.tensor,
        query_lengths: tl.tensor,
        document_starts: tl.tensor,
        document_lengths: tl.tensor,
        pair_queries: tl.tensor,
        pair_documents: tl.tensor,
        query_scales: tl.tensor,
        document_scales: tl.tensor,
        scores: tl.tensor,
        pairs: tl.tensor,
        QUERY_STRIDE: tl.constexpr,
        DOCUMENT_STRIDE: tl.constexpr,
        ONE_QUERY: tl.constexpr,
        DIM: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_Q: tl.constexpr,
        BLOCK_D: tl.constexpr,
        BLOCK_K: tl.constexpr,
        STAGES: tl.constexpr,
    ) -> None:
        """Score GROUP pairs of one query per program.

        One loop iterates over the tiles of all their documents, so that tiles of the next document are loaded
        while tiles of the current one are multiplied.
        """
        members = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
        real = members < pairs
        numbers = members
        if pair_documents is not None:
            numbers = tl.load(pair_documents + members, mask=real, other=0)
        starts = tl.load(document_starts + numbers, mask=real, other=0).to(tl.int32)
        lengths = tl.load(document_lengths + numbers, mask=real, other=0).to(tl.int32)
        ends = tl.cumsum(tl.cdiv(lengths, BLOCK_D), 0)  # end of each document, in tiles
        begins = ends - tl.cdiv(lengths, BLOCK_D)
        num_tiles = tl.max(ends, 0)

        query = 0
        if pair_queries is not None:
            query = tl.load(pair_queries + tl.program_id(0))
        elif not ONE_QUERY:
            query = tl.program_id(0)
        query_start = tl.load(query_starts + query).to(tl.int64)
        query_length = tl.load(query_lengths + query).to(tl.int32)

        TOTAL: tl.constexpr = tl.int32 if documents.dtype.element_ty == tl.int8 else tl.float32
        columns = tl.arange(0, BLOCK_K)
        totals = tl.zeros([GROUP], tl.float32)
        for first in range(0, query_length, BLOCK_Q):
            tokens = first + tl.arange(0, BLOCK_Q)
            asked = tokens < query_length
            query_rows = queries + (query_start + tokens)[:, None] * QUERY_STRIDE + columns[None, :]
            if DIM <= BLOCK_K:  # this tile of the query is kept for all documents
                held = tl.load(query_rows, mask=asked[:, None] & (columns < DIM)[None, :], other=0)
            if query_scales is not None:
                weights = tl.load(query_scales + query_start + tokens, mask=asked, other=0)
            # Each position in a tile keeps its maximum. The maxima are reduced once, at the document's end.
            best = tl.full([BLOCK_D, BLOCK_Q], float("-inf"), tl.float32)
            # Without explicit stages, scales would not be loaded ahead, because no product uses them.
            for tile in tl.range(num_tiles, num_stages=STAGES):
                here = (begins <= tile) & (tile < ends)  # the pair that this tile belongs to
                start = tl.sum(tl.where(here, starts, 0), 0)
                length = tl.sum(tl.where(here, lengths, 0), 0)
                offset = (tile - tl.sum(tl.where(here, begins, 0), 0)) * BLOCK_D
                rows = offset + tl.arange(0, BLOCK_D)
                there = rows < length
                document_rows = (documents + start.to(tl.int64) * DOCUMENT_STRIDE) + (
                    rows[:, None] * DOCUMENT_STRIDE + columns[None, :]
                )
                found = tl.zeros([BLOCK_D, BLOCK_Q], TOTAL)
                if DIM <= BLOCK_K:
                    mask = there[:, None] & (columns < DIM)[None, :]
                    found = _dot(tl.load(document_rows, mask=mask, other=0), held, found)
                else:
                    for column in range(0, DIM, BLOCK_K):
                        inside = (column + columns < DIM)[None, :]
                        d = tl.load(document_rows + column, mask=there[:, None] & inside, other=0)
                        q = tl.load(query_rows + column, mask=asked[:, None] & inside, other=0)
                        found = _dot(d, q, found)
                values = found.to(tl.float32)
                if document_scales is not None:
                    values *= tl.load(document_scales + start + rows, mask=there, other=0)[:, None]
                best = _nan_max(best, tl.where(there[:, None], values, float("-inf")))
                if offset + BLOCK_D >= length:
                    matched = tl.reduce(best, 0, _nan_max)
                    if query_scales is not None:
                        matched *= weights
                    totals += tl.where(here, tl.sum(tl.where(asked, matched, 0.0)), 0.0)
                    best = tl.full([BLOCK_D, BLOCK_Q], float("-inf"), tl.float32)
        tl.store(scores + members, totals, mask=real)
