"""Gate and up in one product with the activation. Only a Hopper GPU uses this kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import gate_up, language
from penstock.kernels.activation import ACTIVATION_CODES
from penstock.kernels.gate_up import GateUp, gate_up_reference
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMLP


def _has() -> bool:
    return gate_up.HAS_GLUON and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


hopper = pytest.mark.skipif(not _has(), reason="needs a Hopper GPU")


def _made(tokens: int, inner: int, width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens + inner + width)
    x = torch.randn(tokens, inner, device="cuda", generator=generator)
    weight = torch.randn(2 * width, inner, device="cuda", generator=generator) / inner**0.5
    return x.to(dtype), weight.to(dtype)


def _same(got: Tensor, x: Tensor, weight: Tensor, act: str, gate_first: bool) -> None:
    expected = gate_up_reference(x.double(), weight.double(), act, gate_first)
    error = 2.0**-8 if got.dtype is torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(got.double(), expected, atol=2e-3, rtol=error)


@hopper
@pytest.mark.parametrize("tokens", [1, 63, 64, 128, 129, 1000, 5000])
@pytest.mark.parametrize(("inner", "width"), [(64, 128), (72, 136), (768, 1152), (1024, 3080), (40, 8)])
def test_any_shape_equals_the_reference(tokens: int, inner: int, width: int) -> None:
    x, weight = _made(tokens, inner, width)
    made = GateUp.of(weight, "silu", True)
    assert made is not None
    _same(made(x), x, weight, "silu", True)


@hopper
@pytest.mark.parametrize("act", ACTIVATION_CODES)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_activation_equals_the_reference(act: str, gate_first: bool, dtype: torch.dtype) -> None:
    x, weight = _made(300, 256, 384, dtype)
    made = GateUp.of(weight, act, gate_first)
    assert made is not None
    _same(made(x), x, weight, act, gate_first)


@hopper
def test_extreme_gates_stay_finite() -> None:
    x, weight = _made(128, 64, 128)
    x[0], x[1] = 1e4, -1e4
    for act in ACTIVATION_CODES:
        made = GateUp.of(weight, act, True)
        assert made is not None
        got = made(x).float()
        assert bool(got.isfinite().all())
        expected = gate_up_reference(x.float(), weight.float(), act, True)
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=2**-7)


@hopper
def test_a_slice_of_a_larger_tensor_is_written_within_its_bounds() -> None:
    x, weight = _made(200, 128, 136)
    made = GateUp.of(weight, "silu", True)
    assert made is not None
    around = torch.full((400, 136), 7.0, device="cuda", dtype=torch.bfloat16)

    class Sliced(Tensor):
        def new_empty(self, *size: Any, **more: Any) -> Tensor:
            return around[100:300]

    got = made(x.as_subclass(Sliced)).as_subclass(Tensor)
    _same(got, x, weight, "silu", True)
    assert bool((around[:100] == 7).all()) and bool((around[300:] == 7).all())


@hopper
def test_it_can_be_captured_and_is_launched_directly() -> None:
    x, weight = _made(2000, 512, 1024)
    made = GateUp.of(weight, "silu", True)
    assert made is not None
    made(x), made(x)
    before = gate_up._gate_up.num_direct_launches
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = made(x)
    assert gate_up._gate_up.num_direct_launches == before + 1
    x.copy_(_made(2000, 512, 1025)[0])
    graph.replay()
    _same(got, x, weight, "silu", True)


@hopper
@pytest.mark.parametrize(
    "weight",
    [
        lambda half: half(256, 64).float(),
        lambda half: half(256, 60),
        lambda half: half(248, 64),
        lambda half: half(64, 256).t(),
        lambda half: half(256 * 64 + 1)[1:].view(256, 64),
    ],
    ids=["fp32", "odd inner", "odd width", "turned", "odd address"],
)
def test_weights_that_the_copy_engine_cannot_read_are_refused(weight: Callable[..., Tensor]) -> None:
    half = partial(torch.zeros, device="cuda", dtype=torch.bfloat16)
    assert GateUp.of(half(256, 64), "silu", True) is not None
    assert GateUp.of(weight(half), "silu", True) is None


@hopper
def test_a_block_uses_it_only_for_large_steps() -> None:
    x, weight = _made(gate_up._MIN_ROUNDS * gate_up.num_programs(0) // 8 * 128, 256, 1024)  # eight tiles wide
    down = Linear(_made(1, 1024, 128)[1][:256], None)
    block = GatedMLP(Linear(weight, None), down, "silu")
    few_rows = x[: len(x) // 2]
    assert (
        block.fused_gate_up is not None
        and block.fused_gate_up.serves(x)
        and not block.fused_gate_up.serves(few_rows)
    )
    got, few = block(x), block(few_rows)
    language.set_kernel_devices()
    try:
        plain = block(x)
    finally:
        language.set_kernel_devices("cuda")
    torch.testing.assert_close(got[: len(few)], few, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got, plain, atol=2e-2, rtol=2e-2)


@pytest.fixture
def imagined(monkeypatch: pytest.MonkeyPatch) -> Iterator[GateUp]:
    """Pretend to have a device with 132 multiprocessors."""
    if not gate_up.HAS_GLUON:
        monkeypatch.setattr(gate_up, "descriptor", lambda *args: None)
    monkeypatch.setattr(gate_up, "num_programs", lambda device: 132)
    before = language._devices
    language.set_kernel_devices("cpu")
    yield GateUp(torch.zeros(2 * 14336, 64, dtype=torch.bfloat16), "silu", True)
    language.set_kernel_devices(*before)


def test_it_accepts_only_steps_that_fill_the_device(
    imagined: GateUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serves(tokens: int) -> bool:
        return imagined.serves(torch.zeros(tokens, 64, dtype=torch.bfloat16))

    # There are 112 tiles per 128 tokens, and 132 run at a time. Rounds must be nearly full, or many.
    assert [serves(tokens) for tokens in (128, 256, 384, 512, 640)] == [False, False, False, False, False]
    assert [serves(tokens) for tokens in (768, 896, 1024, 2048, 4090)] == [False, True, True, True, True]
    x = torch.zeros(4096, 64, dtype=torch.bfloat16)
    assert not imagined.serves(x.half()) and not imagined.serves(torch.zeros(64, 4096).bfloat16().t())
    # Precompilation accepts any size, so that the kernel is compiled before it is needed.
    monkeypatch.setattr(gate_up, "is_precompiling", lambda: True)
    assert imagined.serves(x[:1])
    language.set_kernel_devices()
    assert not imagined.serves(x)


def test_no_block_on_a_cpu_uses_it() -> None:
    block = GatedMLP(
        Linear(torch.zeros(256, 64).bfloat16(), None), Linear(torch.zeros(64, 128), None), "silu"
    )
    assert block.fused_gate_up is None
