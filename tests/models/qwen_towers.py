"""Small Qwen-VL vision towers of Penstock and of transformers, on the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from penstock.checkpoint.image_processor import ImageProcessorSpec, PixelRange
from penstock.checkpoint.qwen_vision import read_qwen_vision
from penstock.layers.build import LayerBuilder
from penstock.layers.images import ImageBatch
from penstock.models.qwen_vision import QwenVisionTower
from penstock.models.vision_geometry import length_groups
from penstock.types import Ints, cumulative
from penstock.weights.stream import SafetensorsSource
from tests.parity.reference import randomise

Json = dict[str, Any]
OUT = 24
SMALL: Json = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWERS: dict[str, tuple[str, str, Json]] = {
    "qwen2_vl": ("Qwen2VL", "Qwen2VisionTransformerPretrainedModel", {"embed_dim": 16, "hidden_size": OUT}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        "Qwen2_5_VisionTransformerPretrainedModel",
        {
            "hidden_size": 16,
            "intermediate_size": 40,
            "out_hidden_size": OUT,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        "Qwen3VLVisionModel",
        {
            "hidden_size": 16,
            "intermediate_size": 40,
            "out_hidden_size": OUT,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}
PROCESSOR = ImageProcessorSpec(
    geometry=PixelRange(min_pixels=1, max_pixels=1 << 20, merge_size=2, temporal_patch_size=2),
    patch_size=4,
    resample=3,
    mean=(0.48, 0.46, 0.41),
    std=(0.27, 0.26, 0.28),
)
GRIDS = np.array([[2, 2], [2, 6], [6, 4], [4, 6], [10, 6]], dtype=np.int32)  # fewest patches first


def reference_tower(kind: str) -> tuple[Any, Json]:
    prefix, name, own = TOWERS[kind]
    config = getattr(transformers, f"{prefix}Config")(vision_config=SMALL | own).vision_config
    module = getattr(transformers.models, kind)
    model = getattr(module, f"modeling_{kind}").__dict__[name]._from_config(config)
    randomise(model, seed=1)
    return model.eval(), SMALL | own


def own_tower(kind: str, folder: Path, model: Any, values: Json) -> QwenVisionTower:
    model.save_pretrained(folder)
    weights = SafetensorsSource(folder, torch.float32, torch.device("cpu"))
    shape = read_qwen_vision(kind, {"vision_config": values, "hidden_size": OUT, "num_hidden_layers": 4})
    tower = QwenVisionTower(LayerBuilder(weights), "", shape, PROCESSOR)
    weights.check_all_read(())
    return tower


def pixels_of(grids: Ints, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(
        0, 256, (int(grids.prod(1).sum()), PROCESSOR.values_per_patch), np.uint8
    )


def run_tower(tower: QwenVisionTower, grids: Ints, pixels: np.ndarray) -> Tensor:
    counts = grids.prod(1).astype(np.int32)
    batch = ImageBatch(
        torch.from_numpy(pixels),
        grids,
        torch.from_numpy(cumulative(counts)),
        length_groups(counts),
        int(counts.max()),
        tuple(torch.from_numpy(array) for array in tower.layout(grids)),
    )
    with torch.inference_mode():
        return tower(batch)


def run_reference(model: Any, grids: Ints, pixels: np.ndarray) -> Tensor:
    mean, std = (torch.tensor(values)[:, None] for values in (PROCESSOR.mean, PROCESSOR.std))
    channels = torch.from_numpy(pixels).float().view(len(pixels), 3, -1)
    values = (channels / 255 - mean) / std
    frames = values[:, :, None].expand(-1, -1, 2, -1).flatten(1)
    thw = torch.from_numpy(np.concatenate((np.ones((len(grids), 1)), grids), axis=1)).long()
    with torch.inference_mode():
        out = model(frames, grid_thw=thw)
    return torch.cat((out.pooler_output, *getattr(out, "deepstack_features", [])), dim=1)
