"""fp8 layers with their reference product: close to plain layers, and used only for supported layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.kernels.quantize import Quantized, quantize_rows_reference
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.int8 import Int8Linear
from penstock.layers.linear import Linear, make_linear
from penstock.layers.mlp import MLP, GatedMLP
from penstock.models.encoder import Encoder
from penstock.models.registry import build_model
from penstock.runner.base import Runner
from penstock.runner.load import load_runner, settle
from penstock.runner.model_runner import ModelRunner
from penstock.weights.stream import open_weights
from tests.checkpoints import write_bert
from tests.layers.inputs import draw, ordered_batch

SHAPES = [(1, 32, 48), (7, 48, 32), (130, 768, 96), (33, 64, 1024)]  # tokens, in, out
CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


def encoder(quantization: str | None, **more: Any) -> Encoder:
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, torch.device("cpu"))
    model = build_model("BertModel", CONFIG, LayerBuilder(weights, quantization, **more))
    assert isinstance(model, Encoder)
    return model


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("act", ["identity", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_stays_near_the_plain_form(
    tokens: int, inputs: int, outputs: int, act: str, bias: bool
) -> None:
    weight, x = draw(outputs, inputs) / inputs**0.5, draw(tokens, inputs, seed=1)
    b, r = draw(outputs, seed=2) if bias else None, draw(tokens, outputs, seed=3)
    layer, exact = Fp8Linear(weight, b, act), Linear(weight, b, act)
    assert cosine(layer(x), exact(x)) > 0.999
    torch.testing.assert_close(layer(x, r), layer(x) + r)


def test_the_product_equals_that_of_the_dequantised_values() -> None:
    weight, x, bias = draw(48, 64), draw(9, 64, seed=1), draw(48, seed=2)
    scaled = quantize_rows_reference(weight)
    rounded = Linear(scaled.values.float() * scaled.scales, bias)
    quantised = quantize_rows_reference(x)
    torch.testing.assert_close(Fp8Linear(weight, bias)(x), rounded(quantised))
    torch.testing.assert_close(Fp8Linear(weight, bias)(quantised), Fp8Linear(weight, bias)(x))


def test_a_rows_result_does_not_depend_on_its_batch() -> None:
    layer, x = Fp8Linear(draw(32, 64), None), draw(5, 64, seed=1)
    x[3] *= 1e4
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(layer(x), alone, rtol=1e-5, atol=1e-5)


def test_blocks_pass_quantised_activations_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = draw(6, 64, seed=9), [draw(96, 64) / 8, draw(64, 96, seed=1) / 10]
    down = Fp8Linear(weights[1], None)
    block = MLP(Fp8Linear(weights[0], None, "gelu"), down)
    exact = MLP(Linear(weights[0], None, "gelu"), Linear(weights[1], None))
    assert cosine(block(x), exact(x)) > 0.998  # two layers
    seen: list[Any] = []
    monkeypatch.setattr(Fp8Linear, "_product", lambda self, x, bias: seen.append(x) or torch.zeros(6, 96))
    block(x)
    assert [isinstance(each, Quantized) for each in seen] == [False, True]


def test_a_gated_block_stays_near_the_plain_one() -> None:
    x, up, down = draw(6, 64, seed=9), draw(192, 64) / 8, draw(64, 96, seed=1) / 10
    got = GatedMLP(Fp8Linear(up, None), Fp8Linear(down, None), "silu")(x)
    assert cosine(got, GatedMLP(Linear(up, None), Linear(down, None), "silu")(x)) > 0.998


@pytest.mark.parametrize(("outputs", "inputs", "fits"), [(32, 16, True), (24, 16, False), (16, 40, False)])
def test_shapes_without_an_fp8_kernel_stay_unquantised(outputs: int, inputs: int, fits: bool) -> None:
    layer = make_linear(draw(outputs, inputs), None, "identity", "fp8")
    assert isinstance(layer, Fp8Linear) is fits


@torch.inference_mode()
def test_a_model_stays_near_its_plain_form() -> None:
    batch = ordered_batch([3, 7, 20])
    got, expected = encoder("fp8")(batch), encoder(None)(batch)
    assert F.cosine_similarity(got, expected).min() > 0.99
    assert not torch.equal(got, expected)


def test_listed_layers_and_all_heads_stay_unquantised() -> None:
    model = encoder("fp8", unquantized=(1,))
    assert [isinstance(layer.qkv, Fp8Linear) for layer in model.layers] == [True, False, True]
    weights = open_weights(Path("/nowhere"), "dummy", 0, torch.float32, torch.device("cpu"))
    build = LayerBuilder(weights, "fp8")
    for name in ("pooler.dense", "score.0", "classifier", "cls.predictions.transform.dense"):
        assert not isinstance(build.linear(name, 64, 64), Fp8Linear)
    assert not isinstance(build.tied(draw(64, 64), None), Fp8Linear)
    for name in ("layers.0.mlp.up", "bert.encoder.layer.11.output.dense"):
        assert isinstance(build.linear(name, 64, 64), Fp8Linear)


def test_norms_quantise_for_the_fp8_layer_that_reads_them() -> None:
    first, middle, last = encoder("fp8", unquantized=(1,)).layers
    assert [layer.attention_norm.quantizes for layer in (first, middle, last)] == [True, False, True]
    assert [layer.output_norm.quantizes for layer in (first, middle, last)] == [False, True, False]


def test_an_unquantized_layer_beyond_the_model_is_refused(tmp_path: Path) -> None:
    write_bert(tmp_path)

    def load(*unquantized_layers: int) -> Runner:
        config = EngineConfig(
            model=str(tmp_path), device="cpu", quantization="int8", unquantized_layers=unquantized_layers
        )
        spec = describe(config)
        return load_runner(spec, settle(config, spec)).runner

    with pytest.raises(ConfigError, match="has 2, but the model's layers are 0 to 1"):
        load(0, 2)
    runner = load(1)
    assert isinstance(runner, ModelRunner) and isinstance(runner.model, Encoder)
    assert [isinstance(layer.qkv, Int8Linear) for layer in runner.model.layers] == [True, False]
    runner.close()
