"""Small vision towers on random patches."""

from __future__ import annotations

import numpy as np
import torch

from penstock.checkpoint.image_processor import FixedSize, ImageProcessorSpec
from penstock.layers.images import ImageBatch, VisionTower
from penstock.scheduler.images import patch_groups
from penstock.types import cumulative

CONFIG = {
    "hidden_size": 36,  # heads of 18, which is no power of two
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "layer_norm_eps": 1e-6,
    "patch_size": 4,
    "image_size": 8,
    "num_patches": 9,
}
FIXED = ImageProcessorSpec(geometry=FixedSize((8, 8), (8, 8)), patch_size=4, resample=3)


def run(tower: VisionTower, grids: list[tuple[int, int]]) -> torch.Tensor:
    counts = np.array([height * width for height, width in grids], dtype=np.int32)
    patches = np.random.default_rng(0).integers(0, 256, (int(counts.sum()), 48), dtype=np.uint8)
    shape = np.array(grids, dtype=np.int32)
    images = ImageBatch(
        torch.from_numpy(patches),
        shape,
        torch.from_numpy(cumulative(counts)),
        patch_groups(counts),
        int(counts.max()),
        tuple(torch.from_numpy(each) for each in tower.layout(shape)),
    )
    return tower(images).float()
