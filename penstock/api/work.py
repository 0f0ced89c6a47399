"""From a decoded body to the engine's answer and back: the part that all dialects share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import orjson

from penstock.api.body import json_body
from penstock.api.endpoint import Call, Reply
from penstock.api.fields import InputFields, VectorFields
from penstock.api.state import ServedModel
from penstock.errors import BadValue, DeadlineExceeded
from penstock.inputs.multi_task import want_also
from penstock.inputs.processor import MAX_PRIORITY, split_inputs
from penstock.outputs.encoders import LARGE, LargeRow, as_bytes, encode_rows
from penstock.outputs.sparse import SparseRow, sparse_rows
from penstock.outputs.steps import check_steps, step_rows
from penstock.outputs.tokens import token_rows
from penstock.types import Array, PooledOutput, PoolingParams, Request, Task


class Scheduled(Protocol):
    """The fields of a body that say when it runs, and how it is called."""

    priority: int
    timeout: float | None
    request_id: str | None


OCTETS = b"application/octet-stream"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """An answer beside the request that it belongs to."""

    model: ServedModel
    request: Request
    answer: PooledOutput
    output: PoolingParams | None = None  # which of the request's outputs, if not the first

    @property
    def params(self) -> PoolingParams:
        return self.output or self.request.params

    def rows(self) -> list[Array]:
        """The values of each row: a vector, or of per-token tasks a matrix [tokens, width]."""
        values = self.answer.values
        if self.params.steps:
            return step_rows(self.request, values, self.model.spec.step_tag)
        if not self.params.per_token:
            return list(values)
        return token_rows(self.request, values)

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


async def run_tasks(call: Call, body: InputFields, wanted: Sequence[PoolingParams]) -> list[Result]:
    """Several outputs of one forward, each as a result of its own."""
    call.request_id = body.request_id
    model = call.state.model(body.model)
    for params in wanted:
        model.processor.check(params)
    request = await _prepare(call, model, body, wanted[0])
    want_also(model.processor, request, wanted[1:])
    answer = await run_request(call, model, request, body)
    arrays = zip(request.wants, (answer.values, *answer.more), strict=True)
    return [Result(model, request, replace(answer, values=array), params) for params, array in arrays]


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
    if request.params.steps:
        check_steps(request, model.spec.step_tag)
    call.tokenize_s = time.monotonic() - began
    return request


def check_rows(call: Call, rows: Sequence[Any], name: str = "input") -> None:
    limit = call.state.config.max_rows
    if len(rows) > limit:
        raise BadValue(f"{name} has {len(rows)} rows; at most {limit} go into one request", param=name)


async def run_request(call: Call, model: ServedModel, request: Request, body: Scheduled) -> PooledOutput:
    """Through the engine, no later than the caller is willing to wait."""
    timeout_s = settle_timeout(call, body)
    request.priority = body.priority
    request.arrival_s = call.began_s
    if timeout_s is not None:
        request.deadline_s = call.began_s + timeout_s
    call.metrics.work(model.spec.name, request.num_rows, request.num_tokens)
    if request.deadline_s is None:
        answer = await model.client.run(request)
    else:
        try:
            async with asyncio.timeout_at(_loop_time(request.deadline_s)):
                answer = await model.client.run(request)
        except TimeoutError:
            raise DeadlineExceeded(f"not finished within the timeout of {timeout_s} s") from None
    call.queue_s = max(0.0, answer.timings.queue_s - call.tokenize_s)  # counted from the arrival
    call.device_s = answer.timings.device_s
    return answer


def settle_timeout(call: Call, body: Scheduled) -> float | None:
    """The seconds that the caller, or else the operator, allows; priority and timeout are checked."""
    if abs(body.priority) > MAX_PRIORITY:
        raise BadValue(
            f"priority is {body.priority}; use -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    timeout_s = body.timeout if body.timeout is not None else call.state.config.default_timeout_s
    if timeout_s is not None and not 0 < timeout_s < 86_400:
        raise BadValue(f"timeout is {timeout_s}; use seconds above 0 and below 86400", param="timeout")
    return timeout_s


def _loop_time(deadline_s: float) -> float:
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


def shown(result: Result, body: VectorFields, top_k: int | None, min_weight: float) -> list[Any]:
    """The rows of one output as they stand in a JSON answer."""
    if result.params.task is Task.SPARSE:
        return sparse_terms(result, top_k, min_weight)
    return encode_rows(result.rows(), body.encoding_format, result.params.dtype, body.endianness)


def sparse_terms(result: Result, top_k: int | None, min_weight: float) -> list[list[dict[str, Any]]]:
    tokenizer = result.model.tokenizer.tokenizer
    values, special = result.answer.values, tokenizer.special_ids
    rows = sparse_rows(result.request, values, special, top_k, min_weight, result.params)
    return [_terms(row, tokenizer.token_strings(row.ids.tolist())) for row in rows]


def _terms(row: SparseRow, tokens: list[str | None]) -> list[dict[str, Any]]:
    """Weights stay NumPy scalars: the encoder writes them as the short decimals of a float32."""
    return [
        {"token_id": number, "token": token, "weight": weight}
        for number, token, weight in zip(row.ids.tolist(), tokens, row.weights, strict=True)
    ]


def head_of(body: Scheduled, result: Result, prefix: str) -> dict[str, Any]:
    name = f"{prefix}-{body.request_id or result.request.id}"
    return {"id": name, "created": int(time.time()), "model": result.model.spec.name}


def json_reply(content: Any) -> Reply:
    return Reply(json_body(content))


def _bytes_reply(body: VectorFields, result: Result, head: dict[str, Any]) -> Reply:
    """The values alone as the body; what they are stands in the `metadata` header."""
    data, at = [], 0
    rows = result.rows()
    for index, row in enumerate(rows):
        place = {"start": at, "end": at + row.nbytes, "shape": list(row.shape)}
        kind = {"embed_dtype": body.embed_dtype.value, "endianness": body.endianness}
        data.append({"index": index, **kind, **place})
        at += row.nbytes
    metadata = orjson.dumps({"object": "list", **head, "data": data, "usage": result.usage})
    values = result.answer.values
    whole = values if at == values.nbytes else np.concatenate(rows)  # not every token has a row
    headers = [(b"metadata", metadata)]
    if at >= LARGE:
        return Reply([LargeRow(whole, "bytes", body.embed_dtype, body.endianness)], OCTETS, headers=headers)
    return Reply(as_bytes(whole, body.endianness), OCTETS, headers=headers)


def note_phases(call: Call, began: float) -> None:
    call.encode_s = time.monotonic() - began
    call.metrics.phases(
        tokenize_s=call.tokenize_s, queue_s=call.queue_s, device_s=call.device_s, encode_s=call.encode_s
    )
