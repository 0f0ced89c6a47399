"""Several outputs of the same texts from one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from penstock.errors import BadValue, NotPossible
from penstock.inputs.processor import DEFAULT_OPTIONS, InputOptions, Inputs
from penstock.outputs.sparse import check_min_weight, sparse_rows
from penstock.outputs.steps import check_steps, step_rows
from penstock.outputs.tokens import token_rows
from penstock.tasks.classify import Classify, TokenClassify
from penstock.tasks.embed import Embed
from penstock.tasks.model import TextModel
from penstock.tasks.reward import Reward, StepRewards, rewards_steps
from penstock.tasks.rows import RowTask, TextTask, concatenate
from penstock.tasks.sparse import Sparse
from penstock.tasks.token_embed import TokenEmbed
from penstock.types import Array, PooledOutput, PoolingParams, Request, Task


@dataclass(kw_only=True, eq=False)
class MultiTask(RowTask[list[Any]]):
    """The rows of each output, in the order of `all_params`, which starts with `params`."""

    more: tuple[PoolingParams, ...] = ()
    min_weight: float = 0.0

    @property
    def all_params(self) -> tuple[PoolingParams, ...]:
        return (self.params, *self.more)

    def check(self, model: TextModel) -> None:
        tasks = [params.task for params in self.all_params]
        if len(set(tasks)) != len(tasks):
            raise BadValue("task names one task twice", param="task")
        for task in tasks:
            refuse_other_routes(task)
        check_min_weight(self.min_weight)
        if model.queries is not None:
            raise NotPossible(
                f"model {model.spec.name} has a route for queries; ask for task 'sparse' alone",
                param="task",
            )
        for params in self.all_params:
            model.processor.check(params)

    async def request(self, model: TextModel, request_id: str) -> Request:
        request = await super().request(model, request_id)
        want_more_outputs(model, request, self.more)
        if any(params.steps for params in request.all_params):
            check_steps(request, model.spec.step_tag)
        return request

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[Any]:
        outputs = zip(request.all_params, self.all_params, (output.values, *output.extra_values), strict=True)
        return [self._rows(model, request, settled, given, array) for settled, given, array in outputs]

    def _rows(
        self, model: TextModel, request: Request, settled: PoolingParams, given: PoolingParams, array: Array
    ) -> Any:
        if settled.task is Task.SPARSE:
            special = model.tokenizer.special_ids
            return sparse_rows(request, array, special, given.top_k, self.min_weight, settled)
        if settled.steps:
            return step_rows(request, array, model.spec.step_tag)
        return token_rows(request, array) if settled.per_token else array

    def merge(self, parts: Sequence[list[Any]]) -> list[Any]:
        return [_merge_rows(column) for column in zip(*parts, strict=True)]


def _merge_rows(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], list):
        return concatenate(parts)
    return np.concatenate(parts)


def want_more_outputs(model: TextModel, request: Request, more: Sequence[PoolingParams]) -> None:
    """Add further outputs to a request. It may reuse a cached prefix only if all of its outputs can."""
    processor = model.processor
    if processor.late is not None and more:
        raise NotPossible(
            f"model {processor.spec.name} reads texts differently for each task; ask for one task at a time",
            param="task",
        )
    request.extra_params = tuple(processor.engine_params(params) for params in more)
    if request.token_mask is None and any(params.task is Task.TOKEN_EMBED for params in more):
        request.token_mask = processor.token_mask(request.lengths)
    last_token_only = all(map(processor.reads_last_token_only, request.extra_params))
    request.reuse_prefix = request.reuse_prefix and last_token_only


_OTHER_ROUTES = {
    Task.GENERATE: "continues prompts; use /v1/completions",
    Task.ENTITIES: "needs labels; use /v1/entities",
    Task.ZERO_SHOT: "needs labels; use /v1/zero-shot",
}


def refuse_other_routes(task: Task) -> None:
    """Raise `BadValue` for tasks that need more than texts."""
    if (reason := _OTHER_ROUTES.get(task)) is not None:
        raise BadValue(f"task {task.value!r} {reason}", param="task")


_TASKS: dict[Task, type[TextTask[Any]]] = {
    Task.EMBED: Embed,
    Task.TOKEN_EMBED: TokenEmbed,
    Task.CLASSIFY: Classify,
    Task.TOKEN_CLASSIFY: TokenClassify,
    Task.SPARSE: Sparse,
    Task.REWARD: Reward,
}


def pooling_task(
    model: TextModel,
    inputs: Inputs,
    params: PoolingParams,
    options: InputOptions = DEFAULT_OPTIONS,
    *,
    allows_empty_text: bool = True,
) -> TextTask[Any]:
    """The task of `params`, over texts or token ids."""
    kind = _TASKS.get(params.task)
    if kind is TokenClassify and model.spec.classifies_each_token:
        params = msgspec.structs.replace(params, task=Task.CLASSIFY, steps=True)
    if kind is None:
        refuse_other_routes(params.task)
        raise BadValue("task 'score' takes pairs; use /score or /rerank", param="task")
    if kind is Reward and rewards_steps(model):
        kind = StepRewards
    return kind(inputs=inputs, params=params, options=options, allows_empty_text=allows_empty_text)
