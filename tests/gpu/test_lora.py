"""Adapters on a device: kernels in half precision compared with torch, graphs compared with eager steps.

pytest -m gpu tests/gpu/test_lora.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.checkpoint.pooling import PoolingSpec
from penstock.kernels.activation import act_reference
from penstock.kernels.lora import LineTiles, LowRank, apply_reference, expand_, shrink, tile_lines_for
from penstock.kernels.lora_linear import LoraLinear, lora_linear_reference
from penstock.kvcache.blocks import BlockPool
from penstock.kvcache.store import KVCache, KVStore
from penstock.layers import adapted_linear
from penstock.layers.adapter_lines import plan_lines
from penstock.layers.build import LayerBuilder
from penstock.layers.lora import AdapterSites
from penstock.models.registry import build_model
from penstock.pooling.build import Pooler
from penstock.runner.adapters import AdapterPool
from penstock.runner.base import BLOCK_SIZE
from penstock.runner.generator import Generator
from penstock.runner.model_runner import ModelRunner
from penstock.scheduler.generation import GenerationLimits, GenerationScheduler
from penstock.scheduler.plan import build_plan
from penstock.scheduler.scheduler import ScheduledRows
from penstock.types import GeneratedTokens, PoolingParams, Request, SamplerParams, Task
from penstock.weights.stream import open_weights
from tests.adapters import random_adapters
from tests.generation.fakes import split_decoded
from tests.helpers import ints, make_request, make_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "num_labels": 3,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lines", [40, 3000])
@pytest.mark.parametrize(("sizes", "act"), [((768,) * 3, None), ((3072,), "gelu"), ((1024, 128, 128), None)])
def test_lines_with_different_adapters_equal_torch(
    dtype: torch.dtype, lines: int, sizes: tuple[int, ...], act: str | None
) -> None:
    slots, rank, inputs, outputs = 8, 32, 768, sum(sizes)
    ranks = [(rank, rank // 2, 0)[: len(sizes)] for rank in (16, 8, 32, 0, 16, 1, 16, 20)]
    draw = np.random.default_rng(0)
    of_run = draw.integers(-1, slots, 10).astype(np.int32)
    plan = plan_lines(of_run, np.full(10, lines // 10, dtype=np.int32))
    assert plan.tile_lines == tile_lines_for(lines)
    order = torch.from_numpy(plan.order).cuda()
    tiled = LineTiles(order, torch.from_numpy(plan.tiles).view(-1, 3).cuda(), plan.tile_lines)
    groups = [(slot, order[begin:end].long()) for slot, begin, end in plan.groups]
    adapters = LowRank(
        (torch.randn(slots, len(sizes) * rank, inputs, device=CUDA) * 0.03).to(dtype),
        (torch.randn(slots, outputs, rank, device=CUDA) * 0.1).to(dtype),
        torch.tensor(ranks, dtype=torch.int32, device=CUDA),
        tuple(np.cumsum(sizes).tolist()),
    )
    x, y = (torch.randn(lines, width, device=CUDA, dtype=dtype) for width in (inputs, outputs))
    wide = adapters._replace(down=adapters.down.double(), up=adapters.up.double())
    expected = apply_reference(y.double(), x.double(), wide, groups, ranks)
    expected = expected if act is None else act_reference(expected, act)
    found = expand_(y, shrink(x, adapters, tiled, rank), adapters, tiled, act)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
FUSED = [
    ((768,) * 3, None, None),
    ((3072,), "gelu", None),
    ((768,), None, None),
    ((1024, 128, 128), None, None),
    ((512, 64, 64), "silu", None),
    ((384,), "relu", None),
    ((200,), None, None),
    ((1024, 1024), "silu", True),
    ((2048,), "gelu_new", False),
]


def fused_case(
    lines: int, inputs: int, sizes: tuple[int, ...], max_rank: int, dtype: torch.dtype, run: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LowRank, torch.Tensor]:
    """Input, weight, bias and adapters of six slots and several ranks, for `lines` tokens."""
    draw = torch.Generator(CUDA).manual_seed(lines + inputs)
    outputs, slots = sum(sizes), 6
    ranks = [(rank, 0 if rank == 3 else rank, max(rank // 2, 1)) for rank in (max_rank, 1, 3, 8, 0, 16)]
    own = torch.tensor([[min(r, max_rank) for r in each[: len(sizes)]] for each in ranks], dtype=torch.int32)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=CUDA, generator=draw) * scale).to(dtype)

    low = LowRank(
        random(slots, len(sizes) * max_rank, inputs, scale=inputs**-0.5),
        random(slots, outputs, max_rank, scale=0.5),
        own.to(CUDA),
        tuple(np.cumsum(sizes).tolist()),
    )
    for slot in range(slots):
        begin = 0
        for part, end in enumerate(low.ends):
            rank = int(own[slot, part])
            low.down[slot, part * max_rank + rank : (part + 1) * max_rank] = 0
            low.up[slot, begin:end, rank:] = 0
            begin = end
    of_run = np.random.default_rng(lines).integers(-1, slots, -(-lines // run))
    slots_of = torch.from_numpy(np.repeat(of_run, run)[:lines].astype(np.int32)).to(CUDA)
    weight = random(outputs, inputs, scale=inputs**-0.5)
    return random(lines, inputs), weight, random(outputs), low, slots_of


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that errors are within the rounding of half precision."""
    error = found.double() - expected.double()
    assert error.norm() < 5e-3 * expected.norm()
    assert error.abs().max() < 1e-2 * expected.abs().max()


