"""How a model prepares images: `ImageProcessorSpec`, with one geometry class for each kind of processor.

`image_processor_files.py` reads it. Free of torch.
"""

from __future__ import annotations

import msgspec

Size = tuple[int, int]  # height, width
Channels = tuple[float, float, float]  # red, green, blue


class FixedSize(msgspec.Struct, frozen=True, tag="fixed"):
    """Every image gets the same size: CLIP, SigLIP, PaliGemma, ViT, BLIP, Gemma 3."""

    size: Size  # size of every prepared image
    resize: Size | None = None  # an image is resized to this, whatever its aspect ratio
    shortest_edge: int | None = None  # or: it is resized so that its shorter edge has this length
    is_cropped: bool = False  # then crop the centre, with black borders if it is too small


class MaxPatches(msgspec.Struct, frozen=True, tag="max_patches"):
    """As many patches as a budget allows, in the image's own aspect ratio: SigLIP 2 NaFlex."""

    max_num_patches: int
    is_resized: bool = True


class PixelRange(msgspec.Struct, frozen=True, tag="pixel_range"):
    """Sides are multiples of the merged patch; the area lies between two bounds: Qwen2-VL and later."""

    min_pixels: int
    max_pixels: int
    merge_size: int  # patches per token, down and across; they are adjacent in patch order
    temporal_patch_size: int  # frames per patch; an image is repeated in all of them, but sent once
    is_resized: bool = True
    sides_have_a_token: bool = False  # round each side up to one token before the area is checked
    first_range: tuple[int, int] | None = None  # (min, max) pixels that an image is resized to first


class SoftTokens(msgspec.Struct, frozen=True, tag="soft_tokens"):
    """As many pooled tokens as a budget allows: Gemma 4's tower, which EmbeddingGemma 2 has."""

    max_soft_tokens: int
    pooling_kernel_size: int  # patches per token, down and across
    is_resized: bool = True


class Tiles(msgspec.Struct, frozen=True, tag="tiles"):
    """Square tiles of a large version of the image, then the whole image as one tile: Idefics 3, SmolVLM,
    ModernVBERT."""

    longest_edge: int  # longest edge of the large version
    tile_size: int
    is_split: bool = True  # otherwise the whole image is the only tile


Geometry = FixedSize | MaxPatches | PixelRange | SoftTokens | Tiles


class ImageProcessorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How images become arrays of patches. Processed values are (value · rescale_factor − mean) / std."""

    geometry: Geometry
    patch_size: int
    channels_last: bool = False  # values of a patch are (row, column, channel), not (channel, row, column)
    resample: int  # number of the filter in Pillow
    rescale_factor: float = 1 / 255  # 1: values stay 0 to 255
    mean: Channels = (0.0, 0.0, 0.0)
    std: Channels = (1.0, 1.0, 1.0)
    tokens_per_tile: int | None = None  # placeholders per tile; 0: none; None: depends on the image size

    @property
    def values_per_patch(self) -> int:
        return 3 * self.patch_size**2

    @property
    def max_patches(self) -> int:
        """Maximum number of patches of one image."""
        geometry = self.geometry
        if isinstance(geometry, FixedSize):
            return (geometry.size[0] // self.patch_size) * (geometry.size[1] // self.patch_size)
        if isinstance(geometry, MaxPatches):
            return geometry.max_num_patches
        if isinstance(geometry, PixelRange):
            return max(geometry.max_pixels // self.patch_size**2, geometry.merge_size**2)
        if isinstance(geometry, SoftTokens):
            return geometry.max_soft_tokens * geometry.pooling_kernel_size**2
        return self.max_tiles * (geometry.tile_size // self.patch_size) ** 2

    @property
    def tile_patches(self) -> int:
        """Patches along each side of a tile, or of an image of medium size if sizes differ."""
        geometry = self.geometry
        if isinstance(geometry, FixedSize):
            return geometry.size[0] // self.patch_size
        if isinstance(geometry, Tiles):
            return geometry.tile_size // self.patch_size
        if isinstance(geometry, MaxPatches):
            return int(geometry.max_num_patches**0.5)
        return 24  # a multiple of every merge and pooling size

    @property
    def sizes_differ(self) -> bool:
        """Whether the number of tokens depends on the size of an image."""
        return isinstance(self.geometry, PixelRange | SoftTokens)

    def tokens_of(self, num_patches: int) -> int:
        """Number of tokens of a tile with `num_patches` patches."""
        if isinstance(self.geometry, PixelRange):
            return num_patches // self.geometry.merge_size**2
        if isinstance(self.geometry, SoftTokens):
            return num_patches // self.geometry.pooling_kernel_size**2
        return self.tokens_per_tile or 0

    @property
    def max_tiles(self) -> int:
        if not isinstance(self.geometry, Tiles) or not self.geometry.is_split:
            return 1
        edge = min(self.geometry.longest_edge, MAX_SPLIT_EDGE)
        tiles = -(-edge // self.geometry.tile_size)
        return tiles * tiles + 1


MAX_SPLIT_EDGE = 4096  # pixels; maximum edge of an image before it is split into tiles
