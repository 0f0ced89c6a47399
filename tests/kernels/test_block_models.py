"""With kernels, models with block-quantised fp8 weights stay close to the same models dequantised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from penstock.kernels import language
from penstock.kernels.blockwise import BlockQuantized
from penstock.layers.build import LayerBuilder
from penstock.layers.fp8 import BlockLinear
from penstock.layers.moe import SparseMLP
from penstock.models.decoder_layers import Decoder
from penstock.models.registry import build_model
from penstock.weights.stream import open_weights
from tests.layers.inputs import ordered_batch
from tests.parity.blocks import MODELS, write_blocks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on() -> Iterator[None]:
    if not language.IS_INTERPRETED:
        pytest.skip("on a CUDA device tests/gpu compares whole models")
    before = language._devices
    language.set_kernel_devices("cpu")
    yield
    language.set_kernel_devices(*before)


def build(folder: Path, load_format: str = "safetensors", quantization: str | None = None) -> Decoder:
    config = json.loads((folder / "config.json").read_text())
    weights = open_weights(folder, load_format, 0, torch.float32, CPU)
    made = build_model(
        config["architectures"][0], config, LayerBuilder(weights, quantization), generates=True
    )
    assert isinstance(made, Decoder)
    return made


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_block_quantised_models_stay_near_the_reference(name: str, tmp_path: Path) -> None:
    """Activations are also quantised in groups, once for each product in three layers."""
    stored, plain = write_blocks(name, tmp_path)
    reference = getattr(transformers, MODELS[name].model).from_pretrained(plain, dtype=torch.float32).eval()
    model = build(stored)
    assert isinstance(model.layers[0].attention.qkv, BlockLinear)
    assert not isinstance(model.layers[2].attention.out, BlockLinear)  # excluded in config.json
    batch = ordered_batch([3, 17])
    states = model(batch)
    for row, own in zip(batch.token_ids.split([3, 17]), states.split([3, 17]), strict=True):
        theirs = reference.model(row[None].long()).last_hidden_state[0]
        near = F.cosine_similarity(own, theirs).sort().values
        few = len(near) // 10 if name == "qwen3-moe" else 0
        assert near[few] >= 0.99 and near[0] > 0.9  # of two nearly tied experts, either may be chosen


@torch.inference_mode()
def test_dummy_weights_are_created_in_fp8(tmp_path: Path) -> None:
    stored, _ = write_blocks("qwen3-moe", tmp_path)
    model = build(stored, "dummy")
    first, dense = model.layers[0].mlp, model.layers[1].mlp
    assert isinstance(first, SparseMLP) and isinstance(first.gate_up, BlockQuantized)
    assert first.gate_up.values.dtype == torch.float8_e4m3fn and first.router.dtype == torch.float32
    assert not isinstance(dense, SparseMLP) and isinstance(dense.gate_up, BlockLinear)
    states = model(ordered_batch([2, 5]))
    assert states.isfinite().all() and states.std() > 0.1


@torch.inference_mode()
def test_quantisation_at_load_stores_experts_in_blocks(tmp_path: Path) -> None:
    _, folder = write_blocks("qwen3-moe", tmp_path)
    batch = ordered_batch([4, 12])
    quantised, exact = build(folder, quantization="fp8"), build(folder)
    assert isinstance(quantised.layers[0].mlp, SparseMLP)
    assert isinstance(quantised.layers[0].mlp.gate_up, BlockQuantized)
    near = F.cosine_similarity(quantised(batch), exact(batch)).sort().values
    assert near[len(near) // 10] > 0.98
    language.set_kernel_devices()  # the torch references quantise rows in the same way
    again = F.cosine_similarity(build(folder, quantization="fp8")(batch), exact(batch)).sort().values
    assert again[len(again) // 10] > 0.98
