"""Every family that can be sharded computes the same on several ranks as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.checkpoint.families import FAMILIES, find_architecture
from penstock.layers.build import LayerBuilder
from penstock.layers.parallel import Shard, Units
from penstock.models.registry import Model, build_model
from penstock.runner.inputs import pool_arrays, pool_batch
from penstock.types import Task
from tests.parallel.divided_models import CASES, EXPERTS, FOUR_RANKS
from tests.parallel.threads import NamedSource, ThreadGroup, run_ranks
from tests.runner.small_models import SIZES, plan_of


def build(
    architecture: str,
    more: dict[str, Any],
    group: ThreadGroup | None = None,
    without: tuple[str, ...] = (),
    **options: Any,
) -> Model:
    builder = LayerBuilder(NamedSource(without=("rotary_emb", *without)))
    builder.shard = None if group is None else Shard(group)
    return build_model(architecture, SIZES | {"num_hidden_layers": 2} | more, builder, **options)


def states(model: Model) -> Tensor:
    plan = plan_of(skip=False, lengths=(5, 30, 2))
    sent = iter([torch.from_numpy(array) for array in pool_arrays(plan, None)])
    return model(pool_batch(plan, None, None, sent))


def test_every_family_that_is_divided_has_a_case() -> None:
    covered = {find_architecture(name, more).family.builder for name, more in CASES.values()}
    assert covered == {family.builder for family in FAMILIES.values() if family.is_divided}


@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in CASES), *((c, 4) for c in FOUR_RANKS)])
def test_ranks_together_compute_what_one_device_does(case: str, size: int) -> None:
    architecture, more = CASES[case]
    with torch.inference_mode():
        whole = states(build(architecture, more))
    shares = run_ranks(size, lambda group: states(build(architecture, more, group)))
    for share in shares:  # all ranks have the same hidden states at the end
        torch.testing.assert_close(share, whole, rtol=1e-4, atol=1e-5)


def test_experts_in_one_tensor_are_divided_too() -> None:
    def joined(group: ThreadGroup | None) -> Tensor:
        return states(build("Qwen3MoeModel", EXPERTS, group, without=("experts.0.",)))

    with torch.inference_mode():
        whole = joined(None)
    torch.testing.assert_close(run_ranks(2, joined)[0], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [1000, 1001])
def test_logits_of_all_ranks_meet_on_rank_0(size: int, tied: bool, vocabulary: int) -> None:
    more = {"vocab_size": vocabulary, "tie_word_embeddings": tied, "logits_scaling": 2.0}
    hidden = torch.randn(3, 32)

    def logits(group: ThreadGroup | None) -> Tensor:
        model = build("LlamaForCausalLM", more, group, generates=True)
        return model.heads[Task.GENERATE].project(hidden)

    with torch.inference_mode():
        whole = logits(None)
    torch.testing.assert_close(run_ranks(size, logits)[0], whole)


def test_weights_are_held_once_except_for_tables_and_norms() -> None:
    def count(group: ThreadGroup | None) -> int:
        layer: Any = build("Qwen3Model", {}, group).layers[0]  # type: ignore[attr-defined]
        parts = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        return sum(part.in_features * part.out_features for part in parts)

    with torch.inference_mode():
        whole = count(None)
    assert run_ranks(2, count) == [whole // 2] * 2


def test_key_heads_are_shared_where_there_are_fewer_than_ranks() -> None:
    def held(group: ThreadGroup) -> tuple[tuple[int, int], range]:
        shard = Shard(group)
        return shard.outputs(Units(2, 8)), shard.divide(4)

    found = run_ranks(4, held)
    assert [outputs for outputs, _ in found] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [list(heads) for _, heads in found] == [[0], [1], [2], [3]]
