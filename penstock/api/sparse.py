"""Sparse embeddings for every dialect that has them."""

from __future__ import annotations

from typing import Any

from penstock.api.call import Call, Reply
from penstock.api.fields import InputFields
from penstock.api.replies import list_reply, sparse_terms
from penstock.api.run import run
from penstock.tasks.sparse import Sparse
from penstock.types import PoolingParams


async def sparse_reply(
    call: Call, body: InputFields, params: PoolingParams, min_weight: float, kind: str, field: str
) -> Reply:
    """`kind` names the rows' objects, `field` the list of their terms."""
    model = call.model(body)
    task = Sparse(
        inputs=body.input,
        params=params,
        options=body.options(),
        min_weight=min_weight,
    )
    result = await run(call, body, model, task)

    def data() -> list[dict[str, Any]]:
        rows = sparse_terms(model.text, result.value)
        return [{"object": kind, "index": index, field: terms} for index, terms in enumerate(rows)]

    return await list_reply(call, body, result, "pool" if kind == "pooling" else kind, data)
