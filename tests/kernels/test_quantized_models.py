"""Models with quantised checkpoints keep the stored format where kernels can multiply it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from penstock.kernels import language
from penstock.layers import int4
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8 import Fp8Linear
from penstock.layers.int4 import Int4Linear
from penstock.layers.mlp import GatedMLP
from penstock.models.decoder_layers import Decoder
from penstock.models.registry import build_model
from penstock.weights.stream import open_weights
from tests.layers.inputs import ordered_batch
from tests.parity.quantized import FORMATS, write_quantized

CPU = torch.device("cpu")
KEPT = {
    "fp8-channel": Fp8Linear,
    "packed-int4-zeros": Int4Linear,
    "gptq-order": Int4Linear,
    "awq": Int4Linear,
}


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu compares whole models")
    before = language._devices
    language.set_kernel_devices("cpu")
    yield
    language.set_kernel_devices(*before)


def build(folder: Path, load_format: str = "safetensors") -> Decoder:
    config = json.loads((folder / "config.json").read_text())
    weights = open_weights(folder, load_format, 0, torch.float32, CPU)
    made = build_model(config["architectures"][0], config, LayerBuilder(weights))
    assert isinstance(made, Decoder)
    return made


@pytest.mark.parametrize(("name", "kind"), KEPT.items())
@torch.inference_mode()
def test_a_layer_keeps_the_stored_form_and_a_mixed_one_is_dequantised(
    name: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4, "MAX_KERNEL_ROWS", 5)  # so that both ways of multiplying are used
    stored, plain = write_quantized(name, tmp_path)
    model = build(stored)
    for layer, is_kept in ((0, True), (1, False)):  # the second layer's value projection is unquantised
        assert isinstance(model.layers[layer].attention.qkv, kind) is is_kept
        mlp = model.layers[layer].mlp
        assert isinstance(mlp, GatedMLP) and isinstance(mlp.gate_up, kind) and isinstance(mlp.down, kind)
    reference = getattr(transformers, FORMATS[name].family.model).from_pretrained(plain, dtype=torch.float32)
    for length in (3, 9):
        batch = ordered_batch([length])
        theirs = reference.eval().model(batch.token_ids[None].long()).last_hidden_state[0]
        least = 0.99 if name.startswith("fp8") else 0.99999  # fp8 layers also quantise their inputs
        assert F.cosine_similarity(model(batch), theirs).min() >= least


@pytest.mark.parametrize("name", ["gptq-order", "fp8-channel"])
@torch.inference_mode()
def test_dummy_weights_are_created_in_the_stored_form(name: str, tmp_path: Path) -> None:
    stored, _ = write_quantized(name, tmp_path)
    model = build(stored, "dummy")
    assert isinstance(model.layers[0].attention.qkv, KEPT[name])
    states = model(ordered_batch([2, 3]))
    assert states.isfinite().all() and states.std() > 0.1
