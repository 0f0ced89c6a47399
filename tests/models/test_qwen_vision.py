"""Qwen's vision towers give transformers' features, for images of different sizes in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.checkpoint.qwen_vision import read_qwen_vision
from penstock.errors import ModelLoadError
from penstock.types import cumulative
from tests.models.qwen_towers import (
    GRIDS,
    OUT,
    SMALL,
    TOWERS,
    own_tower,
    pixels_of,
    reference_tower,
    run_reference,
    run_tower,
)


@pytest.mark.parametrize("kind", TOWERS)
def test_features_of_images_of_different_sizes_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, values = reference_tower(kind)
    tower, pixels = own_tower(kind, tmp_path, model, values), pixels_of(GRIDS)
    expected = run_reference(model, GRIDS, pixels)
    got = run_tower(tower, GRIDS, pixels)
    assert got.shape == expected.shape == (len(pixels) // 4, tower.feature_width)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_an_image_has_the_same_features_whatever_is_beside_it(tmp_path: Path) -> None:
    tower = own_tower("qwen2_5_vl", tmp_path, *reference_tower("qwen2_5_vl"))
    pixels, ends = pixels_of(GRIDS), cumulative(GRIDS.prod(1).astype(np.int32))
    together = run_tower(tower, GRIDS, pixels)
    for number in range(len(GRIDS)):
        begin, end = ends[number], ends[number + 1]
        alone = run_tower(tower, GRIDS[number : number + 1], pixels[begin:end])
        assert (alone - together[begin // 4 : end // 4]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen2_vl", "in_channels", 1),
        ("qwen2_vl", "spatial_patch_size", 8),
        ("qwen2_vl", "num_registers", 4),
        ("qwen2_vl", "rope_parameters", {"rope_type": "axial", "rope_theta": 5.0}),
        ("qwen2_vl", "hidden_size", 32),
        ("qwen2_vl", "num_heads", 5),
        ("qwen2_5_vl", "window_size", 128),
        ("qwen2_5_vl", "window_size", 4),
        ("qwen2_5_vl", "fullatt_block_indexes", [7]),
        ("qwen3_vl", "num_position_embeddings", 35),
        ("qwen3_vl", "deepstack_visual_indexes", [1, 0]),
        ("qwen3_vl", "depth", True),
    ],
)
def test_a_tower_that_would_be_computed_otherwise_is_refused_by_name(kind: str, key: str, value: Any) -> None:
    vision = SMALL | TOWERS[kind][2] | {key: value}
    named = "heads" if key == "num_heads" else key
    with pytest.raises(ModelLoadError, match="vision_config" if key == "hidden_size" else named):
        read_qwen_vision(kind, {"vision_config": vision, "hidden_size": OUT, "num_hidden_layers": 4})
