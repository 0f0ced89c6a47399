"""On a CPU steps are padded to a few sizes, and the answers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.layers import linear
from penstock.layers.batch import Batch
from penstock.layers.cpu_shapes import padded_size
from penstock.layers.linear import PackedLinear
from penstock.runner import model_runner
from penstock.types import PoolingParams, Task
from tests.runner.small_models import FAMILIES, make_runner, plan_of

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="only oneDNN needs padding")
LENGTHS = (5, 9, 2, 30, 1, 17, 70)  # 134 tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_alike_with_padding_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(family, "mean", FAMILIES[family])
    tasks = (Task.CLASSIFY,) if "Class" in family else (Task.EMBED, Task.TOKEN_EMBED)
    plan = plan_of(*map(PoolingParams, tasks), lengths=LENGTHS)
    padded, states = runner.forward(plan), hidden_states(runner, plan)
    assert padded_size(plan.num_tokens) > plan.num_tokens
    assert len(states) == padded_size(plan.num_tokens) and states.isfinite().all()
    for module in (linear, model_runner):
        monkeypatch.setattr(module, "padded_size", lambda tokens: tokens)
    assert len(hidden_states(runner, plan)) == plan.num_tokens
    for got, expected in zip(padded, runner.forward(plan), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    runner.close()


def hidden_states(runner: model_runner.ModelRunner, plan: Any) -> Tensor:
    """The model's hidden states without pruning, padding tokens included."""
    model, seen = runner.model, []

    def watched(batch: Batch) -> Tensor:
        seen.append(model(batch))
        return seen[0]

    runner.model = watched  # type: ignore[assignment]
    watched.prunes_last_layer, watched.hidden_size = False, model.hidden_size  # type: ignore[attr-defined]
    runner.forward(plan)
    runner.model = model
    return seen[0]


def test_no_number_of_tokens_brings_a_size_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for the tokens of a step in the layers, and for its rows in the head."""
    sizes, product = set(), PackedLinear._product

    def watched(self: PackedLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        sizes.add(len(x))
        return product(self, x, residual)

    monkeypatch.setattr(PackedLinear, "_product", watched)
    runner = make_runner("BertForSequenceClassification", "mean", {"num_hidden_layers": 1})
    for tokens in range(1, 140):
        runner.forward(plan_of(PoolingParams(Task.CLASSIFY), skip=False, lengths=(tokens,)))
        runner.forward(plan_of(PoolingParams(Task.CLASSIFY), skip=False, lengths=(1,) * tokens))
    runner.close()
    assert sizes == {padded_size(tokens) for tokens in range(1, 140)}
