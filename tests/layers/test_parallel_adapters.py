"""Adapters of a model on several ranks give the same results as on one device, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.adapters import LoraSpec
from penstock.errors import ModelLoadError
from penstock.layers.adapter_state import adapting
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.layers.parallel import ModuleShare, Shard, VocabularyParallelLinear
from penstock.models.adapter_files import read_adapter
from penstock.models.registry import Model, build_model
from penstock.runner.inputs import AdapterInputs, AdapterPlan, pool_arrays, pool_batch
from penstock.types import Task
from penstock.weights.adapters import PartWeights
from tests.helpers import ints
from tests.parallel.adapter_folders import save_adapter, write_adapter
from tests.parallel.divided_models import CASES, FOUR_RANKS
from tests.parallel.threads import NamedSource, ThreadGroup, run_ranks
from tests.runner.small_models import SIZES, plan_of

ROW_SLOTS = ints([1, -1, 0])  # adapter slots of three rows; -1: none
MAX_RANK = 4


def build(
    architecture: str, more: dict[str, Any], group: ThreadGroup | None, **options: Any
) -> tuple[Model, AdapterSites]:
    builder = LayerBuilder(NamedSource(without=("rotary_emb",)))
    builder.shard = None if group is None else Shard(group)
    builder.adapters = sites = AdapterSites(2, MAX_RANK)
    config = SIZES | {"num_hidden_layers": 2} | more
    return build_model(architecture, config, builder, **options), sites


def sum_of(group: ThreadGroup | None) -> Any:
    def add(values: Tensor) -> Tensor:
        assert group is not None
        total = values.clone()
        group.all_reduce(total)
        return total

    return add


def write_slots(sites: AdapterSites, specs: list[LoraSpec], group: ThreadGroup | None) -> None:
    for slot, spec in enumerate(specs):
        sites.write(slot, read_adapter(spec, sites, torch.float32, sum_of(group)))


def states(model: Model, sites: AdapterSites) -> Tensor:
    plan = plan_of(skip=False, lengths=(5, 30, 2))
    inputs = AdapterInputs(AdapterPlan(sites.state, MAX_RANK, ROW_SLOTS), plan)
    sent = iter([torch.from_numpy(array) for array in pool_arrays(plan, None, inputs)])
    batch = pool_batch(plan, None, None, sent, inputs)
    with adapting(batch.adapters):
        return model(batch)


@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in CASES), *((c, 4) for c in FOUR_RANKS)])
def test_adapters_of_all_ranks_together_are_those_of_one_device(case: str, size: int, tmp_path: Path) -> None:
    architecture, more = CASES[case]
    specs: list[LoraSpec] = []

    def run(group: ThreadGroup | None) -> Tensor:
        model, sites = build(architecture, more, group)
        if group is None:
            for number, rank in enumerate((3, 2)):
                folder = tmp_path / str(number)
                specs.append(write_adapter(folder, sites, rank=rank, use_dora=number == 1, seed=number))
        write_slots(sites, specs, group)
        return states(model, sites)

    with torch.inference_mode():
        whole = run(None)
        plain = states(*build(architecture, more, None))
    for share in run_ranks(size, run):
        torch.testing.assert_close(share, whole, rtol=1e-4, atol=1e-4)
    ends = np.cumsum(plan_of(skip=False, lengths=(5, 30, 2)).lengths)  # in plan order
    changes = [float(each.abs().max()) for each in (whole - plain).tensor_split(ends[:-1].tolist())]
    assert [change > 0.01 for change in changes] == [slot >= 0 for slot in ROW_SLOTS]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["lora", "dora", "whole"])
def test_a_divided_head_has_its_part_of_the_vocabulary(
    kind: str, size: int, tied: bool, tmp_path: Path
) -> None:
    more = {"vocab_size": 1001, "tie_word_embeddings": tied}
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 32, generator=draw)
    tensors = {"lm_head.weight": torch.randn(1001, 32, generator=draw)}
    options: dict[str, Any] = {"modules_to_save": ["lm_head"]}
    if kind != "whole":
        tensors = {
            "lm_head.lora_A.weight": torch.randn(3, 32, generator=draw),
            "lm_head.lora_B.weight": torch.randn(1001, 3, generator=draw),
        }
        options = {"use_dora": kind == "dora"}
        if kind == "dora":
            tensors["lm_head.lora_magnitude_vector"] = 1 + torch.rand(1001, generator=draw)
    spec = save_adapter(tmp_path / "adapter", tensors, r=3, **options)

    def logits(group: ThreadGroup | None) -> Tensor:
        model, sites = build("LlamaForCausalLM", more, group, generates=True)
        write_slots(sites, [spec], group)
        plan = plan_of(skip=False, lengths=(1, 1, 1))
        inputs = AdapterInputs(AdapterPlan(sites.state, MAX_RANK, ints([0, -1, 0])), plan)
        sent = iter([torch.from_numpy(array) for array in inputs.arrays()])
        with adapting(adapters := inputs.take(sent)):
            adapters.use("rows")
            return model.heads[Task.GENERATE].project(hidden)

    with torch.inference_mode():
        whole = logits(None)
    torch.testing.assert_close(run_ranks(size, logits)[0], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("module", ["intermediate.dense", "attention.output.dense"])
def test_whole_weights_of_an_adapter_are_divided_as_those_of_the_model(module: str, tmp_path: Path) -> None:
    name, draw = f"encoder.layer.1.{module}", torch.Generator().manual_seed(5)
    specs: list[LoraSpec] = []

    def run(group: ThreadGroup | None) -> Tensor:
        model, sites = build("BertModel", {}, group)
        if group is None:
            layer, part = sites.layers[name]
            shape = layer.shares[part].outputs, layer.shares[part].inputs
            tensors = {f"{name}.weight": torch.randn(shape, generator=draw)}
            tensors[f"{name}.bias"] = torch.randn(shape[:1], generator=draw)
            for slot in range(2):
                specs.append(save_adapter(tmp_path / str(slot), tensors, r=1, modules_to_save=[name]))
        write_slots(sites, specs, group)
        return states(model, sites)

    with torch.inference_mode():
        whole = run(None)
    for share in run_ranks(2, run):
        torch.testing.assert_close(share, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", [0, -1], ids=["of the first rank", "of the last rank"])
def test_a_copy_of_the_base_weight_is_compared_on_the_rank_that_has_it(place: int, tmp_path: Path) -> None:
    name = "encoder.layer.0.attention.self.value"
    with torch.inference_mode():
        _, sites = build("BertModel", {}, None)
        layer, part = sites.layers[name]
        base = layer.base_rows(part).contiguous()
    other = base.clone()
    other[place, 3] += 1
    pair = {f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(32, 2)}
    same = save_adapter(tmp_path / "same", pair | {f"{name}.base_layer.weight": base}, r=2)
    changed = save_adapter(tmp_path / "changed", pair | {f"{name}.base_layer.weight": other}, r=2)

    def refused(group: ThreadGroup) -> bool:
        _, sites = build("BertModel", {}, group)
        assert name in read_adapter(same, sites, torch.float32)
        try:
            read_adapter(changed, sites, torch.float32)
        except ModelLoadError as error:
            return "brings another weight" in error.message
        return False

    assert run_ranks(2, refused) == [place == 0, place == -1]


def test_each_rank_holds_a_share_of_an_adapter(tmp_path: Path) -> None:
    with torch.inference_mode():
        _, sites = build("Qwen3Model", {}, None)
    spec = write_adapter(tmp_path / "a", sites, rank=2, use_dora=False, seed=0)

    def shapes(group: ThreadGroup | None) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        _, sites = build("Qwen3Model", {}, group)
        found = {}
        for name, each in read_adapter(spec, sites, torch.float32).items():
            if isinstance(each, PartWeights) and "layers.0." in name:
                assert each.down is not None and each.up is not None
                found[name.rpartition(".")[2]] = (tuple(each.down.shape), tuple(each.up.shape))
        return found

    with torch.inference_mode():
        whole = shapes(None)
    for own in run_ranks(2, shapes):
        for name, ((rank, inputs), (outputs, _)) in whole.items():
            is_row = name in ("o_proj", "down_proj")
            expected = (rank, inputs // 2 if is_row else inputs), (outputs if is_row else outputs // 2, rank)
            assert own[name] == expected, name


def test_rows_of_a_share_are_those_of_the_module_that_a_rank_has() -> None:
    share = ModuleShare(12, 4, ((2, 4), (6, 8)), (0, 4))
    rows = share.rows(3, 7)
    assert isinstance(rows.of_asked, Tensor) and isinstance(rows.of_part, Tensor)
    assert rows.of_asked.tolist() == [0, 3]  # rows 3 and 6
    assert rows.of_part.tolist() == [1, 2]
    assert not share.is_summed and ModuleShare(4, 12, ((0, 4),), (6, 12)).is_summed
    whole = ModuleShare.whole(12, 4).rows(3, 7)
    np.testing.assert_array_equal(np.arange(12)[whole.of_part][whole.of_asked], [3, 4, 5, 6])


def test_a_divided_head_is_known_to_adapters_by_its_name() -> None:
    def names(group: ThreadGroup) -> set[str]:
        model, sites = build("LlamaForCausalLM", {"tie_word_embeddings": True}, group, generates=True)
        assert isinstance(model.heads[Task.GENERATE].project, VocabularyParallelLinear)
        return sites.tied

    assert run_ranks(2, names) == [{"embed_tokens"}] * 2
