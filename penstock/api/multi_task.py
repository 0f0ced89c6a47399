"""Several outputs of the same texts, from one forward and in one answer."""

from __future__ import annotations

import time

import msgspec

from penstock.api.endpoint import Call, Reply
from penstock.api.fields import ChunkFields
from penstock.api.work import head_of, json_reply, note_phases, run_tasks, shown
from penstock.errors import BadValue
from penstock.inputs.multi_task import check_tasks
from penstock.types import PoolingParams, Task

VECTORS = (Task.EMBED, Task.TOKEN_EMBED)


async def answer_several(
    call: Call, body: ChunkFields, tasks: list[Task], top_k: int | None, min_weight: float
) -> Reply:
    """Each row's data is an object with a field for each task."""
    check_tasks(tasks)
    if body.chunking != "none":
        raise BadValue("chunking is for task 'embed' alone", param="chunking")
    if body.encoding_format == "bytes":
        raise BadValue("several tasks answer as float or base64, not as bytes", param="encoding_format")
    results = await run_tasks(call, body, [_params(body, task, top_k) for task in tasks])
    began = time.monotonic()
    columns = [shown(result, body, top_k, min_weight) for result in results]
    data = [
        {"index": i, "object": "pooling", "data": dict(zip((t.value for t in tasks), row, strict=True))}
        for i, row in enumerate(zip(*columns, strict=True))
    ]
    head = head_of(body, results[0], "pool")
    reply = json_reply({"object": "list", **head, "data": data, "usage": results[0].usage})
    note_phases(call, began)
    return reply


def _params(body: ChunkFields, task: Task, top_k: int | None) -> PoolingParams:
    """The body's fields as far as they mean something to the task."""
    params = body.params(task)
    if task not in VECTORS:
        params = msgspec.structs.replace(params, dimensions=None, dtype=PoolingParams().dtype)
    if task is Task.SPARSE:
        return msgspec.structs.replace(params, top_k=top_k, normalize=None)
    return params
