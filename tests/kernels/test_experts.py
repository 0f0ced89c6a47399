"""Mixture-of-experts kernels: routing, the two matrix products and the sum, for every tiling."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels import experts as kernels
from penstock.kernels import language
from penstock.kernels.activation import act_reference
from penstock.kernels.blockwise import GROUP, BlockQuantized, dequantize_blocks, quantize_blocks
from penstock.kernels.experts import (
    FP8_TILINGS,
    HALF_TILINGS,
    ExpertTiling,
    Routes,
    Tile,
    expert_tiling_for,
    max_num_tiles,
    route,
    route_reference,
    run_experts,
)
from penstock.layers.fp8_blocks import ExpertStack
from penstock.layers.moe import _product
from penstock.weights.stream import DummySource
from tests.thinning import ALL_CASES

TILINGS = {
    "half": [plan for _, plan in HALF_TILINGS],
    "fp8": [plan for _, plan in FP8_TILINGS]
    + [
        ExpertTiling(
            16, Tile(64, GROUP, 4, 3), Tile(32, GROUP, 4, 3)
        ),  # the second product also quantises its rows
        ExpertTiling(16, Tile(64, GROUP, 4, 3, swap=True), Tile(128, GROUP, 4, 3), early=True),
        ExpertTiling(32, Tile(128, GROUP, 4, 3), Tile(64, GROUP, 4, 3, swap=True)),
    ],
}


@pytest.fixture(autouse=True)
def kernels_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_devices", ("cpu", "cuda"))


class Case(NamedTuple):
    x: Tensor
    router: Tensor
    gate_up: Tensor | BlockQuantized
    down: Tensor | BlockQuantized


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stack(weight: Tensor, halves: int, device: torch.device) -> BlockQuantized:
    """Stack the experts' weights with block-quantised halves."""
    experts, outputs, inputs = weight.shape
    source = DummySource(0, torch.float32, device)
    made = ExpertStack(experts, halves, outputs // halves, inputs, source, blocks=True)
    for expert, both in enumerate(weight):
        for half, part in enumerate(both.chunk(halves)):
            made.put(expert, half, part)
    assert isinstance(made.all, BlockQuantized)
    return made.all


def make(
    tokens: int,
    experts: int,
    hidden: int,
    inner: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    fp8: bool = False,
) -> Case:
    dtype = dtype or (torch.float32 if language.IS_INTERPRETED else torch.bfloat16)
    x, router = draw(tokens, hidden), draw(experts, hidden, seed=1)
    gate_up = draw(experts, 2 * inner, hidden, seed=2) * hidden**-0.5
    down = draw(experts, hidden, inner, seed=3) * inner**-0.5
    if fp8:
        own = stack(gate_up.to(device), 2, device), stack(down.to(device), 1, device)
        return Case(x.to(device, dtype), router.to(device, dtype), *own)
    return Case(*(each.to(device, dtype) for each in (x, router, gate_up, down)))


def logits_of(case: Case) -> Tensor:
    """Router logits in full precision, so that no two experts are tied."""
    return F.linear(case.x.float(), case.router.float())


def expected_of(case: Case, chosen: int, normalize: bool, act: str = "silu", *, gated: bool = True) -> Tensor:
    """The result of torch, computed expert by expert."""
    shares, taken = route_reference(logits_of(case), chosen, normalize)
    out = torch.zeros_like(case.x, dtype=torch.float32)
    for expert in range(len(case.router)):
        token, nth = (taken == expert).nonzero(as_tuple=True)
        if len(token):
            both = _product(case.x[token], case.gate_up, expert, halves=2 if gated else 1)
            gate, up = both.chunk(2, dim=1) if gated else (both, 1)
            said = _product(act_reference(gate, act) * up, case.down, expert)
            out.index_add_(0, token, said.float() * shares[token, nth, None])
    return out


def got_of(case: Case, chosen: int, normalize: bool, act: str = "silu", **more: Any) -> Tensor:
    return run_experts(
        case.x, logits_of(case), case.gate_up, case.down, chosen=chosen, normalize=normalize, act=act, **more
    )


def assert_near(got: Tensor, expected: Tensor, fp8: bool, why: object = None) -> None:
    """Compare loosely in fp8, where a value between two rounding steps may go either way."""
    if got.dtype == torch.float32 and not fp8:
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        return
    rough = 0.9995 if got.dtype == torch.float32 or not got.is_cuda else 0.997
    assert F.cosine_similarity(got.float(), expected).min() > (rough if fp8 else 0.9999), why
    assert (got.float() - expected).abs().max() <= 0.05 * expected.abs().max(), why


def check_routes(routes: Routes, logits: Tensor, chosen: int, normalize: bool, rows: int) -> None:
    tokens, experts = logits.shape
    shares, taken = route_reference(logits, chosen, normalize)
    torch.testing.assert_close(routes.shares.view(tokens, chosen), shares, atol=1e-6, rtol=1e-5)
    of_slot = taken.flatten().cpu()
    order = routes.order.long().cpu()
    assert torch.equal(order, of_slot.argsort(stable=True))
    sorted_experts, covered = of_slot[order], torch.zeros(tokens * chosen, dtype=torch.int32)
    assert len(routes.tiles) == max_num_tiles(tokens * chosen, experts, rows)
    seen_end = False
    for expert, first, end, _ in routes.tiles.tolist():
        if expert == experts:
            seen_end = True
            continue
        assert not seen_end
        own = slice(first, min(first + rows, end))
        assert (sorted_experts[own] == expert).all() and first < end
        covered[own] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize(
    ("experts", "chosen", "normalize"),
    [(8, 3, True), (8, 8, False), (5, 1, True), (128, 8, True), (128, 8, False), (200, 16, False)],
)
@pytest.mark.parametrize("tokens", [1, 15, 17, 129, 300] if ALL_CASES else [17, 300])
def test_every_token_goes_to_its_most_likely_experts(
    tokens: int, experts: int, chosen: int, normalize: bool, device: torch.device
) -> None:
    logits = draw(tokens, experts, seed=tokens).to(device) * 3
    check_routes(route(logits, chosen, normalize, 16), logits, chosen, normalize, 16)


@pytest.mark.parametrize("way", ["ordered by expert", "counted by chunk"])
@pytest.mark.parametrize("rows", [16, 128])
def test_one_expert_may_get_all_tokens_and_another_none(
    way: str, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_MAX_ORDERED_SLOTS", 1 << 12 if way == "ordered by expert" else 0)
    monkeypatch.setattr(kernels, "_CHUNK_SIZE", 1 << 9)
    logits = draw(150, 16).to(device)
    logits[:, 5] += 20
    logits[:, 9] -= 20
    check_routes(route(logits, 2, True, rows), logits, 2, True, rows)
    assert (route(logits, 1, True, rows).shares == 1).all()


def test_the_first_of_equal_experts_are_chosen(device: torch.device) -> None:
    routes = route(torch.zeros(20, 32, device=device), 4, True, 16)
    assert (routes.shares == 0.25).all()
    assert torch.equal(routes.order.cpu() % 4, torch.arange(4).repeat_interleave(20))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_with_nan_gives_nan_and_changes_no_other(value: float, device: torch.device) -> None:
    """Padding tokens may have any values, and must not be routed to experts that do not exist."""
    case = make(40, 8, 48, 24, device)
    good = got_of(case, 3, False)
    case.x[7] = value
    got = got_of(case, 3, False)
    assert got[7].isnan().all()
    others = torch.arange(40) != 7  # now in other rows of their tiles, which some CPUs round differently
    torch.testing.assert_close(got[others], good[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", TILINGS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_every_tiling_gives_what_torch_gives(form: str, tokens: int, device: torch.device) -> None:
    case = make(tokens, 6, 144, 136, device, fp8=form == "fp8")
    expected = expected_of(case, 2, True)
    for plan in TILINGS[form]:
        assert_near(got_of(case, 2, True, plan=plan), expected, form == "fp8", plan)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 31, 64, 100, 300])
def test_the_tiling_for_a_number_of_tokens_gives_what_torch_gives(
    tokens: int, fp8: bool, device: torch.device
) -> None:
    case = make(tokens, 8, 40, 24, device, fp8=fp8)
    assert_near(got_of(case, 3, True), expected_of(case, 3, True), fp8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fp8", [False, True])
def test_half_precision_stays_near_full_precision(
    dtype: torch.dtype, fp8: bool, device: torch.device
) -> None:
    if language.IS_INTERPRETED and dtype == torch.bfloat16 and not fp8:
        pytest.skip("the interpreter multiplies no bfloat16")
    case = make(33, 8, 64, 48, device, dtype, fp8=fp8)
    wide = Case(*(each.float() if isinstance(each, Tensor) else each for each in case))
    got = got_of(case, 2, True)
    assert got.dtype == dtype
    expected = expected_of(wide, 2, True)
    assert F.cosine_similarity(got.float(), expected).min() > (0.995 if fp8 else 0.9999)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_every_activation_gives_what_torch_gives(act: str, device: torch.device) -> None:
    case = make(12, 8, 32, 16, device)
    assert_near(got_of(case, 2, True, act), expected_of(case, 2, True, act), False)


def test_the_residual_is_added_and_results_are_reproducible(device: torch.device) -> None:
    case, residual = make(50, 8, 48, 24, device), draw(50, 48, seed=8).to(device)
    once = got_of(case, 3, True)
    assert torch.equal(once, got_of(case, 3, True))
    together = got_of(case, 3, True, residual=residual.to(once.dtype))
    assert_near(together, (once + residual).float(), False)


@pytest.mark.parametrize("fp8", [False, True])
def test_experts_without_a_gate_apply_the_activation_alone_and_the_bias_once(
    fp8: bool, device: torch.device
) -> None:
    made = make(40, 8, 48, 24, device)  # its gate and up are used as one projection of twice the width
    assert isinstance(made.gate_up, Tensor)
    down = (draw(8, 48, 48, seed=4) * 48**-0.5).to(made.gate_up)
    if fp8:
        case = made._replace(gate_up=stack(made.gate_up, 1, device), down=stack(down, 1, device))
    else:
        case = made._replace(down=down)
    bias = draw(48, seed=5).to(made.x)
    got = got_of(case, 2, False, "gelu", gated=False, bias=bias)
    assert_near(got, expected_of(case, 2, False, "gelu", gated=False) + bias.float(), fp8)


def test_a_tokens_result_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    case, plan = make(30, 8, 48, 24, device), HALF_TILINGS[0][1]
    alone = [got_of(case._replace(x=row[None]), 3, True, plan=plan) for row in case.x]
    assert_near(torch.cat(alone), got_of(case, 3, True, plan=plan).float(), False)


def test_gate_and_up_have_separate_scales_when_their_width_is_no_multiple_of_a_block(
    device: torch.device,
) -> None:
    weight = draw(3, 2 * 40, 130) * torch.tensor([1.0, 1000.0])[None, :, None].repeat_interleave(40, dim=1)
    made = stack(weight.to(device), 2, device)
    assert made.scales.shape == (3, 2, 2)
    for half, scale in ((0, 1.0), (1, 1000.0)):
        own = BlockQuantized(made.values[1, half * 40 : half * 40 + 40], made.scales[1, half : half + 1])
        expected = dequantize_blocks(quantize_blocks(weight[1, half * 40 : half * 40 + 40].to(device)))
        torch.testing.assert_close(dequantize_blocks(own), expected)
        assert float(expected.abs().max()) > scale


def test_a_batch_without_tokens_gives_an_empty_result(device: torch.device) -> None:
    case = make(1, 8, 48, 24, device)
    assert got_of(case._replace(x=case.x[:0]), 3, True).shape == (0, 48)


def test_there_are_enough_tiles_for_the_worst_routing() -> None:
    for slots, experts, rows in ((8, 128, 16), (1024, 128, 16), (65536, 128, 128), (5, 2, 16)):
        count = max_num_tiles(slots, experts, rows)
        one_each = min(slots, experts)
        left = slots - one_each  # worst case: each expert's last tile holds only one row
        assert count == one_each + left // rows


def test_tilings_keep_the_limits_of_the_kernels() -> None:
    for tokens in (1, 128, 512, 8192):
        for fp8 in (False, True):
            plan = expert_tiling_for(tokens, 8, 128, fp8=fp8)
            assert plan.rows >= 16 and all(GROUP % tile.cols == 0 for tile in (plan.up, plan.down))
            assert not any(tile.swap and tile.cols < 64 for tile in (plan.up, plan.down))
