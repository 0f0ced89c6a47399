"""Replies with vectors, as JSON numbers, base64 or bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from penstock.api.body import json_body
from penstock.api.call import Call, Reply
from penstock.api.fields import VectorFields
from penstock.api.run import Result
from penstock.outputs.encoders import MIN_LARGE_BYTES, LargeRow, as_bytes, encode_rows
from penstock.outputs.sparse import SparseRow
from penstock.tasks.model import TextModel

OCTETS = b"application/octet-stream"
_MAX_LOOP_ROWS = 128  # items of a reply that are made on the event loop
Items = Callable[[list[Any]], list[dict[str, Any]]]  # shapes encoded rows as the dialect's items


def json_reply(content: Any) -> Reply:
    return Reply(json_body(content))


def record_phases(call: Call, encoding_began_s: float) -> None:
    """Count the time since `encoding_began_s` as encoding, and record the phases of the request."""
    call.encode_s = time.monotonic() - encoding_began_s
    call.metrics.phases(
        call.model_name,
        tokenize_s=call.tokenize_s,
        queue_s=call.queue_s,
        device_s=call.device_s,
        encode_s=call.encode_s,
    )
    if call.trace is not None:
        call.trace.encoded(encoding_began_s, call.encode_s)


def vector_reply(call: Call, body: VectorFields, result: Result[Any], *, prefix: str, items: Items) -> Reply:
    """The rows of a result in the encoding that the caller chose."""
    began = time.monotonic()
    head, rows = result.head(body, prefix), list(result.value)
    if body.wants_bytes:
        reply = _bytes_reply(body, result, rows, head)
    else:
        encoded = encode_rows(rows, body.encoding_format, body.embed_dtype, body.endianness)
        content = {"object": "list", **head, "data": items(encoded), "usage": result.usage}
        reply = Reply(json_body(content))
    record_phases(call, began)
    return reply


async def list_reply(
    call: Call, body: Any, result: Result[Any], prefix: str, data: Callable[[], list[dict[str, Any]]]
) -> Reply:
    """A list of items under `data`, with the usual head and usage. Many items are made on another thread."""
    began = time.monotonic()
    head = result.head(body, prefix)

    def make() -> Reply:
        return json_reply({"object": "list", **head, "data": data(), "usage": result.usage})

    is_small = max(result.request.num_rows, result.request.num_tokens // 64) <= _MAX_LOOP_ROWS
    reply = make() if is_small else await asyncio.to_thread(make)
    record_phases(call, began)
    return reply


def sparse_terms(model: TextModel, rows: list[SparseRow]) -> list[list[dict[str, Any]]]:
    """Weights stay NumPy scalars: the encoder writes them as the short decimals of a float32."""
    return [
        [
            {"token_id": token_id, "token": token, "weight": weight}
            for token_id, token, weight in zip(
                ids, model.tokenizer.token_strings(ids), row.weights, strict=True
            )
        ]
        for row in rows
        for ids in (row.ids.tolist(),)
    ]


def _bytes_reply(body: VectorFields, result: Result[Any], rows: list[Any], head: dict[str, Any]) -> Reply:
    """The values alone as the body; the `metadata` header describes them, unless it is not wanted."""
    data, at = [], 0
    for index, row in enumerate(rows):
        place = {"start": at, "end": at + row.nbytes, "shape": list(row.shape)}
        kind = {"embed_dtype": body.embed_dtype.value, "endianness": body.endianness}
        data.append({"index": index, **kind, **place})
        at += row.nbytes
    metadata = orjson.dumps({"object": "list", **head, "data": data, "usage": result.usage})
    whole = result.value
    if not isinstance(whole, np.ndarray):  # the engine's array, unless tokens were left out of the answer
        values = result.output.values
        whole = values if at == values.nbytes else np.concatenate(rows)
    headers = [] if body.encoding_format == "bytes_only" else [(b"metadata", metadata)]
    if at >= MIN_LARGE_BYTES:
        return Reply([LargeRow(whole, "bytes", body.embed_dtype, body.endianness)], OCTETS, headers=headers)
    return Reply(as_bytes(whole, body.endianness), OCTETS, headers=headers)
