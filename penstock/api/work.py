"""From a decoded body to the engine's answer: the part that all dialects share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api.endpoint import Call
from penstock.api.state import ServedModel
from penstock.core import Answer, PoolingParams, Request
from penstock.errors import BadValue, DeadlineExceeded
from penstock.inputs.processor import MAX_PRIORITY, InputOptions, split_inputs


class Scheduling(msgspec.Struct, frozen=True):
    """When a request runs, and until when."""

    priority: int = 0
    timeout_s: float | None = None


async def prepare(
    call: Call, model: ServedModel, inputs: Any, params: PoolingParams, options: InputOptions
) -> Request:
    """Tokenise off the event loop and build the request."""
    began = time.monotonic()
    processor = model.processor
    processor.check(params)
    texts, rows = split_inputs(inputs, allow_empty_text=False)
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


async def run(call: Call, model: ServedModel, request: Request, when: Scheduling) -> Answer:
    """Send to the engine and wait, no longer than the caller is willing to."""
    if abs(when.priority) > MAX_PRIORITY:
        raise BadValue(
            f"priority is {when.priority}; use -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    timeout_s = when.timeout_s if when.timeout_s is not None else call.state.config.default_timeout_s
    if timeout_s is not None and not 0 < timeout_s < 86_400:
        raise BadValue(f"timeout is {timeout_s}; use seconds above 0 and below 86400", param="timeout")
    request.priority = when.priority
    request.arrival_s = call.began_s
    if timeout_s is not None:
        request.deadline_s = call.began_s + timeout_s
    call.metrics.work(model.spec.name, request.num_rows, request.num_tokens)
    try:
        async with asyncio.timeout_at(_loop_time(request.deadline_s)):
            answer = await model.client.run(request)
    except TimeoutError:
        raise DeadlineExceeded(f"not finished within the timeout of {timeout_s} s") from None
    call.queue_s, call.device_s = answer.timings.queue_s, answer.timings.device_s
    return answer


def _loop_time(deadline_s: float | None) -> float | None:
    if deadline_s is None:
        return None
    return asyncio.get_running_loop().time() + deadline_s - time.monotonic()


def note_phases(call: Call) -> None:
    call.metrics.phases(
        tokenize_s=call.tokenize_s, queue_s=call.queue_s, device_s=call.device_s, encode_s=call.encode_s
    )
