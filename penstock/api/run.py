"""Runs a task for a request: limits, metrics, timeouts. What all dialects share between body and reply."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.api.call import Call
from penstock.api.state import ServedModel
from penstock.errors import BadValue, QueueFull, shown
from penstock.inputs.processor import MAX_PRIORITY
from penstock.tasks.adapted import Adapted
from penstock.tasks.run import PoolingTask, Prepared, Scheduling, finish, submit
from penstock.types import PooledOutput, Request

R = TypeVar("R")
MAX_TIMEOUT_S = 86_400


class Scheduled(Protocol):
    """The fields of a body that say when it runs and what it is called."""

    priority: int
    timeout: float | None
    request_id: str | None


@dataclass(slots=True, eq=False)
class Result(Generic[R]):
    """The result of a task, with the request that it belongs to."""

    model: ServedModel
    request: Request
    output: PooledOutput
    value: R

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.request.num_tokens, "total_tokens": self.request.num_tokens}

    def head(self, body: Scheduled, prefix: str) -> dict[str, Any]:
        """The fields that begin most answers."""
        name = f"{prefix}-{body.request_id or self.request.id}"
        return {"id": name, "created": int(time.time()), "model": self.model.name}


async def run(
    call: Call, body: Scheduled, model: ServedModel, task: PoolingTask[R], *, rows_name: str = "input"
) -> Result[R]:
    """Prepare, submit and finish a task, no longer than the caller is willing to wait."""
    if model.adapter is not None:
        task = Adapted(task, model.adapter.id)
    task.check(model.text)
    num_rows = task.num_rows
    check_num_rows(call, num_rows, rows_name)
    scheduling = scheduling_of(call, body)
    began = time.monotonic()
    if call.is_background or model.admission.takes(call.body_bytes, num_rows):
        prepared = await task.prepare(model.text, call.state.next_id())
    else:
        prepared = await _prepare(call, model, task)
    request = prepared.request
    call.tokenize_s = time.monotonic() - began
    call.num_truncated += request.num_truncated  # a call may run several requests
    if call.key is not None:
        call.count_tokens(request.num_tokens)
    call.count_work(model, request.num_rows, request.num_tokens)
    if call.trace is not None:
        call.trace.tokenized(began, call.tokenize_s)
    try:
        if (output := prepared.output) is None:
            if (cache := call.state.result_cache) is None:
                output = await submit(model.engine, request, scheduling)
            else:
                output = await cache.answer(call, model, request, scheduling)
    except QueueFull as error:
        raise model.admission.with_retry_after(error) from None
    call.queue_s = max(0.0, output.timings.queue_s - call.tokenize_s)  # the engine counts from the arrival
    call.device_s = output.timings.device_s
    if call.trace is not None:
        call.trace.stepped(call.began_s + output.timings.queue_s, call.device_s)
    value = await finish(prepared, output) if prepared.is_slow_to_finish else prepared.finish(output)
    return Result(model, request, output, value)


async def _prepare(call: Call, model: ServedModel, task: PoolingTask[R]) -> Prepared[R]:
    """Tokenise the inputs, unless the queue has no room for them."""
    admission, num_tokens = model.admission, None
    kind, num_bytes = call.work_size(type(task).__name__)
    admitted = admission.admit(kind, num_bytes, task.num_rows, light_weight=call.light_weight)
    try:
        prepared = await task.prepare(model.text, call.state.next_id())
        num_tokens = prepared.request.num_tokens
        return prepared
    finally:
        admission.tokenised(kind, admitted, num_tokens)


def check_num_rows(call: Call, num_rows: int, name: str = "input") -> None:
    limit = call.state.config.max_rows
    if num_rows > limit:
        raise BadValue(f"{name} has {num_rows} rows; one request takes at most {limit}", param=name)


def scheduling_of(call: Call, body: Scheduled) -> Scheduling:
    """Priority and timeout of a body, checked. The operator's default applies if the body has no timeout."""
    if abs(body.priority) > MAX_PRIORITY:
        raise BadValue(
            f"priority is {shown(body.priority)}; use -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority"
        )
    timeout_s = body.timeout if body.timeout is not None else call.state.config.default_timeout_s
    if timeout_s is not None:
        check_timeout(timeout_s)
    return Scheduling(
        priority=body.priority,
        arrival_s=call.began_s,
        timeout_s=None if call.is_background else timeout_s,
        client=call.client,
        weight=1.0 if call.key is None else call.key.weight,
        is_background=call.is_background,
    )


def check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s < MAX_TIMEOUT_S:
        raise BadValue(
            f"timeout is {timeout_s}; use seconds above 0 and below {MAX_TIMEOUT_S}", param="timeout"
        )
