"""Every kind of linear layer against the plain one, with random shapes."""

from __future__ import annotations

import pytest
import torch

from penstock.layers.activation import ACTIVATIONS
from penstock.layers.int8 import Int8Linear
from penstock.layers.linear import Linear, PackedLinear, make_linear
from penstock.layers.norm import LayerNorm
from tests.layers.inputs import draw

SHAPES = [(1, 32, 48), (7, 48, 32), (130, 64, 96), (600, 33, 17)]  # tokens, in, out
packed_only = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("act", ["identity", "gelu", "relu", "tanh", "silu", "gelu_new"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("residual", [True, False])
@packed_only
def test_the_packed_form_equals_the_plain_one(
    tokens: int, inputs: int, outputs: int, act: str, bias: bool, residual: bool
) -> None:
    weight, x = draw(outputs, inputs) / inputs**0.5, draw(tokens, inputs, seed=1)
    b = draw(outputs, seed=2) if bias else None
    r = draw(tokens, outputs, seed=3) if residual else None
    kept = None if r is None else r.clone()
    wanted = Linear(weight, b, act)(x, r)
    torch.testing.assert_close(PackedLinear(weight, b, act)(x, r), wanted, atol=1e-5, rtol=1e-4)
    if r is not None:
        assert kept is not None and torch.equal(r, kept), "the residual is read, not written"


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("act", ["identity", "gelu", "silu"])
@packed_only
def test_int8_stays_near_the_plain_form(tokens: int, inputs: int, outputs: int, act: str) -> None:
    weight, x = draw(outputs, inputs) / inputs**0.5, draw(tokens, inputs, seed=1)
    b, r = draw(outputs, seed=2), draw(tokens, outputs, seed=3)
    wanted = Linear(weight, b, act)(x, r)
    error = (Int8Linear(weight, b, act)(x, r) - wanted).norm() / wanted.norm()
    assert error < 0.02


@packed_only
def test_int8_takes_activations_that_are_all_positive_all_negative_or_zero() -> None:
    layer = Int8Linear(draw(8, 16), None)
    plain = Linear(draw(8, 16), None)
    for x in (draw(5, 16, seed=1).abs() + 3, -draw(5, 16, seed=1).abs() - 3, torch.zeros(5, 16)):
        out = layer(x)
        assert torch.isfinite(out).all()
        assert (out - plain(x)).norm() <= 0.02 * plain(x).norm() + 1e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_named_activation_runs(name: str) -> None:
    assert Linear(draw(4, 4), None, name)(draw(3, 4)).shape == (3, 4)


def test_the_kind_of_layer_follows_precision_and_device() -> None:
    weight = draw(8, 8)
    if torch.backends.mkldnn.is_available():
        assert isinstance(make_linear(weight, None, "identity", None), PackedLinear)
        assert isinstance(make_linear(weight, None, "identity", "int8"), Int8Linear)
    assert isinstance(make_linear(weight.half(), None, "identity", None), Linear)


def test_layer_norm_equals_its_formula() -> None:
    x, weight, bias = draw(5, 16) * 3 + 1, draw(16, seed=1), draw(16, seed=2)
    wanted = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(LayerNorm(weight, bias, 1e-5)(x), wanted * weight + bias, atol=1e-5, rtol=1e-4)
