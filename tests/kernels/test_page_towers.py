"""Vision towers whose patches become tokens of a text model give the same results with kernels: SigLIP's with
pixel shuffle, and Gemma 4's with 2-D rotary positions, head norms and sandwich norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.checkpoint.gemma_vision import GemmaVision, GemmaVisionShape
from penstock.checkpoint.image_processor import ImageProcessorSpec, SoftTokens
from penstock.layers.build import LayerBuilder
from penstock.layers.embedding import EncoderEmbedding
from penstock.layers.images import ImageTokens, VisionTower
from penstock.models.gemma_vision import GemmaVisionTower
from penstock.models.siglip_vision import SiglipTokens, SiglipVision
from penstock.weights.stream import DummySource
from tests.kernels.towers import CONFIG, FIXED, run
from tests.layers.inputs import draw, ordered_batch

pytestmark = pytest.mark.usefixtures("only_interpreted")

CPU = torch.device("cpu")
SHAPE = GemmaVisionShape(
    hidden=40,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=12,
    intermediate=56,
    act="gelu_pytorch_tanh",
    eps=1e-6,
    rope_base=100.0,
    num_positions=64,
    pool=2,
    is_clipped=False,
    is_standardized=True,
)
SOFT = ImageProcessorSpec(geometry=SoftTokens(70, 2), patch_size=4, resample=3, channels_last=True)


@pytest.mark.parametrize("kind", ["siglip", "gemma"])
@torch.inference_mode()
def test_a_tower_gives_the_same_with_kernels(kind: str, request: pytest.FixtureRequest) -> None:
    build = LayerBuilder(DummySource(0, torch.float32, CPU))
    tower: VisionTower
    if kind == "siglip":
        options = CONFIG | {"hidden_act": "gelu_pytorch_tanh"}
        inner = SiglipVision(build, "vision_tower.", options, FIXED, has_head=False)
        tower = SiglipTokens(inner, build.linear("connector", 4 * 36, 20, bias=False), merge=2)
        grids, tokens = [(2, 2)] * 3, 3
    else:
        tower, grids, tokens = GemmaVisionTower(build, GemmaVision(SHAPE, SOFT), 20), [(2, 4), (4, 6)], 8
    plain = run(tower, grids)
    assert plain.shape == (tokens, 20)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(run(tower, grids), plain, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_image_features_replace_word_embeddings_before_the_norm(request: pytest.FixtureRequest) -> None:
    norm = LayerBuilder(DummySource(1, torch.float32, CPU)).norm("norm", 24, 1e-5)
    embedding = EncoderEmbedding(draw(99, 24), positions=None, segments=None, norm=norm)
    features = draw(3, 24)
    tokens = torch.tensor([1, 2, 6], dtype=torch.int32)
    batch = ordered_batch([3, 5])
    mixed = replace(batch, images=ImageTokens(tokens, features))
    plain = embedding(mixed)
    assert np.allclose(plain[tokens.long()], norm(features), atol=1e-6)
    others = [index for index in range(8) if index not in tokens]
    assert torch.equal(plain[others], embedding(batch)[others])
    request.getfixturevalue("kernels")
    torch.testing.assert_close(embedding(mixed), plain, atol=1e-5, rtol=1e-5)
