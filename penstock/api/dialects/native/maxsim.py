"""Late interaction of token vectors that the caller sends: `/v1/maxsim`."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import msgspec

from penstock.api.answers import ListHead
from penstock.api.call import Call, Reply
from penstock.api.fields import User
from penstock.api.replies import json_reply
from penstock.api.routes import RouteSpec
from penstock.api.run import check_num_rows, check_timeout
from penstock.errors import DeadlineExceeded
from penstock.inputs.vectors import check_cost, make_comparison
from penstock.types import Comparison

Matrix = list[list[float]] | str  # rows of numbers, or base64 of them


class MaxsimRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/maxsim`: `queries` has one matrix for all documents, or one for each."""

    queries: list[Matrix]
    documents: list[Matrix]
    model: str | None = None
    dtype: Literal["float32", "float16", "int8"] = "float32"
    dim: int | None = None
    query_scales: list[list[float]] | None = None
    document_scales: list[list[float]] | None = None
    timeout: float | None = None
    request_id: str | None = None
    user: User = None


async def maxsim(call: Call, body: MaxsimRequest) -> Reply:
    """Score documents by late interaction (MaxSim)."""
    model = call.model(body)
    check_num_rows(call, len(body.documents), "documents")
    timeout_s = body.timeout if body.timeout is not None else call.state.config.default_timeout_s
    check_timeout(timeout_s)
    began = time.monotonic()
    comparison = await asyncio.to_thread(_comparison, call.state.next_id(), body)
    comparison.arrival_s = call.began_s
    comparison.deadline_s = None if timeout_s is None else call.began_s + timeout_s
    call.tokenize_s = time.monotonic() - began
    try:
        left_s = None if comparison.deadline_s is None else comparison.deadline_s - time.monotonic()
        async with asyncio.timeout(left_s):
            answer = await model.engine.compare(comparison)
    except TimeoutError:
        raise DeadlineExceeded(f"not finished within the timeout of {timeout_s:g} s") from None
    call.queue_s = max(0.0, answer.timings.queue_s - call.tokenize_s)  # the engine counts from the arrival
    call.device_s = answer.timings.device_s
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(answer.values[:, 0])]
    name = f"maxsim-{body.request_id or comparison.id}"
    head = {"id": name, "created": int(time.time()), "model": model.name}
    return json_reply({"object": "list", **head, "data": data})


def _comparison(request_id: str, body: MaxsimRequest) -> Comparison:
    comparison = make_comparison(
        request_id,
        body.queries,
        body.documents,
        dtype=body.dtype,
        dim=body.dim,
        query_scales=body.query_scales,
        document_scales=body.document_scales,
    )
    check_cost(comparison)
    return comparison


class MaxsimScore(msgspec.Struct, kw_only=True):
    """The score of one document."""

    index: int
    object: Literal["score"]
    score: float


class MaxsimAnswer(ListHead, kw_only=True):
    data: list[MaxsimScore]


ROUTES = (
    RouteSpec(
        "/v1/maxsim",
        MaxsimRequest,
        maxsim,
        "native",
        MaxsimAnswer,
        example={"queries": [[[0.6, 0.8], [1, 0]]], "documents": [[[1, 0]], [[0, 1], [0.6, 0.8]]]},
    ),
)
