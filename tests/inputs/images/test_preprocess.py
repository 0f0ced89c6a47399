"""Prepared images against transformers' image processors, for every kind and unusual sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.checkpoint.image_processor_files import read_image_processor
from penstock.errors import BadValue
from penstock.inputs.images.preprocess import prepare
from penstock.types import PreparedImage
from tests.inputs.images.pictures import noise, photo

Floats = NDArray[np.float64]


class Kind(NamedTuple):
    name: str  # name of the class in transformers
    options: dict[str, Any]
    config: dict[str, Any]  # config.json
    unpack: Callable[[Any, ImageProcessorSpec, PreparedImage], Floats]  # reference's values → patches


def _conv_patches(pixels: Any, spec: ImageProcessorSpec) -> Floats:
    """[channels, height, width] → [patches, channels · side²], in the order of a strided convolution."""
    side, (channels, height, width) = spec.patch_size, pixels.shape
    rows, columns = height // side, width // side
    cut = pixels[:, : rows * side, : columns * side].reshape(channels, rows, side, columns, side)
    patches: Floats = cut.transpose(1, 3, 0, 2, 4).reshape(rows * columns, -1)
    return patches


def _one(out: Any, spec: ImageProcessorSpec, _: PreparedImage) -> Floats:
    return _conv_patches(np.asarray(out["pixel_values"])[0], spec)


def _tiled(out: Any, spec: ImageProcessorSpec, ours: PreparedImage) -> Floats:
    tiles = np.asarray(out["pixel_values"])[0]
    assert len(tiles) == ours.num_tiles
    assert (out["rows"][0][0], out["cols"][0][0]) == ours.split
    return np.concatenate([_conv_patches(tile, spec) for tile in tiles])


def _naflex(out: Any, _: ImageProcessorSpec, ours: PreparedImage) -> Floats:
    assert tuple(np.asarray(out["spatial_shapes"])[0]) == ours.grid
    patches: Floats = np.asarray(out["pixel_values"])[0][: len(ours.patches)]
    assert np.asarray(out["pixel_attention_mask"])[0].sum() == len(ours.patches)
    return patches


def _qwen(out: Any, spec: ImageProcessorSpec, ours: PreparedImage) -> Floats:
    """Both frames of a patch are the same image, so only the first is compared."""
    assert tuple(np.asarray(out["image_grid_thw"])[0]) == (1, *ours.grid)
    frames = np.asarray(out["pixel_values"]).reshape(
        len(ours.patches), 3, 2, spec.patch_size, spec.patch_size
    )
    assert np.array_equal(frames[:, :, 0], frames[:, :, 1])
    patches: Floats = frames[:, :, 0].reshape(len(ours.patches), -1)
    return patches


def _gemma4(out: Any, _: ImageProcessorSpec, ours: PreparedImage) -> Floats:
    assert int(out["num_soft_tokens_per_image"][0]) == ours.num_tokens
    patches: Floats = np.asarray(out["pixel_values"])[0][: len(ours.patches)]
    positions = np.asarray(out["image_position_ids"])[0][: len(ours.patches)]
    assert tuple(positions[-1] + 1) == ours.grid[::-1]
    return patches


def _vision(
    patch_size: int, image_size: int | None = None, kind: str = "siglip_vision_model"
) -> dict[str, Any]:
    sizes = {} if image_size is None else {"image_size": image_size}
    return {"vision_config": {"model_type": kind, "patch_size": patch_size, **sizes}}


SQUARE = {"height": 70, "width": 70}
KINDS = {
    "clip": Kind("CLIPImageProcessor", {}, _vision(32, 224, "clip_vision_model"), _one),
    "clip without resizing": Kind(
        "CLIPImageProcessor", {"do_resize": False}, _vision(32, 224, "clip_vision_model"), _one
    ),
    "clip, steps of null": Kind(
        "CLIPImageProcessor",
        {"do_center_crop": None, "do_normalize": None, "size": SQUARE},
        _vision(14, 70, "clip_vision_model"),
        _one,
    ),
    "siglip": Kind("SiglipImageProcessor", {"size": {"height": 100, "width": 100}}, _vision(14, 100), _one),
    "siglip, plain values": Kind(
        "SiglipImageProcessor",
        {"do_rescale": False, "do_normalize": False, "size": SQUARE},
        _vision(14, 70),
        _one,
    ),
    "vit": Kind("ViTImageProcessor", {"size": SQUARE}, {"patch_size": 14, "image_size": 70}, _one),
    "blip": Kind("BlipImageProcessor", {}, _vision(16, 384, "blip_vision_model"), _one),
    "gemma 3": Kind("Gemma3ImageProcessor", {"size": SQUARE}, _vision(14, 70), _one),
    "siglip 2 naflex": Kind("Siglip2ImageProcessor", {"max_num_patches": 64}, _vision(16), _naflex),
    "qwen2-vl": Kind("Qwen2VLImageProcessor", {"max_pixels": 200_000}, _vision(14), _qwen),
    "qwen3-vl": Kind(
        "Qwen2VLImageProcessor",
        {
            "patch_size": 16,
            "size": {"shortest_edge": 65536, "longest_edge": 200_000},
            "image_mean": [0.5] * 3,
        },
        _vision(16),
        _qwen,
    ),
    "gemma 4": Kind("Gemma4ImageProcessor", {"max_soft_tokens": 70}, _vision(16), _gemma4),
    "idefics 3, splitting of null": Kind(
        "Idefics3ImageProcessor",
        {"do_image_splitting": None, "max_image_size": {"longest_edge": 128}, "return_row_col_info": True},
        _vision(16, 128) | {"scale_factor": 4},
        _tiled,
    ),
    "idefics 3": Kind(
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 360}, "max_image_size": {"longest_edge": 120}, "return_row_col_info": True},
        _vision(12, 120) | {"scale_factor": 2},
        _tiled,
    ),
    "smolvlm, not split": Kind(
        "SmolVLMImageProcessor",
        {"do_image_splitting": False, "max_image_size": {"longest_edge": 128}, "return_row_col_info": True},
        _vision(16, 128) | {"scale_factor": 4},
        _tiled,
    ),
}
PICTURES: dict[str, Callable[[], Image.Image]] = {
    "photograph": lambda: photo("astronaut.png"),
    "wide photograph": lambda: photo("rocket.jpg"),
    "one pixel": lambda: noise(1, 1),
    "odd": lambda: noise(37, 53),
    "very wide": lambda: noise(900, 7),
    "very tall": lambda: noise(5, 640),
    "two tiles": lambda: noise(100, 60),
}


def reference(kind: Kind, image: Image.Image) -> Any:
    import transformers

    processor = getattr(transformers, kind.name + "Pil")(**kind.options)
    return processor(image, return_tensors="np")


def spec_of(kind: Kind, folder: Path) -> ImageProcessorSpec:
    """The spec that Penstock reads from the file written by transformers."""
    import transformers

    getattr(transformers, kind.name + "Pil")(**kind.options).save_pretrained(folder)
    spec = read_image_processor(folder, kind.config)
    assert spec is not None
    return spec


def normalized(ours: PreparedImage, spec: ImageProcessorSpec) -> Floats:
    """The patches after the engine's normalisation on the device."""
    side = spec.patch_size
    shape = (-1, side, side, 3) if spec.channels_last else (-1, 3, side, side)
    channel = (3,) if spec.channels_last else (3, 1, 1)
    values = ours.patches.reshape(shape).astype(np.float64) * spec.rescale_factor
    values = (values - np.reshape(spec.mean, channel)) / np.reshape(spec.std, channel)
    return values.reshape(len(ours.patches), -1)


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("name", KINDS)
def test_patches_equal_the_reference(name: str, picture: str, tmp_path: Path) -> None:
    kind, image = KINDS[name], PICTURES[picture]().convert("RGB")
    spec = spec_of(kind, tmp_path)
    try:
        expected_values = reference(kind, image)
    except ValueError:  # the processor refuses this aspect ratio
        with pytest.raises(BadValue, match="pixels"):
            prepare(image, spec)
        return
    ours = prepare(image, spec)
    expected = kind.unpack(expected_values, spec, ours)
    tolerance = spec.rescale_factor / min(spec.std)  # one of 255 steps
    assert (
        ours.patches.shape == expected.shape == (ours.num_tiles * np.prod(ours.grid), spec.values_per_patch)
    )
    assert len(ours.patches) <= spec.max_patches
    assert np.abs(normalized(ours, spec) - expected).max() <= tolerance * 1e-3


