"""Image processors described by published files, and keys that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.image_processor import (
    FixedSize,
    ImageProcessorSpec,
    MaxPatches,
    PixelRange,
    SoftTokens,
    Tiles,
)
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.errors import ModelLoadError

Json = dict[str, Any]
CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
CLIP_VISION = {"vision_config": {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32}}


def read(folder: Path, values: Json, config: Json, processor: Json | None = None) -> ImageProcessorSpec:
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    if processor is not None:
        (folder / "processor_config.json").write_text(json.dumps(processor))
    found = read_image_processor(folder, config)
    assert found is not None
    return found


def refused(folder: Path, values: Json, config: Json) -> str:
    with pytest.raises(ModelLoadError) as raised:
        read(folder, values, config)
    return raised.value.message


def test_the_first_files_of_clip_are_read(tmp_path: Path) -> None:
    values = {
        "crop_size": 224,
        "do_center_crop": True,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor",
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "resample": 3,
        "size": 224,
    }
    spec = read(tmp_path, values, CLIP_VISION)
    assert spec.geometry == FixedSize(size=(224, 224), shortest_edge=224, is_cropped=True)
    assert (spec.patch_size, spec.resample, spec.tokens_per_tile, spec.max_patches) == (32, 3, 0, 49)
    assert spec.mean == tuple(CLIP_MEAN) and not spec.channels_last


def test_the_files_of_qwen_vl_are_read_in_each_of_their_spellings(tmp_path: Path) -> None:
    config = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}
    first = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "size": {"min_pixels": 3136, "max_pixels": 12845056},
    }
    expected = PixelRange(min_pixels=3136, max_pixels=12845056, merge_size=2, temporal_patch_size=2)
    spec = read(tmp_path, first, config)
    assert spec.geometry == expected and spec.max_patches == 12845056 // 196
    later = {**first, "image_processor_type": "Qwen2_5_VLImageProcessor", "size": None}
    assert read(tmp_path, later, config).geometry == expected
    newest = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": 2,
    }
    spec = read(tmp_path, newest, {"vision_config": {"patch_size": 16}})
    assert isinstance(spec.geometry, PixelRange) and spec.geometry.max_pixels == 16777216


def test_paligemma_has_a_placeholder_for_each_patch(tmp_path: Path) -> None:
    values = {
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": 1024,
        "size": {"height": 448, "width": 448},
        "do_convert_rgb": None,
        "resample": 3,
    }
    vision = {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 448}
    config = {"vlm_config": {"vision_config": vision, "image_token_index": 257152}}
    assert read(tmp_path, values, config).tokens_per_tile == 1024
    message = refused(tmp_path, {**values, "image_seq_length": 256}, config)
    assert "image_seq_length = 256" in message and "1024, the tokens" in message


def test_newer_folders_nest_the_image_processor(tmp_path: Path) -> None:
    nested = {
        "processor_class": "EmbeddingGemma2Processor",
        "image_seq_length": 280,
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280},
    }
    config = {"vision_config": {"patch_size": 16, "pooling_kernel_size": 3}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    spec = read_image_processor(tmp_path, config)
    assert spec is not None and spec.channels_last
    assert spec.geometry == SoftTokens(max_soft_tokens=280, pooling_kernel_size=3)
    assert (spec.rescale_factor, spec.mean, spec.std) == (1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def test_tiles_have_the_tokens_that_the_tower_leaves(tmp_path: Path) -> None:
    values = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
        "do_pad": True,
    }
    vision = {"model_type": "siglip_vision_model", "patch_size": 16, "image_size": 512}
    config = {"vlm_config": {"vision_config": vision, "pixel_shuffle_factor": 4}}
    spec = read(tmp_path, values, config, {"image_seq_len": 64})
    assert spec.geometry == Tiles(longest_edge=2048, tile_size=512)
    assert (spec.tokens_per_tile, spec.max_tiles) == (64, 17)
    with pytest.raises(ModelLoadError, match="image_seq_len = 81"):
        read(tmp_path, values, config, {"image_seq_len": 81})


def test_naflex_has_a_budget_of_patches(tmp_path: Path) -> None:
    values = {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": 729, "patch_size": 16}
    spec = read(tmp_path, values, {"vision_config": {"patch_size": 16}})
    assert spec.geometry == MaxPatches(max_num_patches=729) and spec.channels_last


def test_a_folder_without_a_processor_has_none(tmp_path: Path) -> None:
    assert read_image_processor(tmp_path, {}) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"image_processor_type": "DonutImageProcessor"},
            "supported: BlipImageProcessor, CLIPImageProcessor",
        ),
        ({"do_align_long_axis": True}, "do_align_long_axis, which CLIPImageProcessor is not known to read"),
        ({"do_pad": True}, "do_pad = True"),
        ({"crop_size": {"height": 336, "width": 336}}, "224, as image_size of the vision tower"),
        ({"do_center_crop": False}, "because do_center_crop is false"),
        ({"size": {"longest_edge": 224}}, "height and width, or with shortest_edge"),
        ({"size": {"shortest_edge": -1}}, "size.shortest_edge = -1"),
        ({"resample": 9}, "a filter of Pillow, 0 to 5"),
        ({"image_std": [0, 0, 0]}, "numbers other than 0"),
        ({"image_mean": [0.5]}, "three numbers"),
        ({"do_resize": "yes"}, "true or false"),
        ({"resample": None}, "resample = None, which is not supported; it has to be a filter of Pillow"),
        (
            {"image_processor_type": "ViTImageProcessor", "size": 224, "default_to_square": None},
            "{'shortest_edge': 224}",
        ),
        (
            {"image_processor_type": "Gemma3ImageProcessor", "size": 224, "do_center_crop": True},
            "do_center_crop = True",
        ),
        ({"crop_size": 224, "size": 99999, "do_center_crop": False}, "because do_center_crop is false"),
    ],
)
def test_a_value_that_would_be_read_otherwise_is_refused_by_name(
    tmp_path: Path, values: Json, words: str
) -> None:
    message = refused(tmp_path, {"image_processor_type": "CLIPImageProcessor", **values}, CLIP_VISION)
    assert words in message


def test_sizes_that_the_tower_does_not_have_are_refused(tmp_path: Path) -> None:
    values = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}
    for vision in ({"patch_size": 16}, {"spatial_merge_size": 3}, {"temporal_patch_size": 1}):
        assert "of the vision tower in config.json" in refused(tmp_path, values, {"vision_config": vision})
