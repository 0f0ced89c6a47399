"""Random ragged queries and documents, and their scores by a loop in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
QUERY_LENGTHS, DOCUMENT_LENGTHS = (5, 0, 33, 1), (1, 70, 0, 129, 9, 64)
PAIRS = ((3, 1), (0, 3), (0, 2), (1, 0), (2, 4), (2, 1), (2, 3), (0, 5), (3, 0), (1, 2))  # query, document


def make_inputs(
    dtype: torch.dtype,
    dim: int,
    query_lengths: Sequence[int] = QUERY_LENGTHS,
    document_lengths: Sequence[int] = DOCUMENT_LENGTHS,
    pairs: Sequence[tuple[int, int]] | None = PAIRS,
    scales: bool = False,
    device: str = "cpu",
) -> Inputs:
    """Arguments of `maxsim`. Documents are stored in reverse order, with unused rows between them."""
    generator = torch.Generator().manual_seed(dim)

    def vectors(tokens: int) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-128, 128, (tokens, dim), generator=generator, dtype=dtype)
        return torch.randn(tokens, dim, generator=generator).to(dtype)

    gap = 3
    ends = torch.tensor(document_lengths).flip(0).add(gap).cumsum(0).flip(0)
    query_ends = torch.tensor(query_lengths).cumsum(0)
    inputs: Inputs = {
        "queries": vectors(sum(query_lengths)),
        "documents": vectors(sum(document_lengths) + gap * len(document_lengths)),
        "query_starts": query_ends - torch.tensor(query_lengths),
        "query_lengths": torch.tensor(query_lengths),
        "document_starts": ends - torch.tensor(document_lengths),
        "document_lengths": torch.tensor(document_lengths),
    }
    if pairs is not None:
        inputs["pair_queries"], inputs["pair_documents"] = torch.tensor(pairs).T.contiguous()
    inputs = {name: v.int() if v.dtype == torch.int64 else v for name, v in inputs.items()}
    if scales:
        inputs["query_scales"] = torch.rand(len(inputs["queries"]), generator=generator)
        inputs["document_scales"] = torch.rand(len(inputs["documents"]), generator=generator)
    return {name: value.to(device) for name, value in inputs.items()}


def by_loop(inputs: Inputs) -> Tensor:
    """Compute scores in fp64, pair by pair and token by token."""
    given = {name: value.cpu() for name, value in inputs.items()}

    def sides(name: str) -> list[Tensor]:
        plural = {"query": "queries", "document": "documents"}[name]
        values = given[plural].double()
        if f"{name}_scales" in given:
            values = values * given[f"{name}_scales"].double()[:, None]
        starts, lengths = given[f"{name}_starts"].tolist(), given[f"{name}_lengths"].tolist()
        return [values[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    queries, documents = sides("query"), sides("document")
    pair_documents = given.get("pair_documents", torch.arange(len(documents))).tolist()
    lone = [0] * len(pair_documents) if len(queries) == 1 else list(range(len(queries)))
    pair_queries = given["pair_queries"].tolist() if "pair_queries" in given else lone
    scores = [
        sum(max((float(token @ other) for other in documents[d]), default=0.0) for token in queries[q])
        for q, d in zip(pair_queries, pair_documents, strict=True)
    ]
    return torch.tensor(scores, dtype=torch.float64)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape and got.dtype == torch.float32
    return float((got.cpu().double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
