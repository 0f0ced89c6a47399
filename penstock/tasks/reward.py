"""Rewards: how a reward model scores a whole text, or each of its steps."""

from __future__ import annotations

from penstock.outputs.steps import check_steps, step_rows
from penstock.tasks.model import TextModel
from penstock.tasks.rows import ListTask, MatrixTask
from penstock.types import Array, PooledOutput, Request


class Reward(MatrixTask):
    """One row of outputs for each text, [texts, outputs]."""


class StepRewards(ListTask[Array]):
    """For each text a matrix [steps, labels]. Every text must have a step tag."""

    async def request(self, model: TextModel, request_id: str) -> Request:
        request = await super().request(model, request_id)
        check_steps(request, model.spec.step_tag)
        return request

    def finish(self, model: TextModel, request: Request, output: PooledOutput) -> list[Array]:
        return step_rows(request, output.values, model.spec.step_tag)


def rewards_steps(model: TextModel) -> bool:
    """Whether the model judges each step of a text instead of the whole."""
    reward = model.spec.reward
    return reward is not None and reward.steps
