"""Experts on CUDA: kernels equal their reference, the block runs in a graph, whole models are right, and no
weight is held twice.

pytest -m gpu tests/gpu/test_experts.py
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock import Engine, SamplingParams
from penstock.kernels.blockwise import (
    DENSE_TILES,
    BlockQuantized,
    block_matmul,
    block_matmul_reference,
    dense_block_matmul,
    quantize_blocks,
    quantize_groups,
)
from penstock.kernels.experts import (
    FP8_TILINGS,
    HALF_TILINGS,
    expert_tiling_for,
    route,
    route_reference,
    run_experts,
)
from penstock.kernels.quantize import FP8
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8 import BlockLinear
from penstock.layers.moe import ExpertShape, SparseMLP, _product
from penstock.models.registry import build_model
from penstock.weights.stream import DummySource
from tests.checkpoints import FP8_BLOCKS, wordpiece_tokenizer, write_json

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="no CUDA device that multiplies float8",
    ),
]
HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8  # sizes of Qwen3-30B-A3B
SHAPE = ExpertShape(EXPERTS, CHOSEN, INNER, True)
FORMS = ("half", "fp8")
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def draw(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


def make_block(form: str) -> SparseMLP:
    gate_up = draw(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5, seed=1)
    down = draw(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5, seed=2)
    router = draw(EXPERTS, HIDDEN, scale=HIDDEN**-0.5, seed=3)
    if form == "half":
        return SparseMLP(router, gate_up, down, SHAPE, "silu")
    made = []
    for weight in (gate_up, down):
        blocks = [quantize_blocks(one) for one in weight]
        made.append(
            BlockQuantized(
                torch.stack([b.values.view(torch.uint8) for b in blocks]).view(FP8),
                torch.stack([b.scales for b in blocks]),
            )
        )
    return SparseMLP(router, made[0], made[1], SHAPE, "silu")


@pytest.fixture(scope="module", params=FORMS)
def block(request: pytest.FixtureRequest) -> SparseMLP:
    return make_block(request.param)


def by_torch(block: SparseMLP, x: Tensor, logits: Tensor) -> Tensor:
    shares, taken = route_reference(logits, CHOSEN, True)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(EXPERTS):
        token, nth = (taken == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = _product(x[token], block.gate_up, expert, halves=2).chunk(2, dim=1)
            said = _product(F.silu(gate) * up, block.down, expert)
            out.index_add_(0, token, said.float() * shares[token, nth, None])
    return out


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a.float(), b.float(), dim=1)


@pytest.mark.parametrize("tokens", [1, 7, 64, 128, 129, 300, 1000, 4096])
def test_the_block_gives_what_torch_does(block: SparseMLP, tokens: int) -> None:
    x = draw(tokens, HIDDEN, seed=tokens)
    logits = F.linear(x.float(), block.router.float())  # of tied experts, either may be chosen
    options: dict[str, Any] = {"chosen": CHOSEN, "normalize": True, "act": "silu"}
    got = run_experts(x, logits, block.gate_up, block.down, **options)
    assert got.dtype == torch.bfloat16
    assert cosines(got, by_torch(block, x, logits)).min() > 0.999
    assert torch.equal(got, run_experts(x, logits, block.gate_up, block.down, **options))
    residual = draw(tokens, HIDDEN, seed=9)
    added = run_experts(x, logits, block.gate_up, block.down, **options, residual=residual)
    torch.testing.assert_close(added, got + residual, atol=0.05, rtol=0.02)


def test_every_plan_runs_and_gives_the_same(block: SparseMLP) -> None:
    x = draw(200, HIDDEN)
    logits = F.linear(x.float(), block.router.float())
    expected = by_torch(block, x, logits)
    for _, plan in FP8_TILINGS if isinstance(block.gate_up, BlockQuantized) else HALF_TILINGS:
        got = run_experts(
            x, logits, block.gate_up, block.down, chosen=CHOSEN, normalize=True, act="silu", plan=plan
        )
        assert cosines(got, expected).min() > 0.999, plan


def separated_logits(tokens: int) -> Tensor:
    """Logits in random order that differ by at least 0.02, so that no two experts are nearly tied."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    order = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").argsort(dim=1)
    return order.float() * 0.02


@pytest.mark.parametrize("tokens", [1, 64, 128, 129, 1000, 16384])
def test_routes_are_those_of_torch(tokens: int) -> None:
    logits = separated_logits(tokens)
    shares, taken = route_reference(logits, CHOSEN, True)
    routes = route(logits, CHOSEN, True, 16)
    torch.testing.assert_close(routes.shares.view(tokens, CHOSEN), shares, atol=1e-5, rtol=1e-4)
    assert torch.equal(routes.order.long(), taken.flatten().argsort(stable=True))
    used = routes.tiles[routes.tiles[:, 0] < EXPERTS]
    assert int((used[:, 2] - used[:, 1]).clamp(max=16).sum()) == tokens * CHOSEN


@pytest.mark.parametrize("tokens", [1, 129, 16384])
def test_nearly_tied_experts_get_the_shares_that_torch_gives(tokens: int) -> None:
    """Either of two tied experts may be chosen, so only the shares are compared."""
    logits = draw(tokens, EXPERTS, seed=tokens).float()  # bfloat16 values, many of them equal
    shares, _ = route_reference(logits, CHOSEN, True)
    routes = route(logits, CHOSEN, True, 16)
    torch.testing.assert_close(routes.shares.view(tokens, CHOSEN), shares, atol=1e-5, rtol=1e-4)
    assert torch.equal(routes.order.sort().values.long(), torch.arange(tokens * CHOSEN, device="cuda"))


