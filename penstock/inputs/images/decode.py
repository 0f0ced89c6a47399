"""Decodes image files, and converts images of Python callers, to upright RGB images.

Size and format are read from the header before anything is decoded, so the limits bound memory, whatever a
file claims. Broken files, other formats and animations are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from penstock.errors import BadValue

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ACCEPTED = "PNG, JPEG, WebP, GIF, BMP and TIFF"
MAX_IMAGE_PIXELS = 178_956_970  # Pillow opens no larger image
# The largest side, as in JPEG. Resizing a PNG of 49,000,000 × 1 takes a gigabyte only for its filter.
MAX_SIDE = 65_535
# Pixels of a JPEG times its scans. A progressive file can repeat a scan of a few bytes any number of times,
# and each pass decodes the whole image again.
MAX_SCANNED_PIXELS = 4_000_000_000
_MEGA = 1_000_000
# Exceptions that decoders raise for broken files.
_BROKEN = (OSError, ValueError, SyntaxError, IndexError, EOFError, KeyError, TypeError, OverflowError)
_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 1 << 20  # pixels converted at a time, to avoid a second copy of a large image


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one image."""

    max_bytes: int = 20 * _MEGA
    max_pixels: int = 50 * _MEGA

    def check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise BadValue(
                f"an image has {num_bytes:,} bytes; the server accepts {self.max_bytes:,} (--max-image-mb)"
            )

    def check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise BadValue(f"an image has {width} × {height} pixels; it needs at least one")
        if width * height > self.max_pixels:
            raise BadValue(
                f"an image has {width:,} × {height:,} pixels; the server accepts {self.max_pixels:,} "
                "(--max-image-pixels)"
            )
        if max(width, height) > MAX_SIDE:
            raise BadValue(
                f"an image has {width:,} × {height:,} pixels; a side may have at most {MAX_SIDE:,}"
            )


def decode(data: bytes, limits: ImageLimits) -> Image.Image:
    """Decode the bytes of a file to an RGB image, turned upright by its EXIF orientation."""
    return load(open_image(data, limits))


def open_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """Read the header of a file and check it; pixels are not decoded yet."""
    limits.check_bytes(len(data))
    if not data:
        raise BadValue("an image is empty: it has 0 bytes")
    if (canvas := _webp_canvas(data)) is not None:  # Pillow allocates the canvas when it opens a file
        limits.check_size(*canvas)
    try:
        opened = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadValue(f"an image is {_guess(data)}; accepted are {ACCEPTED}") from None
    except Image.DecompressionBombError:
        raise BadValue(
            f"an image has more pixels than the server accepts, {limits.max_pixels:,} (--max-image-pixels)"
        ) from None
    except _BROKEN as error:
        raise BadValue(f"an image cannot be read; its header is broken: {error}") from None
    limits.check_size(opened.width, opened.height)
    _refuse_animation(opened)
    if opened.format in ("JPEG", "MPO"):
        _check_scans(data, opened.width * opened.height)
    return opened


def load(opened: Image.Image) -> Image.Image:
    """Decode an image whose header has been checked, to RGB and upright."""
    try:
        opened.load()
        return to_rgb(_upright(opened))
    except Image.DecompressionBombError:
        raise BadValue("an image, once decompressed, is larger than the server accepts") from None
    except _BROKEN as error:
        raise BadValue(f"an image cannot be decoded; the file is cut off or broken: {error}") from None


def from_pillow(image: Image.Image, limits: ImageLimits) -> Image.Image:
    """Convert a caller's Pillow image to RGB, turned upright by its EXIF orientation."""
    limits.check_size(image.width, image.height)
    return load(image)


def from_array(pixels: NDArray[np.generic], limits: ImageLimits) -> Image.Image:
    """Convert an array of uint8 to an RGB image: [rows, columns], or [rows, columns, 1, 3 or 4]."""
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise BadValue(
            f"an image is an array of {pixels.dtype} with {pixels.ndim} axes; use uint8, [rows, columns, 3]"
        )
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if channels not in (1, 3, 4):
        raise BadValue(f"an image is an array with {channels} channels; use 1, 3 or 4, as the last axis")
    limits.check_size(pixels.shape[1], pixels.shape[0])
    return to_rgb(
        Image.fromarray(np.ascontiguousarray(pixels if channels > 1 else pixels.reshape(pixels.shape[:2])))
    )


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB, 8 bits per channel. Transparent parts become white, as in transformers' processors.

    Of 16-bit grey, the upper 8 bits are used. Pillow would clip it to 255, which makes an image almost white.
    """
    has_alpha = bool({"A", "a"} & set(image.getbands())) or image.info.get("transparency") is not None
    is_deep = image.mode.startswith("I;16")
    if not has_alpha and not is_deep and image.mode not in ("I", "F"):
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode in ("I", "F"):
        raise BadValue(f"an image has 32 bits for each value (mode {image.mode}); use 8 or 16 bits")
    out = Image.new("RGB", image.size)
    for top, strip in _strips(image):
        out.paste(_upper_bits(strip) if is_deep else _on_white(strip), (0, top))
    return out


def _strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Horizontal strips of an image, each with the row at which it begins."""
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _upper_bits(grey: Image.Image) -> Image.Image:
    return Image.fromarray((np.asarray(grey).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, _WHITE)
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _refuse_animation(image: Image.Image) -> None:
    """Refuse images with several frames. MPO is a JPEG followed by previews, which do not count."""
    try:
        is_animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except _BROKEN as error:
        raise BadValue(f"an image cannot be read; its frames are broken: {error}") from None
    if is_animated:
        noun = "page" if image.format == "TIFF" else "frame"
        raise BadValue(f"an image of type {image.format} has more than one {noun}; send one {noun}, as PNG")


def _check_scans(data: bytes, num_pixels: int) -> None:
    """Refuse a JPEG that takes minutes to decode.

    The marker of a scan may occur in other data by chance, about once in 65,536 bytes. The limit allows that.
    """
    scans = data.count(b"\xff\xda")
    if scans * num_pixels > MAX_SCANNED_PIXELS:
        raise BadValue(
            f"an image of type JPEG has about {scans:,} scans, too many for {num_pixels:,} pixels; save it "
            "again, not progressive"
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turn an image by its EXIF orientation. Unreadable metadata is ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except _BROKEN:
        return image


def _webp_canvas(data: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a WebP file; None for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    size = int.from_bytes(data[26:28], "little"), int.from_bytes(data[28:30], "little")
    return size[0] & 0x3FFF, size[1] & 0x3FFF


def _guess(data: bytes) -> str:
    """Describe a file that is not an accepted image, for an error message."""
    start = data[:512].lstrip().lower()
    if b"<svg" in start or start.startswith(b"<?xml"):
        return "an SVG drawing"
    for mark, words in _OTHER_FILES.items():
        if start.startswith(mark):
            return words
    return "a HEIC or AVIF file" if data[4:8] == b"ftyp" else "of an unknown type"


_OTHER_FILES = {
    b"%pdf": "a PDF document",
    b"<!doctype html": "an HTML page",
    b"<html": "an HTML page",
    b"{": "JSON",
    b"[": "JSON",
}
