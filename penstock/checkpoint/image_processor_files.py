"""Reads the files of an image processor into an `ImageProcessorSpec`.

The files are `processor_config.json` or `preprocessor_config.json`, and `config.json` for the sizes of the
vision tower. Defaults are those of the processor class in transformers. Keys that are neither used nor listed
as harmless are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.files import mapping, optional_json, shown
from penstock.checkpoint.image_processor import (
    Channels,
    FixedSize,
    Geometry,
    ImageProcessorSpec,
    MaxPatches,
    PixelRange,
    Size,
    SoftTokens,
    Tiles,
)
from penstock.checkpoint.image_processor_keys import MAX_SIDE, ProcessorKeys
from penstock.errors import ModelLoadError

NEAREST, LANCZOS, BILINEAR, BICUBIC = 0, 1, 2, 3
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
_EDGES = {"shortest_edge", "longest_edge"}
# Keys without effect here: names of classes, forms of the output, how batches are grouped. Images are
# always converted to RGB, because every tower reads three channels.
_HARMLESS = """
auto_map data_format default_to_square device disable_grouping do_convert_rgb feature_extractor_type
image_processor_type input_data_format model_input_names processor_class return_row_col_info
return_tensors use_fast _valid_processor_keys _valid_kwargs_names
"""


def read_image_processor(folder: Path, config: Mapping[str, Any]) -> ImageProcessorSpec | None:
    """The image processor of the model in `folder`; None if its files have none."""
    file, values, processor = _processor_values(folder)
    if values is None:
        return None
    name = values.get("image_processor_type") or values.get("feature_extractor_type")
    kind = _KINDS.get(_class_name(str(name)))
    if kind is None:
        raise ModelLoadError(
            f"{file} has image_processor_type = {shown(name)}, which is not supported; supported: "
            f"{', '.join(_KINDS)}",
            param="model",
        )
    config_file = folder / "config.json"
    model = mapping(config, "vlm_config", file=config_file) or config
    vision = mapping(model, "vision_config", file=config_file) or model
    keys = ProcessorKeys(values, file, vision, model, processor)
    spec = kind.read(keys, kind)
    given = {key for key, value in values.items() if value is not None}
    if unknown := sorted(given - keys.taken - set(_HARMLESS.split())):
        raise ModelLoadError(
            f"{file} has {', '.join(unknown)}, which {_class_name(str(name))} is not known to read; "
            "delete what does not matter",
            param="model",
        )
    return spec


def _processor_values(folder: Path) -> tuple[Path, Mapping[str, Any] | None, Mapping[str, Any]]:
    """The keys of the image processor and of the processor around it. Newer files nest the former."""
    around = folder / "processor_config.json"
    processor = optional_json(around)
    if nested := mapping(processor, "image_processor", file=around):
        return around, nested, processor
    file = folder / "preprocessor_config.json"
    return file, optional_json(file) or None, processor


def _class_name(name: str) -> str:
    """The class name without the suffix of its backend; old names are replaced by current ones."""
    name = name.removesuffix("Fast").removesuffix("Pil")
    if name.endswith("FeatureExtractor"):
        name = name.removesuffix("FeatureExtractor") + "ImageProcessor"
    return _ALIASES.get(name, name)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One processor class: what reads its keys, and its defaults."""

    read: Callable[[ProcessorKeys, _Kind], ImageProcessorSpec]
    resample: int
    mean: Channels
    std: Channels
    size: Mapping[str, int] = field(default_factory=dict)
    is_square: bool = True  # one number as size means a square
    crop: int | None = None
    can_crop: bool = True  # otherwise the class ignores do_center_crop
    is_normalized: bool = True


def _spec(
    keys: ProcessorKeys,
    kind: _Kind,
    geometry: Geometry,
    patch_size: int,
    *,
    channels_last: bool = False,
    tokens_per_tile: int | None = None,
) -> ImageProcessorSpec:
    """Build the spec, with the options of all kinds: filter, rescaling and normalisation."""
    resample = keys.take("resample", kind.resample)
    if "resample" in keys.values and keys.values["resample"] is None:  # transformers fails, or takes any
        raise keys.refuse("resample", None, "a filter of Pillow, 0 to 5")
    if resample not in range(6):
        raise keys.refuse("resample", resample, "a filter of Pillow, 0 to 5")
    factor = keys.number("rescale_factor", 1 / 255)
    mean, std = keys.channels("image_mean", kind.mean), keys.channels("image_std", kind.std)
    if not keys.flag("do_normalize", kind.is_normalized):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    if 0 in std:
        raise keys.refuse("image_std", std, "numbers other than 0")
    return ImageProcessorSpec(
        geometry=geometry,
        patch_size=patch_size,
        channels_last=channels_last,
        resample=int(resample),
        rescale_factor=factor if keys.flag("do_rescale", True) else 1.0,
        mean=mean,
        std=std,
        tokens_per_tile=tokens_per_tile,
    )


