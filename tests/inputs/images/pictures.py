"""Pictures for tests: photographs from scikit-image, and pictures made with Pillow."""

from __future__ import annotations

import importlib.util
import struct
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


@cache
def photo_folder() -> Path | None:
    found = importlib.util.find_spec("skimage")
    return None if found is None or found.origin is None else Path(found.origin).parent / "data"


def photo(name: str) -> Image.Image:
    """A photograph from scikit-image, such as `astronaut.png` (512 × 512) or `rocket.jpg` (640 × 427)."""
    if (folder := photo_folder()) is None:
        pytest.skip("scikit-image is not installed")
    image = Image.open(folder / name)
    image.load()
    return image


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth coloured pattern with noise. All channels differ, and all corners."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [
        127 + 80 * np.sin(rows / (3 + 2 * c) + c) + 40 * np.cos(columns / (5 - c)) for c in range(len(mode))
    ]
    pixels = np.stack(channels, axis=-1) + rng.normal(0, 12, (height, width, len(mode)))
    values = np.clip(pixels, 0, 255).astype(np.uint8)
    return Image.fromarray(values[:, :, 0] if len(mode) == 1 else values, mode=mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG with this size in its header, and almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
