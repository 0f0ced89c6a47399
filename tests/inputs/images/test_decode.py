"""Files of every format and mode, damaged and hostile files, and arrays give an RGB image or a clear
error."""

from __future__ import annotations

import struct
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from penstock.errors import BadValue
from penstock.inputs.images.decode import ImageLimits, decode, from_array, from_pillow
from tests.inputs.images.pictures import encoded, noise, photo, photo_folder, png_header
from tests.waiting import PATIENCE_S

LIMITS = ImageLimits()
ORIENTATION = 0x0112  # EXIF tag


def webp_header(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + canvas + bytes(64)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def reference(image: Image.Image) -> np.ndarray:
    """The image after transformers' loader and its conversion to RGB."""
    from transformers.image_transforms import convert_to_rgb

    return np.asarray(convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_accepted_format_is_decoded(kind: str) -> None:
    data = encoded(photo("chelsea.png").convert("RGB"), kind)
    ours = decode(data, LIMITS)
    assert (ours.mode, ours.size) == ("RGB", (451, 300))
    assert np.array_equal(np.asarray(ours), reference(Image.open(BytesIO(data))))


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "PA", "1", "CMYK", "YCbCr", "LAB", "RGBX"])
def test_every_mode_becomes_rgb_as_in_the_reference(mode: str) -> None:
    image = noise(33, 21, "RGBA") if "A" in mode else noise(33, 21, "CMYK" if mode == "CMYK" else "RGB")
    image = image.convert("LA" if mode == "PA" else mode) if image.mode != mode else image
    image = image.convert(mode) if image.mode != mode else image
    difference = np.asarray(from_pillow(image, LIMITS)).astype(int) - reference(image)
    assert np.abs(difference).max() <= 1


def test_a_transparent_palette_colour_becomes_white() -> None:
    image = noise(20, 20).convert("P")
    data = encoded(image, "PNG", transparency=image.getpixel((3, 4)))
    ours = np.asarray(decode(data, LIMITS))
    assert ours[4, 3].tolist() == [255, 255, 255]


def test_a_large_transparent_image_is_composed_in_strips() -> None:
    image = noise(1500, 1501, "RGBA")
    assert np.array_equal(np.asarray(from_pillow(image, LIMITS)), reference(image))


def test_a_cmyk_jpeg_is_not_inverted() -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    ours = np.asarray(decode(encoded(red, "JPEG"), LIMITS)).mean(axis=(0, 1))
    assert ours[0] > 250 and max(ours[1:]) < 5


def test_sixteen_bit_grey_keeps_its_upper_bits() -> None:
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    ours = np.asarray(decode(encoded(Image.fromarray(grey)), LIMITS))
    assert np.array_equal(ours[:, :, 0], grey >> 8)
    assert np.array_equal(ours[:, :, 0], ours[:, :, 2])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_orientation_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(noise(24, 10), "PNG", exif=exif)
    ours = decode(data, LIMITS)
    assert np.array_equal(np.asarray(ours), reference(Image.open(BytesIO(data))))
    assert ours.size == ((24, 10) if orientation < 5 else (10, 24))


def _animated(kind: str) -> bytes:
    return encoded(noise(30, 20), kind, save_all=True, append_images=[noise(30, 20, seed=1)])


def _many_scans(side: int, count: int) -> bytes:
    """A progressive JPEG with its last scan repeated: each pass over the image takes only a few bytes."""
    whole = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    scan = whole[whole.rindex(b"\xff\xda") : -2]
    return whole[:-2] + scan * count + b"\xff\xd9"