def _read_fixed(keys: ProcessorKeys, kind: _Kind) -> ImageProcessorSpec:
    for step in ("do_pad", "do_pan_and_scan", "do_flip_channel_order"):
        keys.off(step)
    for key in ("pad_size", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"):
        keys.take(key)
    keys.take("pan_and_scan_min_ratio_to_activate")
    patch_size = keys.tower_patch_size()
    geometry = _fixed_geometry(keys, kind)
    tower = keys.vision.get("image_size")
    sides = tuple(tower) if isinstance(tower, list | tuple) else (tower, tower)
    if tower is not None and sides != geometry.size:
        given = "crop_size" if geometry.is_cropped else "size"
        raise keys.refuse(given, geometry.size, f"{shown(tower)}, as image_size of the vision tower")
    grid = (geometry.size[0] // patch_size) * (geometry.size[1] // patch_size)
    return _spec(keys, kind, geometry, patch_size, tokens_per_tile=_fixed_tokens(keys, grid))


def _fixed_geometry(keys: ProcessorKeys, kind: _Kind) -> FixedSize:
    size = keys.size("size", kind.size, is_square=keys.flag("default_to_square", kind.is_square))
    crop = keys.size("crop_size", _square(kind.crop or 224), is_square=True)
    resize, edge = _height_width(size), size.get("shortest_edge")
    if set(size) not in ({"height", "width"}, {"shortest_edge"}):
        raise keys.refuse("size", size, "an object with height and width, or with shortest_edge")
    if not keys.flag("do_resize", True):
        resize = edge = None
    if not kind.can_crop:
        keys.off("do_center_crop")
    if keys.flag("do_center_crop", kind.crop is not None):
        if (cropped := _height_width(crop)) is None:
            raise keys.refuse("crop_size", crop, "an object with height and width")
        return FixedSize(size=_bounded(keys, cropped), resize=resize, shortest_edge=edge, is_cropped=True)
    if resize is not None:
        return FixedSize(size=_bounded(keys, resize), resize=resize)
    tower = keys.vision.get("image_size")
    if edge is not None or not isinstance(tower, int):
        raise keys.refuse("size", size, "an object with height and width, because do_center_crop is false")
    return FixedSize(size=(tower, tower))  # images must already have the tower's size


def _fixed_tokens(keys: ProcessorKeys, num_patches: int) -> int:
    """Number of placeholders of one image. PaliGemma has one per patch; Gemma 3's tower pools its patches."""
    pooled = keys.model.get("mm_tokens_per_image")
    outer = keys.processor.get("image_seq_length") if pooled is not None else None
    tokens = keys.take("image_seq_length", outer)
    has_placeholder = any(
        keys.model.get(name) is not None for name in ("image_token_index", "image_token_id")
    )
    expected = pooled if pooled is not None else num_patches
    if tokens is None:
        return int(expected) if has_placeholder else 0
    if tokens != expected:
        raise keys.refuse("image_seq_length", tokens, f"{expected}, the tokens that the vision tower gives")
    return int(tokens)


def _read_max_patches(keys: ProcessorKeys, kind: _Kind) -> ImageProcessorSpec:
    keys.take("size")
    patch_size = keys.agrees("patch_size", keys.integer("patch_size", 16), "patch_size")
    geometry = MaxPatches(
        max_num_patches=keys.integer("max_num_patches", 256, high=1 << 20),
        is_resized=keys.flag("do_resize", True),
    )
    return _spec(keys, kind, geometry, patch_size, channels_last=True, tokens_per_tile=0)


def _read_pixel_range(keys: ProcessorKeys, kind: _Kind) -> ImageProcessorSpec:
    size = keys.size("size", kind.size, is_square=False)
    low = keys.take("min_pixels", size.get("shortest_edge", size.get("min_pixels")))
    high = keys.take("max_pixels", size.get("longest_edge", size.get("max_pixels")))
    if set(size) - _EDGES - {"min_pixels", "max_pixels"}:
        raise keys.refuse("size", size, "an object with shortest_edge and longest_edge")
    if not isinstance(low, int) or not isinstance(high, int) or not 1 <= low <= high <= MAX_SIDE**2:
        raise keys.refuse(
            "size", (low, high), f"pixels of the smallest and largest image, 1 to {MAX_SIDE**2:,}"
        )
    merge = keys.agrees("merge_size", keys.integer("merge_size", 2), "spatial_merge_size")
    frames = keys.integer("temporal_patch_size", 2)
    geometry = PixelRange(
        min_pixels=low,
        max_pixels=high,
        merge_size=merge,
        temporal_patch_size=keys.agrees("temporal_patch_size", frames, "temporal_patch_size"),
        is_resized=keys.flag("do_resize", True),
    )
    patch_size = keys.agrees("patch_size", keys.integer("patch_size", 14), "patch_size")
    return _spec(keys, kind, geometry, patch_size)


def _read_soft_tokens(keys: ProcessorKeys, kind: _Kind) -> ImageProcessorSpec:
    for key in ("size", "image_seq_length"):  # the number of tokens follows from the image
        keys.take(key)
    tokens = keys.integer("max_soft_tokens", 280)
    if tokens not in _SOFT_TOKENS:
        raise keys.refuse("max_soft_tokens", tokens, ", ".join(map(str, _SOFT_TOKENS)))
    kernel = keys.integer("pooling_kernel_size", 3)
    geometry = SoftTokens(
        max_soft_tokens=tokens,
        pooling_kernel_size=keys.agrees("pooling_kernel_size", kernel, "pooling_kernel_size"),
        is_resized=keys.flag("do_resize", True),
    )
    patch_size = keys.agrees("patch_size", keys.integer("patch_size", 16), "patch_size")
    return _spec(keys, kind, geometry, patch_size, channels_last=True)


def _read_tiles(keys: ProcessorKeys, kind: _Kind) -> ImageProcessorSpec:
    for key in ("do_pad", "pad_size", "video_sampling"):  # all tiles have the same size
        keys.take(key)
    size = keys.size("size", kind.size, is_square=True)
    tile = keys.size("max_image_size", {"longest_edge": 364}, is_square=True)
    if set(size) != {"longest_edge"} or set(tile) != {"longest_edge"}:
        raise keys.refuse("size", size, "an object with longest_edge, as max_image_size")
    patch_size, tile_size = keys.tower_patch_size(), tile["longest_edge"]
    keys.agrees("max_image_size", tile_size, "image_size")
    if not keys.flag("do_resize", True):
        raise keys.refuse("do_resize", False, "true, because the number of tiles follows from the size")
    geometry = Tiles(
        longest_edge=size["longest_edge"],
        tile_size=tile_size,
        is_split=keys.flag("do_image_splitting", True),
    )
    shuffle = int(keys.model.get("pixel_shuffle_factor", keys.model.get("scale_factor", 1)))
    tokens = (tile_size // patch_size) ** 2 // shuffle**2
    stated = keys.processor.get("image_seq_len")
    if stated not in (None, tokens):
        raise keys.refuse("image_seq_len", stated, f"{tokens}, the tokens that the vision tower gives a tile")
    return _spec(keys, kind, geometry, patch_size, tokens_per_tile=tokens)


def _height_width(size: Mapping[str, int]) -> Size | None:
    return (size["height"], size["width"]) if set(size) == {"height", "width"} else None


def _bounded(keys: ProcessorKeys, size: Size) -> Size:
    if max(size) > MAX_SIDE:
        raise keys.refuse("size", size, f"at most {MAX_SIDE:,}")
    return size


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_ALIASES = {
    "Qwen2_5_VLImageProcessor": "Qwen2VLImageProcessor",
    "Qwen3VLImageProcessor": "Qwen2VLImageProcessor",
}
_QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_TILED = _Kind(_read_tiles, LANCZOS, _HALF, _HALF, {"longest_edge": 4 * 364})
_KINDS = {
    "BlipImageProcessor": _Kind(_read_fixed, BICUBIC, _CLIP_MEAN, _CLIP_STD, _square(384)),
    "CLIPImageProcessor": _Kind(
        _read_fixed, BICUBIC, _CLIP_MEAN, _CLIP_STD, {"shortest_edge": 224}, is_square=False, crop=224
    ),
    "Gemma3ImageProcessor": _Kind(_read_fixed, BILINEAR, _HALF, _HALF, _square(224), can_crop=False),
    "Gemma4ImageProcessor": _Kind(
        _read_soft_tokens, BICUBIC, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), is_normalized=False
    ),
    "Idefics3ImageProcessor": _TILED,
    "Qwen2VLImageProcessor": _Kind(_read_pixel_range, BICUBIC, _CLIP_MEAN, _CLIP_STD, _QWEN_SIZE),
    "SiglipImageProcessor": _Kind(_read_fixed, BICUBIC, _HALF, _HALF, _square(224), is_square=False),
    "Siglip2ImageProcessor": _Kind(_read_max_patches, BILINEAR, _HALF, _HALF),
    "SmolVLMImageProcessor": _TILED,
    "ViTImageProcessor": _Kind(_read_fixed, BILINEAR, _HALF, _HALF, _square(224)),
}
