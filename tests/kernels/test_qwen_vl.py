"""Qwen-VL gives the same results with kernels: 2-D rotary positions, windows, M-RoPE and DeepStack."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.checkpoint.qwen_vision import read_qwen_vision
from penstock.inputs.images.positions import rope_positions
from penstock.layers.build import LayerBuilder
from penstock.layers.images import ImageTokens
from penstock.models.decoder_layers import Decoder
from penstock.models.qwen_vision import QwenVisionTower
from penstock.models.qwen_vl import language_shape
from penstock.weights.stream import DummySource
from tests.layers.inputs import draw, ordered_batch
from tests.models.qwen_towers import GRIDS, PROCESSOR, SMALL, TOWERS, pixels_of, run_tower
from tests.parity.qwen_vl import TEXT

pytestmark = pytest.mark.usefixtures("only_interpreted")

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", TOWERS)
@torch.inference_mode()
def test_a_tower_gives_the_same_with_kernels(kind: str, request: pytest.FixtureRequest) -> None:
    vision = {"vision_config": SMALL | TOWERS[kind][2], "hidden_size": 24, "num_hidden_layers": 4}
    build = LayerBuilder(DummySource(0, torch.float32, CPU))
    tower = QwenVisionTower(build, "", read_qwen_vision(kind, vision), PROCESSOR)
    grids, pixels = GRIDS[:3], pixels_of(GRIDS[:3])
    plain = run_tower(tower, grids, pixels)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(run_tower(tower, grids, pixels), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TOWERS)
@torch.inference_mode()
def test_a_decoder_with_images_gives_the_same_with_kernels(kind: str, request: pytest.FixtureRequest) -> None:
    config = TEXT | {"is_causal": True, "head_dim": 16}
    model = Decoder(LayerBuilder(DummySource(0, torch.float32, CPU)), language_shape(kind, config))
    lengths = np.array([3, 9], dtype=np.int32)
    one = np.ones(1, dtype=np.int32)
    rope = rope_positions(lengths, one, one, np.array([[2, 3]], dtype=np.int32)).reshape(-1, 3)
    levels = 3 if kind == "qwen3_vl" else 1
    batch = replace(
        ordered_batch(lengths.tolist()),
        images=ImageTokens(torch.arange(4, 10, dtype=torch.int32), draw(6, levels * 48)),
        rope_positions=torch.from_numpy(np.ascontiguousarray(rope.T)),
    )
    plain = model(batch)
    assert (plain - model(replace(batch, rope_positions=None))).abs().max() > 1e-4
    request.getfixturevalue("kernels")
    torch.testing.assert_close(model(batch), plain, atol=1e-4, rtol=1e-4)
