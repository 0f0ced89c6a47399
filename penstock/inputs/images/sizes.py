"""The sizes to which each kind of image processor resizes an image. Sizes are (height, width).

The arithmetic follows the processors in transformers, including floating-point steps, because a difference of
one pixel changes every value.
"""

from __future__ import annotations

import math

from penstock.checkpoint.image_processor import MAX_SPLIT_EDGE, Size
from penstock.errors import BadValue

MAX_ASPECT_RATIO = 200  # for processors with a range of pixels
MAX_RESIZED_PIXELS = 64 << 20  # limit for resizing a whole image before it is cropped


def with_shortest_edge(size: Size, edge: int) -> Size:
    """Give the shorter edge this length, and keep the aspect ratio."""
    height, width = size
    short, long = min(size), max(size)
    scaled = int(edge * long / short)
    return (scaled, edge) if width <= height else (edge, scaled)


def within_pixels(
    size: Size, factor: int, min_pixels: int, max_pixels: int, *, sides_have_a_token: bool = False
) -> Size:
    """Make the sides multiples of `factor`, with an area within the range if possible.

    A side shorter than half the factor is first rounded to 0, as in transformers, or to `factor`, as in
    qwen-vl-utils (`sides_have_a_token`)."""
    height, width = size
    if max(size) / min(size) > MAX_ASPECT_RATIO:
        raise BadValue(
            f"an image has {width:,} × {height:,} pixels; one side may be at most {MAX_ASPECT_RATIO} times "
            "as long as the other"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if sides_have_a_token:
        new_height, new_width = max(factor, new_height), max(factor, new_width)
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def within_patches(size: Size, patch_size: int, max_patches: int) -> Size:
    """The largest size in whole patches with about the same aspect ratio and at most `max_patches`."""

    def scaled(scale: float) -> Size:
        height, width = (max(patch_size, math.ceil(side * scale / patch_size) * patch_size) for side in size)
        return height, width

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        height, width = scaled(middle)
        if (height / patch_size) * (width / patch_size) <= max_patches:
            low = middle
        else:
            high = middle
    return scaled(low)


def within_tokens(size: Size, side: int, max_tokens: int) -> Size:
    """The largest size in whole tokens of `side` pixels, with at most `max_tokens`."""
    height, width = size
    max_pixels = max_tokens * side * side
    grow = math.sqrt(max_pixels / (height * width))
    new_height, new_width = (math.floor(grow * edge / side) * side for edge in size)
    if not new_height and not new_width:
        raise BadValue(f"an image has {width:,} × {height:,} pixels, which fill no token of the model")
    if not new_height:
        new_height, new_width = side, min(width // height * side, max_tokens * side)
    elif not new_width:
        new_height, new_width = min(height // width * side, max_tokens * side), side
    if new_height * new_width > max_pixels:
        raise BadValue(
            f"an image has {width:,} × {height:,} pixels, which make more than {max_tokens} tokens"
        )
    return new_height, new_width


def with_longest_edge(size: Size, edge: int) -> Size:
    """Give the longer edge this length, or the maximum for an image that is split into tiles."""
    height, width = size
    ratio = width / height
    if width >= height:
        height, width = _even(int(edge / ratio)), edge
    else:
        height, width = edge, _even(int(edge * ratio))
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_SPLIT_EDGE:
        height, width = int(MAX_SPLIT_EDGE / ratio), MAX_SPLIT_EDGE
    elif height > width and height > MAX_SPLIT_EDGE:
        height, width = MAX_SPLIT_EDGE, int(MAX_SPLIT_EDGE * ratio)
    return max(height, 1), max(width, 1)


def whole_tiles(size: Size, tile: int) -> Size:
    """Round both sides up to multiples of the tile, the longer one first."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


def _even(length: int) -> int:
    return length + length % 2