def test_the_digest_tells_images_and_geometries_apart(tmp_path: Path) -> None:
    spec = spec_of(KINDS["qwen2-vl"], tmp_path)
    first, again, other = (
        prepare(noise(56, 112), spec),
        prepare(noise(56, 112), spec),
        prepare(noise(112, 56), spec),
    )
    assert first.digest == again.digest != other.digest
    black = [prepare(Image.new("RGB", size), spec) for size in ((56, 112), (112, 56))]
    assert len(black[0].patches) == len(black[1].patches)
    assert black[0].digest != black[1].digest


def test_a_long_thin_image_is_cropped_without_resizing_all_of_it(tmp_path: Path) -> None:
    """Resizing its shorter edge would give 224 × 4.5 million pixels."""
    spec = spec_of(KINDS["clip"], tmp_path)
    thin = noise(20_000, 1)
    ours = prepare(thin, spec)
    middle = thin.crop((9_990, 0, 10_010, 1))
    assert ours.grid == (7, 7)
    near = prepare(middle, spec)  # resized whole; has the same middle as the long image
    difference = np.abs(ours.patches.astype(int) - near.patches.astype(int))
    assert difference.max() <= 1


def test_an_image_of_another_size_is_refused_where_the_processor_does_not_resize(tmp_path: Path) -> None:
    kind = KINDS["siglip"]._replace(options={"do_resize": False})
    spec = spec_of(kind, tmp_path)
    assert prepare(noise(100, 100), spec).grid == (7, 7)
    with pytest.raises(BadValue, match="does not resize; send images of 100 × 100"):
        prepare(noise(100, 99), spec)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert saved["do_resize"] is False


def test_an_image_with_more_patches_than_the_budget_is_refused_where_nothing_resizes(tmp_path: Path) -> None:
    kind = KINDS["siglip 2 naflex"]
    spec = spec_of(kind._replace(options=kind.options | {"do_resize": False}), tmp_path)
    assert prepare(noise(128, 128), spec).grid == (8, 8)
    with pytest.raises(BadValue, match=r"72 patches, .* at most 64 patches of 16 × 16"):
        prepare(noise(144, 128), spec)