JPEG = encoded(noise(300, 200), "JPEG")
REFUSED = {
    "no bytes": (b"", "0 bytes"),
    "a truncated jpeg": (JPEG[: len(JPEG) // 2], "cut off or broken"),
    "a truncated jpeg header": (JPEG[:20], "header is broken|unknown type"),
    "a truncated png": (encoded(noise(300, 200))[:3000], "cut off or broken"),
    "a png bomb": (png_header(30_000, 30_000), "max-image-pixels"),
    "a larger png bomb": (png_header(400_000, 400_000), "max-image-pixels"),
    "a png within Pillow's limit": (png_header(10_000, 10_000), "10,000 × 10,000 pixels"),
    "a webp bomb": (webp_header(16_383, 16_383), "16,383 × 16,383 pixels"),
    "a png of one long row": (png_header(1_000_000, 1), "a side may have at most 65,535"),
    "a jpeg of many scans": (_many_scans(2000, 2000), "about 2,00. scans.*not progressive"),
    "an svg": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG.*accepted are PNG"),
    "a pdf": (b"%PDF-1.7 ...", "PDF document"),
    "html": (b"<!DOCTYPE html><p>not found", "HTML page"),
    "text": (b"hello world, this is no image at all", "unknown type"),
    "an avif": (b"\0\0\0\x1cftypavif" + bytes(64), "HEIC or AVIF"),
    "an animated gif": (_animated("GIF"), "GIF has more than one frame"),
    "an animated webp": (_animated("WEBP"), "WEBP has more than one frame"),
    "an animated png": (_animated("PNG"), "PNG has more than one frame"),
    "a tiff with pages": (_animated("TIFF"), "more than one page"),
    "a float tiff": (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "32 bits"),
    "too many bytes": (bytes(20_000_001), "max-image-mb"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_usable_image_is_refused_with_a_reason(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(BadValue, match=message):
        decode(data, LIMITS)


def test_a_progressive_jpeg_is_decoded() -> None:
    image = decode(encoded(noise(300, 200), "JPEG", progressive=True), LIMITS)
    assert image.size == (300, 200)
    assert decode(_many_scans(100, 50), LIMITS).size == (100, 100)


def test_any_damage_gives_an_image_or_a_refusal() -> None:
    """For each format, tries truncated files, and files with overwritten bytes."""
    rng = np.random.default_rng(7)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = encoded(noise(40, 30), kind)
        for cut in range(1, len(whole), max(1, len(whole) // 40)):
            _image_or_refusal(whole[:cut])
        for _ in range(60):
            broken = bytearray(whole)
            for place in rng.integers(0, len(whole), 4):
                broken[place] = rng.integers(0, 256)
            _image_or_refusal(bytes(broken))


def _image_or_refusal(data: bytes) -> None:
    try:
        assert decode(data, ImageLimits(max_pixels=1_000_000)).mode == "RGB"
    except BadValue:
        pass


def test_arrays_of_bytes_are_images() -> None:
    pixels = np.asarray(noise(12, 8))
    assert np.array_equal(np.asarray(from_array(pixels, LIMITS)), pixels)
    grey = from_array(pixels[:, :, :1], LIMITS)
    assert (grey.mode, grey.size) == ("RGB", (12, 8))
    with_alpha = np.dstack([pixels, np.zeros((8, 12), np.uint8)])
    assert np.asarray(from_array(with_alpha, LIMITS)).min() == 255
    for wrong in (pixels.astype(np.float32), pixels[0], np.zeros((4, 4, 2), np.uint8)):
        with pytest.raises(BadValue, match="array"):
            from_array(wrong[0] if wrong.ndim == 2 else wrong, LIMITS)


BOMB_SCRIPT = """
import resource, sys
from pathlib import Path
import numpy, PIL.Image
from penstock.inputs.images.decode import ImageLimits, decode
from penstock.errors import BadValue
for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
    PIL.Image.init()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        decode(file.read_bytes(), ImageLimits())
    except BadValue as error:
        continue
    sys.exit(f"{file.name} was accepted")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_are_refused_without_using_their_memory(tmp_path: Path) -> None:
    """A decoded bomb of 30,000 × 30,000 pixels would take 2.7 GB."""
    (tmp_path / "bomb.png").write_bytes(png_header(30_000, 30_000))
    (tmp_path / "bomb.webp").write_bytes(webp_header(16_383, 16_383))
    large = Image.new("L", (13_000, 13_000))  # 169 million pixels: Pillow would decode it
    large.save(tmp_path / "flat.png")
    large.save(tmp_path / "flat.gif")
    large.save(tmp_path / "flat.tiff", compression="tiff_lzw")
    command = [sys.executable, "-c", BOMB_SCRIPT, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 60_000  # kilobytes


def test_photographs_in_every_file_of_scikit_image_can_be_read() -> None:
    folder = photo_folder()
    if folder is None:
        pytest.skip("scikit-image is not installed")
    for file in sorted(folder.glob("*.png")) + sorted(folder.glob("*.jpg")):
        expected = reference(Image.open(file))
        assert np.array_equal(np.asarray(decode(file.read_bytes(), LIMITS)), expected), file.name
