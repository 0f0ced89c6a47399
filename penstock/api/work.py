"""From a decoded body to the engine's answer and back: the part that all dialects share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from penstock.api.endpoint import Call, Reply
from penstock.api.fields import InputFields, VectorFields
from penstock.api.state import ServedModel
from penstock.core import Answer, Array, PoolingParams, Request, split_rows
from penstock.errors import BadValue, DeadlineExceeded
from penstock.inputs.processor import MAX_PRIORITY, split_inputs
from penstock.outputs.encoders import as_bytes, encode_rows

OCTETS = b"application/octet-stream"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """An answer beside the request that it belongs to."""

    model: ServedModel
    request: Request
    answer: Answer

    def rows(self) -> list[Array]:
        """The values of each row: a vector, or of per-token tasks a matrix [tokens, width]."""
        values = self.answer.values
        if not self.request.params.per_token:
            return list(values)
        return split_rows(values, self.request.lengths)

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.request.num_tokens, "total_tokens": self.request.num_tokens}


async def run_task(call: Call, body: InputFields, params: PoolingParams) -> Result:
    """Tokenise off the event loop, send to the engine, wait no longer than the caller is willing to."""
    call.request_id = body.request_id
    model = call.state.model(body.model)
    request = await _prepare(call, model, body, params)
    answer = await run_request(call, model, request, body)
    return Result(model, request, answer)


async def _prepare(call: Call, model: ServedModel, body: InputFields, params: PoolingParams) -> Request:
    began = time.monotonic()
    processor, options = model.processor, body.options()
    processor.check(params)
    texts, rows = split_inputs(body.input, allow_empty_text=False)
    check_rows(call, texts if texts is not None else rows)
    if texts is not None:
        prompted = processor.with_prompt(texts, options)
        rows = await model.tokenizer.encode(prompted, options.add_special_tokens)
    request = processor.join(call.state.next_id(), rows, params, options, from_text=texts is not None)
    call.tokenize_s = time.monotonic() - began
    return request


def check_rows(call: Call, rows: Sequence[Any]) -> None:
    limit = call.state.config.max_rows
    if len(rows) > limit:
        raise BadValue(f"input has {len(rows)} rows; at most {limit} go into one request", param="input")


async def run_request(call: Call, model: ServedModel, request: Request, body: InputFields) -> Answer:
    """Through the engine, no later than the caller is willing to wait."""
    if abs(body.priority) > MAX_PRIORITY:
        raise BadValue(
            f"priority is {body.priority}; use -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    timeout_s = body.timeout if body.timeout is not None else call.state.config.default_timeout_s
    if timeout_s is not None and not 0 < timeout_s < 86_400:
        raise BadValue(f"timeout is {timeout_s}; use seconds above 0 and below 86400", param="timeout")
    request.priority = body.priority
    request.arrival_s = call.began_s
    if timeout_s is not None:
        request.deadline_s = call.began_s + timeout_s
    call.metrics.work(model.spec.name, request.num_rows, request.num_tokens)
    try:
        async with asyncio.timeout_at(_loop_time(request.deadline_s)):
            answer = await model.client.run(request)
    except TimeoutError:
        raise DeadlineExceeded(f"not finished within the timeout of {timeout_s} s") from None
    call.queue_s = max(0.0, answer.timings.queue_s - call.tokenize_s)  # counted from the arrival
    call.device_s = answer.timings.device_s
    return answer


def _loop_time(deadline_s: float | None) -> float | None:
    if deadline_s is None:
        return None
    return asyncio.get_running_loop().time() + deadline_s - time.monotonic()


def answer_with(
    call: Call,
    body: VectorFields,
    result: Result,
    *,
    prefix: str,
    item: Callable[[list[Any]], list[dict[str, Any]]],
) -> Reply:
    """The reply in the encoding that the caller chose; `item` shapes the rows of a JSON answer."""
    began = time.monotonic()
    head = head_of(body, result, prefix)
    if body.encoding_format == "bytes":
        reply = _bytes_reply(body, result, head)
    else:
        rows = encode_rows(result.rows(), body.encoding_format, body.embed_dtype, body.endianness)
        reply = json_reply({"object": "list", **head, "data": item(rows), "usage": result.usage})
    note_phases(call, began)
    return reply


def head_of(body: InputFields, result: Result, prefix: str) -> dict[str, Any]:
    name = f"{prefix}-{body.request_id or result.request.id}"
    return {"id": name, "created": int(time.time()), "model": result.model.spec.name}


def json_reply(content: dict[str, Any]) -> Reply:
    return Reply(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def _bytes_reply(body: VectorFields, result: Result, head: dict[str, Any]) -> Reply:
    """The values alone as the body; what they are stands in the `metadata` header."""
    data, at = [], 0
    for index, row in enumerate(result.rows()):
        place = {"start": at, "end": at + row.nbytes, "shape": list(row.shape)}
        kind = {"embed_dtype": body.embed_dtype.value, "endianness": body.endianness}
        data.append({"index": index, **kind, **place})
        at += row.nbytes
    metadata = orjson.dumps({"object": "list", **head, "data": data, "usage": result.usage})
    raw = as_bytes(result.answer.values, body.endianness)
    return Reply(raw, OCTETS, headers=[(b"metadata", metadata)])


def note_phases(call: Call, began: float) -> None:
    call.encode_s = time.monotonic() - began
    call.metrics.phases(
        tokenize_s=call.tokenize_s, queue_s=call.queue_s, device_s=call.device_s, encode_s=call.encode_s
    )
