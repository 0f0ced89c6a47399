"""Adapter kernels compared with torch, alone and in steps as CUDA graphs run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels import language
from penstock.kernels.activation import act_reference, gated_activation_reference
from penstock.kernels.lora import (
    LARGE_TILE,
    SMALL_TILE,
    LineTiles,
    LowRank,
    apply_reference,
    expand_,
    expand_gated,
    replace_,
    shrink,
)
from penstock.kvcache.blocks import BlockPool
from penstock.kvcache.store import KVCache, KVStore
from penstock.layers import attention
from penstock.layers.adapter_lines import plan_lines
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.adapters import AdapterPool
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.capture import Work
from penstock.runner.decode import DecodeGraphs
from penstock.runner.generator import Generator
from penstock.runner.graphs import Graphs
from penstock.runner.mixed import MixedGraphs
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import GeneratedTokens, PoolingParams, Request, SamplerParams, Task
from penstock.weights.stream import open_weights
from tests.adapters import random_adapters
from tests.generation.fakes import split_decoded
from tests.helpers import ints, make_request, make_spec
from tests.thinning import thorough

MAX_RANK = 32
RANKS = [(5, 5, 5), (0, 0, 0), (16, 0, 3), (32, 32, 32)]  # ranks of the parts of each slot
SLOTS = [2, -1, 0, 3, 0, 1, 2]
LENGTHS = [3, 4, 17, 1, 2, 5, 20]


def lines_of(device: torch.device, tile: int) -> tuple[LineTiles, list[tuple[int, Tensor]], int]:
    plan = plan_lines(ints(SLOTS), ints(LENGTHS), tile)
    order = torch.from_numpy(plan.order).to(device)
    tiled = LineTiles(order, torch.from_numpy(plan.tiles).view(-1, 3).to(device), tile)
    return tiled, [(slot, order[begin:end].long()) for slot, begin, end in plan.groups], sum(LENGTHS)


def low_rank(
    device: torch.device, inputs: int, sizes: tuple[int, ...], dtype: torch.dtype, gain: bool
) -> LowRank:
    """Slots of several ranks. Values beyond a slot's rank are NaN, because they must not be read."""
    ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
    down = torch.full((4, len(sizes) * MAX_RANK, inputs), float("nan"))
    up = torch.full((4, ends[-1], MAX_RANK), float("nan"))
    for slot, own in enumerate(RANKS):
        for part, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            rank = own[part]
            down[slot, part * MAX_RANK : part * MAX_RANK + rank] = torch.randn(rank, inputs) * 0.1
            up[slot, end - size : end, :rank] = torch.randn(size, rank) * 0.1
    scaled = (1 + torch.rand(4, ends[-1]), torch.randn(4, ends[-1])) if gain else (None, None)
    moved = [None if each is None else each.to(device) for each in scaled]
    ranks = torch.tensor([own[: len(sizes)] for own in RANKS], dtype=torch.int32, device=device)
    return LowRank(down.to(device, dtype), up.to(device, dtype), ranks, ends, *moved)


