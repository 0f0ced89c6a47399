"""Resizes an RGB image and cuts it into patches, as the model's image processor does."""

from __future__ import annotations

from PIL import Image

from penstock.checkpoint.image_processor import ImageProcessorSpec
from penstock.types import PreparedImage


def prepare(image: Image.Image, spec: ImageProcessorSpec) -> PreparedImage:
    """The patches of one RGB image."""
    raise NotImplementedError
