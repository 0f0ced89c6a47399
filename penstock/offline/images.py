"""Preparation of images from Python callers: paths, bytes, Pillow images and arrays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.checkpoint.spec import ModelSpec
from penstock.config import available_cpus
from penstock.errors import BadValue
from penstock.inputs.images.rows import refuse_images
from penstock.tasks.rows import IMAGE_WINDOW_ROWS
from penstock.types import PreparedImage

if TYPE_CHECKING:
    from penstock.inputs.images.loader import ImageInput, ImageLoader


class LocalImages:
    """Prepares images for one model. Its threads start with the first image."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._loader: ImageLoader | None = None

    async def prepare(self, images: Sequence[ImageInput | PreparedImage]) -> list[PreparedImage]:
        """Prepare images, in order. Images that are already prepared are returned unchanged."""
        if self.spec.images is None:
            raise refuse_images(self.spec.name)
        if self._loader is None:
            from penstock.inputs.images.loader import ImageLoader, LoaderLimits  # late: imports Pillow

            self._loader = ImageLoader(limits=LoaderLimits(num_threads=available_cpus()))
        raw = [image for image in images if not isinstance(image, PreparedImage)]
        made = iter(await self._loader.prepare(raw, self.spec.images, param="images"))
        return [image if isinstance(image, PreparedImage) else next(made) for image in images]

    async def windows(
        self, images: Sequence[ImageInput | PreparedImage]
    ) -> AsyncIterator[list[PreparedImage]]:
        """Prepare images in windows, so that a long list is never in memory as a whole."""
        for first in range(0, len(images), IMAGE_WINDOW_ROWS):
            yield await self.prepare(images[first : first + IMAGE_WINDOW_ROWS])

    async def replace(self, inputs: Any) -> Any:
        """Prepare the images among the inputs. Texts are unchanged: they are never read as paths or URLs."""
        if is_raw_image(inputs):
            return (await self.prepare([inputs]))[0]
        if not isinstance(inputs, list | tuple) or not any(map(is_raw_image, inputs)):
            return inputs
        prepared = iter(await self.prepare([item for item in inputs if is_raw_image(item)]))
        return [next(prepared) if is_raw_image(item) else item for item in inputs]

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()


def is_raw_image(item: Any) -> bool:
    """Whether a value is an image that is not prepared yet. An array of pixels has three axes."""
    if isinstance(item, np.ndarray):
        return item.ndim == 3
    return isinstance(item, Path | bytes) or type(item).__module__.startswith("PIL.")


def require_images(images: Any) -> Sequence[Any]:
    if not isinstance(images, list | tuple) or not images:
        raise BadValue("images is not a list with at least one image", param="images")
    return images
