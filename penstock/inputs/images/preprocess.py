"""Resizes an RGB image and cuts it into patches, as the model's image processor does.

Values stay 0 to 255, because the engine rescales and normalises them. So an image is sent between processes
with one byte per value.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penstock.checkpoint.image_processor import (
    FixedSize,
    ImageProcessorSpec,
    MaxPatches,
    PixelRange,
    Size,
    SoftTokens,
    Tiles,
)
from penstock.errors import BadValue
from penstock.inputs.images import sizes
from penstock.types import PreparedImage

Pixels = NDArray[np.uint8]  # [rows, columns, 3]


def prepare(image: Image.Image, spec: ImageProcessorSpec) -> PreparedImage:
    """Resize one RGB image and cut it into patches."""
    geometry = spec.geometry
    if isinstance(geometry, Tiles):
        tiles, split = _tiles(image, geometry, spec.resample)
    else:
        tiles, split = [np.asarray(_resized(image, spec))], (0, 0)
    merge = geometry.merge_size if isinstance(geometry, PixelRange) else 1
    height, width, _ = tiles[0].shape
    grid = height // spec.patch_size, width // spec.patch_size
    parts = [_patches(tile, grid, spec, merge) for tile in tiles]
    patches = parts[0] if len(parts) == 1 else np.concatenate(parts)
    patches.flags.writeable = False
    num_tokens = _num_tokens(spec, grid, len(tiles))
    return PreparedImage(
        patches=patches,
        grid=grid,
        num_tokens=num_tokens,
        digest=digest(patches, grid, num_tokens, split),
        num_tiles=len(tiles),
        split=split,
        num_pixels=image.width * image.height,
    )


def digest(patches: Pixels, grid: Size, num_tokens: int, split: Size) -> bytes:
    """Content identity of a prepared image: equal digests mean equal patches and geometry."""
    hashed = hashlib.blake2b(struct.pack("<7q", *patches.shape, *grid, num_tokens, *split), digest_size=16)
    hashed.update(np.ascontiguousarray(patches).data)
    return hashed.digest()


def _num_tokens(spec: ImageProcessorSpec, grid: Size, num_tiles: int) -> int:
    geometry, num_patches = spec.geometry, grid[0] * grid[1]
    if isinstance(geometry, PixelRange):
        return num_patches // geometry.merge_size**2
    if isinstance(geometry, SoftTokens):
        return num_patches // geometry.pooling_kernel_size**2
    return (spec.tokens_per_tile or 0) * num_tiles


def _resized(image: Image.Image, spec: ImageProcessorSpec) -> Image.Image:
    """The image in the size that the tower reads."""
    geometry, size = spec.geometry, (image.height, image.width)
    if isinstance(geometry, FixedSize):
        return _fixed(image, geometry, spec.resample)
    assert not isinstance(geometry, Tiles)
    side = spec.patch_size * _merged(spec)
    if not geometry.is_resized:
        if size[0] % side or size[1] % side:
            raise BadValue(
                f"an image has {_words(size)} pixels, and the model's processor does not resize; send images "
                f"whose sides are multiples of {side}"
            )
        _check_patches((size[0] // spec.patch_size) * (size[1] // spec.patch_size), spec)
        return image
    if isinstance(geometry, PixelRange):
        if geometry.first_range is not None:
            first = sizes.within_pixels(size, side, *geometry.first_range, sides_have_a_token=True)
            image, size = _resize(image, first, spec.resample), first
        limits = geometry.min_pixels, geometry.max_pixels
        size = sizes.within_pixels(size, side, *limits, sides_have_a_token=geometry.sides_have_a_token)
    elif isinstance(geometry, MaxPatches):
        size = sizes.within_patches(size, spec.patch_size, geometry.max_num_patches)
    else:
        size = sizes.within_tokens(size, side, geometry.max_soft_tokens)
    return _resize(image, size, spec.resample)


def _check_patches(count: int, spec: ImageProcessorSpec) -> None:
    """Refuse an image that is not resized and has more patches than the tower accepts."""
    if not isinstance(spec.geometry, PixelRange) and count > spec.max_patches:
        raise BadValue(
            f"an image has {count:,} patches, and the model's processor does not resize; send images of at "
            f"most {spec.max_patches:,} patches of {spec.patch_size} × {spec.patch_size} pixels"
        )


def _merged(spec: ImageProcessorSpec) -> int:
    """Patches per token, along each side."""
    if isinstance(spec.geometry, PixelRange):
        return spec.geometry.merge_size
    return spec.geometry.pooling_kernel_size if isinstance(spec.geometry, SoftTokens) else 1


def _fixed(image: Image.Image, geometry: FixedSize, resample: int) -> Image.Image:
    if geometry.resize is not None:
        image = _resize(image, geometry.resize, resample)
    elif geometry.shortest_edge is not None:
        size = sizes.with_shortest_edge((image.height, image.width), geometry.shortest_edge)
        if geometry.is_cropped:
            return _cropped_resize(image, size, geometry.size, resample)
        image = _resize(image, size, resample)
    if geometry.is_cropped:
        image = _center_crop(image, geometry.size)
    if (image.height, image.width) != geometry.size:
        raise BadValue(
            f"an image has {_words((image.height, image.width))} pixels, and the model's processor does not "
            f"resize; send images of {_words(geometry.size)}"
        )
    return image


def _resize(image: Image.Image, size: Size, resample: int) -> Image.Image:
    height, width = size
    return image.resize((width, height), resample=Image.Resampling(resample))


def _cropped_resize(image: Image.Image, size: Size, crop: Size, resample: int) -> Image.Image:
    """Resize, then crop the centre.

    If the resized image would be very long, only the part around the crop is resized, so that memory does not
    grow with the aspect ratio.
    """
    height, width = size
    if height * width <= sizes.MAX_RESIZED_PIXELS:
        return _center_crop(_resize(image, size, resample), crop)
    return _center_crop(_resize_middle(image, size, crop, resample), crop)


def _resize_middle(image: Image.Image, size: Size, crop: Size, resample: int) -> Image.Image:
    """The middle of the resized image, at least as large as `crop`, at the same subpixel positions."""
    scales = image.height / size[0], image.width / size[1]
    starts = [max(0, (full - part) // 2) for full, part in zip(size, crop, strict=True)]
    ends = [min(full, start + part) for full, start, part in zip(size, starts, crop, strict=True)]
    box = (starts[1] * scales[1], starts[0] * scales[0], ends[1] * scales[1], ends[0] * scales[0])
    middle = (ends[1] - starts[1], ends[0] - starts[0])
    return image.resize(middle, resample=Image.Resampling(resample), box=box)


def _center_crop(image: Image.Image, size: Size) -> Image.Image:
    """The centre of the image, with black borders where the image is smaller."""
    if size == (image.height, image.width):
        return image
    top, left = (image.height - size[0]) // 2, (image.width - size[1]) // 2
    return image.crop((left, top, left + size[1], top + size[0]))


def _tiles(image: Image.Image, geometry: Tiles, resample: int) -> tuple[list[Pixels], Size]:
    """The tiles of an image, and their number down and across. The last tile is the whole image."""
    side = geometry.tile_size
    size = sizes.with_longest_edge((image.height, image.width), geometry.longest_edge)
    image = _resize(image, size, resample)
    if not geometry.is_split:
        return [np.asarray(_resize(image, (side, side), resample))], (0, 0)
    size = sizes.whole_tiles(size, side)
    image = _resize(image, size, resample)
    rows, columns = size[0] // side, size[1] // side
    pixels = np.asarray(image)
    if rows == columns == 1:
        return [pixels], (0, 0)
    cut = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
    return [*cut, np.asarray(_resize(image, (side, side), resample))], (rows, columns)


def _patches(pixels: Pixels, grid: Size, spec: ImageProcessorSpec, merge: int) -> Pixels:
    """Cut into [patches, values of a patch]. Patches that are merged into one token are adjacent."""
    side, (rows, columns) = spec.patch_size, grid
    pixels = pixels[: rows * side, : columns * side]  # a convolution ignores incomplete patches
    cut = pixels.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
    order = (0, 3, 1, 4, 2, 5, 6) if spec.channels_last else (0, 3, 1, 4, 6, 2, 5)
    return np.ascontiguousarray(cut.transpose(order)).reshape(rows * columns, -1)


def _words(size: Size) -> str:
    return f"{size[1]:,} × {size[0]:,}"
