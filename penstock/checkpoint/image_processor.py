"""What a model's files say about preparing images: `ImageProcessorSpec`.

Reads `preprocessor_config.json` or `processor_config.json`, and the sizes of the vision tower in `config.json`.
Defaults are those of the processor class in transformers. A key that is neither used nor known to be harmless
is refused. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

Size = tuple[int, int]  # height, width


class FixedSize(msgspec.Struct, frozen=True, tag="fixed"):
    """Every image gets the same size: CLIP, SigLIP, PaliGemma, ViT, BLIP, Gemma 3."""

    resize: Size | None = None  # to this size, whatever the aspect ratio
    shortest_edge: int | None = None  # or so that the shorter edge has this length
    crop: Size | None = None  # then the centre is cut out, with black borders where it is too small

    @property
    def size(self) -> Size:
        """Of every prepared image."""
        size = self.crop or self.resize
        assert size is not None  # `read_image_processor` refuses anything else
        return size


class MaxPatches(msgspec.Struct, frozen=True, tag="max_patches"):
    """As many patches as a budget allows, in the image's own aspect ratio: SigLIP 2 NaFlex."""

    max_num_patches: int


class PixelRange(msgspec.Struct, frozen=True, tag="pixel_range"):
    """Sides are multiples of the merged patch; the area lies between two bounds: Qwen2-VL and later."""

    min_pixels: int
    max_pixels: int
    merge_size: int  # patches of one token, down and across; they are neighbours in the order of patches
    temporal_patch_size: int  # frames of one patch; an image fills all of them, and is sent once
    is_resized: bool = True


class SoftTokens(msgspec.Struct, frozen=True, tag="soft_tokens"):
    """As many pooled tokens as a budget allows: Gemma 4's tower, which EmbeddingGemma 2 has."""

    max_soft_tokens: int
    pooling_kernel_size: int  # patches of one token, down and across
    is_resized: bool = True


class Tiles(msgspec.Struct, frozen=True, tag="tiles"):
    """Square tiles of a large version of the image, then the whole image as one tile: Idefics 3, SmolVLM,
    ModernVBERT."""

    longest_edge: int | None  # of the large version; None: the image's own size
    tile_size: int
    is_split: bool = True  # otherwise the whole image is the only tile


Geometry = FixedSize | MaxPatches | PixelRange | SoftTokens | Tiles


class ImageProcessorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How images become arrays of patches. Processed values are (value · rescale_factor − mean) / std."""

    geometry: Geometry
    patch_size: int
    channels_last: bool = False  # values of a patch are (row, column, channel), not (channel, row, column)
    resample: int  # Pillow's number of the filter
    rescale_factor: float = 1 / 255  # 1: values stay 0 to 255
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    tokens_per_tile: int | None = None  # placeholders, where each tile has the same number; 0: none at all

    @property
    def values_per_patch(self) -> int:
        return 3 * self.patch_size**2


def read_image_processor(folder: Path, config: Mapping[str, Any]) -> ImageProcessorSpec | None:
    """The image processor of the model in `folder`; None if its files have none."""
    raise NotImplementedError