@hopper
@pytest.mark.parametrize("cols", [128, 256])
@pytest.mark.parametrize(
    ("form", "lines", "run", "max_rank"),
    [
        *((0, 1, 1, 32), (0, 300, 7, 16), (0, 20000, 256, 64), (1, 1000, 100, 32), (2, 5000, 1, 64)),
        *((3, 2048, 32, 64), (4, 1000, 100, 32), (5, 300, 7, 16), (6, 300, 7, 16), (7, 2048, 32, 16)),
        *((7, 5000, 1, 32), (8, 1000, 100, 32)),
    ],
)
def test_a_product_with_its_adapters_inside_equals_the_reference(
    form: int, lines: int, run: int, max_rank: int, cols: int
) -> None:
    sizes, act, gate_first = FUSED[form]
    dtype = torch.float16 if lines == 1000 else torch.bfloat16
    inputs = 200 if lines == 300 else 768
    x, weight, bias, low, slots = fused_case(lines, inputs, sizes, max_rank, dtype, run)
    made = LoraLinear.of(weight, None if lines == 2048 else bias, low.ends, act, gate_first)
    if sizes in ((200,), (512, 64, 64)):  # not a multiple of a tile's columns
        assert made is None
        return
    assert made is not None
    if cols not in made.column_choices(max_rank):
        return
    wide = [each.double() for each in (x, weight, bias)]
    far = low._replace(down=low.down.double(), up=low.up.double())
    wide[2] = wide[2] * (lines != 2048)
    expected = lora_linear_reference(*wide, far, slots, act, gate_first)
    for _ in range(3):
        found = made(x, low, slots, max_rank, x.new_full((lines, made.width), float("nan")), cols=cols)
        check_close(found, expected)


