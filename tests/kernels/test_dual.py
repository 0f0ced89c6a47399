"""CLIP and SigLIP towers give the same results with kernels: activations, norms, and the pooling head."""

from __future__ import annotations

import pytest
import torch

from penstock.checkpoint.image_processor import ImageProcessorSpec, MaxPatches
from penstock.layers.build import LayerBuilder
from penstock.layers.images import VisionTower
from penstock.models.dual import ClipVision
from penstock.models.siglip_vision import SiglipVision
from penstock.weights.stream import DummySource
from tests.kernels.towers import CONFIG, FIXED, run

pytestmark = pytest.mark.usefixtures("only_interpreted")

CPU = torch.device("cpu")
NAFLEX = ImageProcessorSpec(geometry=MaxPatches(40), patch_size=4, resample=2, channels_last=True)


@pytest.mark.parametrize("kind", ["clip", "siglip", "naflex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@torch.inference_mode()
def test_a_tower_gives_the_same_with_kernels(
    kind: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    build = LayerBuilder(DummySource(0, dtype, CPU))
    tower: VisionTower
    if kind == "clip":
        tower, grids = ClipVision(build, CONFIG | {"hidden_act": "quick_gelu"}, FIXED, 12), [(2, 2)] * 3
    else:
        pixels = NAFLEX if kind == "naflex" else FIXED
        tower = SiglipVision(build, "vision_model.", CONFIG | {"hidden_act": "gelu_pytorch_tanh"}, pixels)
        grids = [(1, 3), (2, 2), (5, 7)] if kind == "naflex" else [(2, 2)] * 3
    plain = run(tower, grids)
    request.getfixturevalue("kernels")
    tolerance = 1e-4 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(run(tower, grids), plain, atol=tolerance, rtol=tolerance)