@pytest.mark.parametrize("tokens", [1, 128, 600])
def test_the_block_never_waits_and_is_replayed_with_other_tokens(block: SparseMLP, tokens: int) -> None:
    x, other = draw(tokens, HIDDEN), draw(tokens, HIDDEN, seed=1)
    expected = [block(each).clone() for each in (x, other)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = block(held)
    for each, wanted in zip((x, other, x), (*expected, expected[0]), strict=True):
        held.copy_(each)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)


def test_nan_tokens_change_no_other_token(block: SparseMLP) -> None:
    x = draw(100, HIDDEN)
    good = block(x)
    x[37] = float("nan")
    got = block(x)
    others = torch.arange(100, device="cuda") != 37
    assert got[37].isnan().all() and torch.equal(got[others], good[others])


def test_all_tokens_may_choose_the_same_experts(block: SparseMLP) -> None:
    x = draw(1, HIDDEN).expand(700, -1).contiguous()
    assert cosines(block(x), block(x[:1]).expand(700, -1)).min() > 0.999


@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 5120), (4096, 2048), (768, 2048), (200, 136)])
@pytest.mark.parametrize("tokens", [1, 20, 128, 700, 3000])
def test_the_product_of_blocks_is_its_reference(tokens: int, inputs: int, outputs: int) -> None:
    x, weight = draw(tokens, inputs), quantize_blocks(draw(outputs, inputs, scale=inputs**-0.5, seed=1))
    bias = draw(outputs, seed=2)
    assert cosines(block_matmul(x, weight, bias), block_matmul_reference(x, weight, bias)).min() > 0.9995


def test_every_tile_of_the_product_of_blocks_runs() -> None:
    x, weight = draw(77, 1024), quantize_blocks(draw(640, 1024, scale=1 / 32, seed=1))
    expected = block_matmul_reference(x, weight, None)
    for _, tile, _ in DENSE_TILES:
        for rows in (x, quantize_groups(x)):
            got = dense_block_matmul(rows, weight, None, tile, torch.bfloat16)
            assert cosines(got, expected).min() > 0.9995, tile


def test_a_stored_checkpoint_stays_near_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.gpu.decoders import make_rows
    from tests.parity.blocks import write_blocks

    rows = [row[:256] for row in make_rows()]
    for name in ("qwen3-moe", "qwen3", "llama"):
        stored, _ = write_blocks(name, tmp_path / name)
        with Engine(str(stored), device="cpu", dtype="float32") as cpu:
            expected = np.concatenate(cpu.token_embed(rows, normalize=False))
        with Engine(str(stored), device="cuda") as cuda:
            got = np.concatenate(cuda.token_embed(rows, normalize=False))
        near = np.sort(cosines(torch.from_numpy(got), torch.from_numpy(expected)).numpy())
        few = len(near) // 10 if "moe" in name else 0  # of two nearly tied experts, either may be chosen
        assert near[few] > 0.98, name


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}])
def test_a_model_generates_in_graphs_as_it_does_without(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.generation.families import prompts, write

    folder, params = (
        write("qwen3-moe", tmp_path),
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    )
    made = []
    for eager in (True, False):
        with Engine(str(folder), device="cuda", enforce_eager=eager, **options) as used:
            used.generate(prompts(), params)
            made.append([row.token_ids for row in used.generate(prompts(), params)])
    same = [a == b for mine, theirs in zip(*made, strict=True) for a, b in zip(mine, theirs, strict=True)]
    assert sum(same) > 0.6 * len(same)


@pytest.mark.parametrize("stored", [True, False])
def test_made_experts_are_held_once_and_in_fp8(stored: bool) -> None:
    """For a checkpoint with fp8 blocks, and for one that is quantised as it is read."""
    gc.collect()  # frees the models of earlier tests
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    config = CONFIG | ({"quantization_config": FP8_BLOCKS} if stored else {})
    source = DummySource(0, torch.bfloat16, torch.device("cuda"))
    with torch.inference_mode():
        model: Any = build_model(
            config["architectures"][0],
            config,
            LayerBuilder(source, None if stored else "fp8"),
            generates=True,
        )
    first = model.layers[0]
    assert isinstance(first.mlp.gate_up, BlockQuantized)
    assert isinstance(first.attention.qkv, BlockLinear) is stored
    experts = 4 * 64 * 3 * 1024 * 512
    assert experts < torch.cuda.memory_allocated() - before < 1.3 * experts
    assert torch.cuda.max_memory_allocated() - before < 1.5 * experts
    x = draw(33, 1024)
    assert first.mlp(x).isfinite().all() and float(first.mlp(x).float().std()) > 0


def test_a_made_checkpoint_in_blocks_serves(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG | {"quantization_config": FP8_BLOCKS})
    wordpiece_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with Engine(str(tmp_path), load_format="dummy", device="cuda") as used:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
        got = used.generate([[5, 6, 7], list(range(5, 300))], params)
    for row in got:
        assert len(row.token_ids) == 8 and row.logprobs is not None
        assert np.isfinite(row.logprobs.values).all()


def test_plans_change_with_the_count_of_tokens() -> None:
    for fp8 in (False, True):
        rows = [
            expert_tiling_for(tokens, CHOSEN, EXPERTS, fp8=fp8).rows for tokens in (1, 128, 300, 600, 8192)
        ]
        assert rows == sorted(rows) and rows[0] == 16 and rows[-1] == 128
