"""Penstock's own route for sparse embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.api.answers import ListAnswer, SparseTerm
from penstock.api.call import Call, Reply
from penstock.api.fields import InputFields, Refused
from penstock.api.routes import RouteSpec
from penstock.api.sparse import sparse_reply
from penstock.types import PoolingParams, Task


class SparseRequest(InputFields, kw_only=True):
    """Body of `POST /v1/sparse`."""

    top_k: int | None = None
    min_weight: float = 0.0
    dimensions: Annotated[int | None, Refused("sparse weights have no dimensions to cut; use top_k")] = None


async def sparse(call: Call, body: SparseRequest) -> Reply:
    """Weigh the tokens of each text, heaviest first."""
    params = PoolingParams(Task.SPARSE, top_k=body.top_k)
    return await sparse_reply(call, body, params, body.min_weight, "sparse", "sparse")


class SparseEntry(msgspec.Struct, kw_only=True):
    """The terms of one text."""

    object: Literal["sparse"]
    index: int
    sparse: list[SparseTerm]


class SparseAnswer(ListAnswer, kw_only=True):
    data: list[SparseEntry]


ROUTES = (
    RouteSpec(
        "/v1/sparse",
        SparseRequest,
        sparse,
        "native",
        SparseAnswer,
        example={"input": ["Water finds its level."], "top_k": 8},
    ),
)