@hopper
def test_a_captured_product_takes_the_slots_of_the_replayed_step() -> None:
    x, weight, bias, low, slots = fused_case(2048, 768, (768,) * 3, 16, torch.bfloat16, 32)
    made = LoraLinear.of(weight, bias, low.ends)
    assert made is not None
    made(x, low, slots, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made(x, low, slots, 16)
    for shift in (1, 5, 700):
        slots.copy_(slots.roll(shift))
        graph.replay()
        far = low._replace(down=low.down.float(), up=low.up.float())
        expected = lora_linear_reference(x.float(), weight.float(), bias.float(), far, slots)
        check_close(found, expected)


def make_runner(
    architecture: str, dtype: torch.dtype, *, graphs: bool, device: torch.device = CUDA, method: str = "cls"
) -> ModelRunner:
    build = LayerBuilder(open_weights(Path("/nowhere"), "dummy", 0, dtype, device))
    build.adapters = AdapterSites(3, 16)
    generates = architecture.endswith("CausalLM")
    with torch.inference_mode():
        model: Any = build_model(architecture, CONFIG, build, generates=generates)
    if generates:
        build.adapters.tables.clear()
    random_adapters(build.adapters, (4, 16, 1), dtype)
    pooler = Pooler(make_spec(pooling=PoolingSpec((method,), normalize=True)), model.heads, [])
    cache = generator = None
    if generates:
        layers, heads, dim = model.kv_shape
        cache = KVCache(
            KVStore(layers, 64 * BLOCK_SIZE, heads, dim, dtype, device), torch.zeros(0, 256, device=device)
        )
        generator = Generator(model.heads[Task.GENERATE], 8, device, seed=1)
    runner = ModelRunner(model, pooler, device, 2, cache, generator, graphs=graphs)
    runner.adapters = AdapterPool(build.adapters, 4, dtype, device)
    runner.adapters.on_growth = runner.forget_adapter_graphs
    return runner


LENGTHS = (9, 3, 30, 64, 17, 5, 128, 40)
CHOSEN = (0, -1, 2, 1, 0, -1, 1, 2)
CASES = [
    ("BertModel", Task.EMBED),
    ("BertForSequenceClassification", Task.CLASSIFY),
    ("Qwen3Model", Task.EMBED),
]
CASES += [("ModernBertModel", Task.TOKEN_EMBED)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("architecture", "task"), CASES)
def test_a_replayed_step_with_adapters_gives_what_the_eager_one_gives(
    architecture: str, task: Task, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("a", LENGTHS, params=PoolingParams(task))
    request.adapters = ints(CHOSEN)
    plan = build_plan([ScheduledRows(request, ints(range(len(LENGTHS))))])
    plain = build_plan(
        [ScheduledRows(make_request("b", LENGTHS, params=request.params), ints(range(len(LENGTHS))))]
    )
    method = "last" if architecture == "Qwen3Model" else "cls"
    runner = make_runner(architecture, dtype, graphs=True, method=method)
    (eager,) = (value.float().cpu().numpy() for value in runner.forward(plan))
    assert runner.graphs is not None
    with runner.graphs.capture_on_first_use():
        for _ in range(3):
            (replayed,) = runner.launch(plan).result().outputs
        (without,) = runner.launch(plain).result().outputs
    assert runner.graphs.replays >= 3
    assert {key.adapter_rank for key in runner.graphs.captured} == {0, 16}
    np.testing.assert_allclose(replayed, eager, atol=2e-2)
    monkeypatch.setattr(adapted_linear, "use_kernel", lambda tensor: False)  # the same weights with torch
    (expected,) = (value.float().cpu().numpy() for value in runner.forward(plan))
    cosines = (
        (replayed * expected).sum(1) / np.linalg.norm(replayed, axis=1) / np.linalg.norm(expected, axis=1)
    )
    assert cosines.min() > 0.99
    if task is not Task.TOKEN_EMBED:
        assert np.abs(without - replayed)[[0, 2]].max() > 1e-3


def test_decode_graphs_give_the_tokens_of_eager_steps() -> None:
    limits = GenerationLimits(8, 64, 64, 128, 1000, prefix_caching=False)
    requests = [(adapter, 3, 24) for adapter in (-1, 0, 1, 2)]
    runner, tokens = generate(requests, replace(limits, separate_prefill=True), graphs=True)
    assert tokens == generate(requests, limits, graphs=False)[1]
    assert runner.decode is not None and runner.decode.replays > 10


def test_mixed_graphs_give_the_tokens_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts start while sequences with other adapters decode."""
    monkeypatch.setattr("penstock.runner.mixed.MixedGraphs.uses_before_capture", 0)
    monkeypatch.setattr("penstock.runner.mixed._CAPTURE_PAUSE", 0.0)
    limits = GenerationLimits(3, 32, 32, 128, 1000, prefix_caching=False)
    shapes = ((3, 9), (50, 20), (7, 31), (64, 14), (2, 25), (41, 11), (18, 17), (33, 8))
    requests = [(number % 4 - 1, *shape) for number, shape in enumerate(shapes)]
    runner, tokens = generate(requests, limits, graphs=True)
    assert tokens == generate(requests, limits, graphs=False)[1]
    assert runner.mixed is not None and runner.mixed.replays > 5 and not runner.mixed.refused


def generate(
    requests: Sequence[tuple[int, int, int]], limits: GenerationLimits, *, graphs: bool
) -> tuple[ModelRunner, dict[str, list[int]]]:
    """Run requests, each with an adapter, a prompt length and a number of tokens to generate. Returns the
    runner and the tokens of each."""
    runner = make_runner("Qwen3ForCausalLM", torch.float16, graphs=graphs)
    generation = GenerationScheduler(BlockPool(64, BLOCK_SIZE), limits)
    generation.max_adapters = 3
    for number, (adapter, length, max_tokens) in enumerate(requests):
        sampling = SamplerParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        prompt, params = ints(5 + np.arange(length) % 40), PoolingParams(Task.GENERATE)
        request = Request(str(number), prompt, ints([length]), params, sampling=sampling)
        request.adapters = ints([adapter])
        generation.add(request)
    found: dict[str, list[int]] = {}
    while (plan := generation.schedule(0.0)) is not None:
        for part in split_decoded(generation.collect(plan, runner.launch(plan).result())):
            assert isinstance(part, GeneratedTokens)
            found.setdefault(part.id, []).extend(part.token_ids.tolist())
    return runner, found


def test_an_adapter_in_a_slot_is_replaced_behind_the_steps_that_use_it() -> None:
    """More adapters than slots, in steps that are launched without waiting."""
    runner = make_runner("BertModel", torch.float16, graphs=True)
    assert runner.adapters is not None
    runner.adapters.max_adapters = 1
    runner.adapters._free = runner.adapters._free[:1]
    plans = []
    for adapter in (0, 1, 2):
        request = make_request(str(adapter), (12, 30), params=PoolingParams())
        request.adapters = ints([adapter, adapter])
        plans.append(build_plan([ScheduledRows(request, ints([0, 1]))]))
    expected = [runner.launch(plan).result().outputs[0].copy() for plan in plans]
    for _ in range(5):
        running = [runner.launch(plan) for plan in plans[:2]]
        for future, values in zip(running, expected, strict=False):
            np.testing.assert_allclose(future.result().outputs[0], values, atol=1e-3)
        np.testing.assert_allclose(runner.launch(plans[2]).result().outputs[0], expected[2], atol=1e-3)