@pytest.mark.parametrize("tile", [SMALL_TILE, LARGE_TILE])
@pytest.mark.parametrize(
    ("sizes", "act", "gain"), [((48,), "gelu", False), ((40, 24, 8), None, True), ((200,), None, False)]
)
def test_lines_with_different_adapters_equal_the_reference(
    device: torch.device, tile: int, sizes: tuple[int, ...], act: str | None, gain: bool
) -> None:
    tiled, groups, count = lines_of(device, tile)
    adapters = low_rank(device, 72, sizes, torch.float32, gain)
    x = torch.randn(count, 72, device=device)
    y = torch.randn(count, sum(sizes), device=device)
    expected = apply_reference(y.clone(), x, adapters, groups, RANKS)
    expected = expected if act is None else act_reference(expected, act)
    found = expand_(y, shrink(x, adapters, tiled, 32), adapters, tiled, act)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_halves_with_adapters_equal_the_reference(device: torch.device, gate_first: bool) -> None:
    tiled, groups, count = lines_of(device, SMALL_TILE)
    adapters = low_rank(device, 72, (40, 40), torch.float32, gate_first)
    x, both = torch.randn(count, 72, device=device), torch.randn(count, 80, device=device)
    expected = apply_reference(both.clone(), x, adapters, groups, RANKS)
    expected = gated_activation_reference(expected, "silu", gate_first)
    low = shrink(x, adapters, tiled, 32)
    found = expand_gated(both, low, adapters, tiled, "silu", gate_first=gate_first)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_whole_weights_replace_the_lines_of_their_slot(device: torch.device) -> None:
    tiled, groups, count = lines_of(device, SMALL_TILE)
    weight, bias = torch.randn(4, 5, 72, device=device), torch.randn(4, 5, device=device)
    flags = torch.tensor([1, 1, 0, 0], dtype=torch.int32, device=device)
    x, y = torch.randn(count, 72, device=device), torch.randn(count, 5, device=device)
    expected = y.clone()
    for slot, lines in groups:
        if slot in (0, 1):
            expected[lines] = x[lines] @ weight[slot].t() + bias[slot]
    torch.testing.assert_close(replace_(y, x, weight, bias, flags, tiled), expected, atol=1e-4, rtol=1e-4)


CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every layer with its kernels, even attention, which otherwise needs CUDA."""
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_lora.py replays real graphs")

    def attend(
        query: Tensor, key: Tensor, value: Tensor, batch: Any, kind: Any = None, *_: Any, **__: Any
    ) -> Tensor:
        return attention._on_cuda(query, key, value, batch, kind or attention.BIDIRECTIONAL)

    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))
    monkeypatch.setattr("penstock.models.decoder_layers.attend", attend)
    monkeypatch.setattr(attention, "attend", attend)


def fake(work: Work) -> tuple[Callable[[], None], list[Tensor]]:
    """A fake CUDA graph. A replay computes again and writes into the tensors of the first results."""
    kept = [tensor.clone() for tensor in work()]

    def replay() -> None:
        for old, new in zip(kept, work(), strict=True):
            old.copy_(new)

    return replay, kept


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "num_labels": 3,
}


def make_runner(architecture: str, method: str) -> ModelRunner:
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, CPU)
    build = LayerBuilder(weights)
    build.adapters = AdapterSites(3, 16)
    with torch.inference_mode():
        model = build_model(architecture, SIZES, build)
    random_adapters(build.adapters, (4, 16, 1))
    spec = make_spec(pooling=PoolingSpec(methods=(method,), normalize=False))
    runner = ModelRunner(model, Pooler(spec, model.heads, []), CPU, 2)
    runner.adapters = AdapterPool(build.adapters, 4, torch.float32, CPU)
    return runner


STEPS = [
    ("BertModel", "cls", Task.EMBED),
    ("BertForSequenceClassification", "cls", Task.CLASSIFY),
    ("Qwen3Model", "last", Task.TOKEN_EMBED),
]


@pytest.mark.parametrize(("architecture", "method", "task"), STEPS)
def test_a_padded_step_with_adapters_gives_what_torch_gives(
    architecture: str, method: str, task: Task, request: pytest.FixtureRequest
) -> None:
    lengths = (3, 1, 5, 3, 2)
    asked = make_request("a", lengths, params=PoolingParams(task, normalize=False))
    asked.adapters = ints([0, -1, 2, 1, 0])
    plan = build_plan([ScheduledRows(asked, ints(range(len(lengths))))])
    runner = make_runner(architecture, method)
    (expected,) = (each.numpy() for each in runner.forward(plan))
    request.getfixturevalue("kernels")
    graphs = Graphs(runner.model, runner.pooler, runner.staging, fake)
    assert runner.adapters is not None and plan.adapters is not None
    adapters = runner.adapters.plan(plan.adapters)
    key = graphs.key_of(plan, adapters)
    assert key is not None and key.adapter_rank == 16
    with graphs.capture_on_first_use():
        found = runner._replay(graphs, key, plan, adapters)
    assert found is not None
    np.testing.assert_allclose(found.outputs[0], expected, atol=1e-4)
    (eager,) = (each.numpy() for each in runner.forward(plan))
    np.testing.assert_allclose(eager, expected, atol=1e-4)


def test_decode_graphs_give_the_tokens_of_steps_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with different adapters, in graphs and with torch."""
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_lora.py replays real graphs")
    monkeypatch.setattr("penstock.runner.decode.DecodeGraphs.uses_before_capture", 0)
    expected = generated(with_graphs=False)
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))
    assert generated(with_graphs=True) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@thorough
