"""Requests that want several outputs of the same rows."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import BadValue, NotPossible
from penstock.inputs.processor import InputProcessor
from penstock.types import PoolingParams, Request, Task


def check_tasks(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise BadValue("task is an empty list; name at least one", param="task")
    if len(set(tasks)) != len(tasks):
        raise BadValue("task names one task twice", param="task")
    for task in tasks:
        refuse_generation(task)


def refuse_generation(task: Task) -> None:
    """Where rows are pooled."""
    if task is Task.GENERATE:
        raise BadValue("task 'generate' continues prompts; use /v1/completions", param="task")


def want_also(processor: InputProcessor, request: Request, more: Sequence[PoolingParams]) -> None:
    """Ask for further outputs of a request's rows. Then no row may stand on a cached prefix alone, unless
    every output could."""
    if processor.late is not None and more:
        raise NotPossible(
            f"model {processor.spec.name} reads texts in another way for each task; ask for one at a time",
            param="task",
        )
    request.also = tuple(processor.settled(params) for params in more)
    if request.keep is None and any(params.task is Task.TOKEN_EMBED for params in more):
        request.keep = processor.kept(request.lengths)
    last = all(map(processor.reads_last_token_only, request.also))
    request.reuse_prefix = request.reuse_prefix and last