def test_mixed_steps_with_adapters_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu/test_lora.py replays real graphs")
    monkeypatch.setattr("penstock.runner.mixed.MixedGraphs.uses_before_capture", 0)
    monkeypatch.setattr("penstock.runner.mixed._CAPTURE_PAUSE", 0.0)
    monkeypatch.setattr("penstock.runner.mixed.STEP_SIZES", (8, 16))
    monkeypatch.setattr("penstock.runner.mixed.DECODES", (4,))
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))
    expected = generated(with_graphs=False, staggers=True, dtype=torch.float16)
    assert generated(with_graphs=True, staggers=True, dtype=torch.float16) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def generated(
    *, with_graphs: bool, staggers: bool = False, dtype: torch.dtype = torch.float32
) -> list[list[int]]:
    """The tokens of one prompt with each adapter and without one. With `staggers`, each starts while others
    decode."""
    build = LayerBuilder(open_weights(Path("/nowhere"), "dummy", 0, dtype, CPU))
    build.adapters = AdapterSites(3, 16)
    model = build_model("Qwen3ForCausalLM", SIZES, build, generates=True)
    build.adapters.tables.clear()
    random_adapters(build.adapters, (4, 16, 1))
    store = KVStore(1, 24 * BLOCK_SIZE, 1, 16, dtype, CPU)
    generator = Generator(model.heads[Task.GENERATE], 6, CPU, seed=1)
    pooler = Pooler(make_spec(pooling=PoolingSpec(("last",))), {}, [])
    runner = ModelRunner(model, pooler, CPU, 2, KVCache(store, torch.zeros(0, 32)), generator)
    runner.adapters = AdapterPool(build.adapters, 4, dtype, CPU)
    if with_graphs and staggers:
        runner.mixed = MixedGraphs(model, generator, runner.staging, store, fake)
    elif with_graphs:
        taken = runner.staging.pinned_ints
        runner.staging.pinned_ints = lambda size: taken(size).zero_()  # type: ignore[method-assign]
        runner.decode = DecodeGraphs(model, generator, runner.staging, store, fake)
    limits = GenerationLimits(6, 32, 12, 64, 1000, prefix_caching=False)
    generation = GenerationScheduler(BlockPool(24, BLOCK_SIZE), limits)
    generation.max_adapters = 3
    sampling = SamplerParams(max_tokens=5, temperature=0, ignore_eos=True)
    waiting = []
    for adapter in (-1, 0, 1, 2):
        request = Request(
            str(adapter), ints([5, 6, 7]), ints([3]), PoolingParams(Task.GENERATE), sampling=sampling
        )
        request.adapters = ints([adapter])
        waiting.append(request)
    found: dict[str, list[int]] = {}
    while waiting or generation.busy:
        for _ in range(min(len(waiting), 1 if staggers else len(waiting))):
            generation.add(waiting.pop(0))
        plan = generation.schedule(0.0)
        assert plan is not None
        for part in split_decoded(generation.collect(plan, runner.launch(plan).result())):
            assert isinstance(part, GeneratedTokens)
            found.setdefault(part.id, []).extend(part.token_ids.tolist())
    if with_graphs and staggers:
        assert runner.mixed is not None and runner.mixed.replays == 3
    elif with_graphs:
        assert runner.decode is not None and runner.decode.replays >= 3
        assert {key.adapter_rank for key in runner.decode.captured} == {16}
    return [found[name] for name in sorted(found)]
