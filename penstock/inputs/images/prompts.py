"""Rows with images: the text with placeholders of images, and the tokens that it becomes.

A text is tokenised with one placeholder for each tile of an image. Each placeholder is then repeated once for
each vector of the vision tower. This equals tokenising all of them, because a special token separates the
text before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.checkpoint.image_processor import ImageProcessorSpec, PixelRange
from penstock.checkpoint.image_prompts import ImagePromptSpec
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.images.positions import rope_positions
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Ints, PreparedImage, RequestImages

Part = str | PreparedImage
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class ImageRow(NamedTuple):
    """The tokens of a row, and the positions of its images."""

    token_ids: Ints
    starts: list[int]  # first token of each image
    images: list[PreparedImage]  # one tile each


class RowImages(NamedTuple):
    """The images of a request's rows."""

    images: RequestImages | None
    rope_positions: Ints | None  # for models with M-RoPE


class ImagePrompts:
    """Makes rows with images for one model."""

    def __init__(self, prompt: ImagePromptSpec, processor: ImageProcessorSpec, tokenizer: Tokenizer) -> None:
        found = tokenizer.token_id(prompt.placeholder)
        if found is None or prompt.token_id not in (None, found):
            raise ModelLoadError(
                f"the tokenizer has {prompt.placeholder!r}, which stands for images, as token {found}, but "
                f"config.json says {prompt.token_id}",
                param="model",
            )
        self.prompt, self.processor, self.tokenizer = prompt, processor, tokenizer
        self.token_id = found
        self.merge_size = processor.geometry.merge_size if isinstance(processor.geometry, PixelRange) else 0

    def text(
        self, parts: Sequence[Part], prompt: str = "", end: str = "", *, inline_only: bool = False
    ) -> str:
        """The text of a row: `prompt`, the parts in their order, `end`.

        An image alone may have a special text, unless the row is part of another (`inline_only`).
        """
        images = [part for part in parts if isinstance(part, PreparedImage)]
        if self.is_page(parts) and not inline_only:
            assert self.prompt.page is not None
            return self._filled(self.prompt.page, images)
        words = [
            self._filled(self.prompt.inline, [part]) if not isinstance(part, str) else part for part in parts
        ]
        return prompt + "".join(words) + end

    def is_page(self, parts: Sequence[Part]) -> bool:
        """Whether this is an image alone, for which the model has a special text."""
        return self.prompt.page is not None and len(parts) == 1 and isinstance(parts[0], PreparedImage)

    def fill(self, text: str, images: Sequence[PreparedImage]) -> str:
        """Replace the placeholder of each image, as a chat template writes it, by one for each tile."""
        return self._filled(text, images)

    def row(self, token_ids: Ints, images: Sequence[PreparedImage], index: int = 0) -> ImageRow:
        """Expand the placeholders in the tokens of a text from `text` or `fill`."""
        tiles = [tile for image in images for tile in split_tiles(image)]
        places = np.flatnonzero(token_ids == self.token_id)
        if len(places) != len(tiles):
            raise BadValue(
                f"input {index} has the token {self.prompt.placeholder!r} {len(places) - len(tiles):+d} "
                "times beside its images; it stands for images alone",
                param="input",
            )
        counts = np.ones(len(token_ids), dtype=np.int32)
        counts[places] = [tile.num_tokens for tile in tiles]
        starts = np.cumsum(counts, dtype=np.int32)[places] - counts[places]
        return ImageRow(np.repeat(token_ids, counts), starts.tolist(), tiles)

    def request_images(self, rows: Sequence[ImageRow | None], lengths: Ints) -> RowImages:
        """The data of images for a request. In `rows`, None is a row without images."""
        placed = [
            (number, start, image)
            for number, row in enumerate(rows)
            if row is not None
            for start, image in zip(row.starts, row.images, strict=True)
        ]
        images = RequestImages.of(placed)
        if images is None or not self.merge_size or self.prompt.has_plain_positions:
            return RowImages(images, None)
        grids = images.grids // self.merge_size
        return RowImages(images, rope_positions(lengths, images.rows, images.starts, grids))

    def _filled(self, text: str, images: Sequence[PreparedImage]) -> str:
        pieces = text.split(self.prompt.placeholder)
        if len(pieces) != len(images) + 1:
            raise BadValue(
                f"a text has {self.prompt.placeholder!r} {len(pieces) - 1} times for {len(images)} images; "
                "it stands for images alone",
                param="input",
            )
        out = pieces[0]
        for image, piece in zip(images, pieces[1:], strict=True):
            out += self._image_text(image) + piece
        return out

    def _image_text(self, image: PreparedImage) -> str:
        """The text of one image: a placeholder for each tile, and the tokens around them."""
        holder = self.prompt.placeholder
        if not self.prompt.is_tiled:
            return self.prompt.before + holder + self.prompt.after
        rows, columns = image.split
        lines = [
            "".join(f"{_FAKE}<row_{row + 1}_col_{column + 1}>{holder}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{_FAKE}{_GLOBAL}{holder}{_FAKE}"


def split_tiles(image: PreparedImage) -> list[PreparedImage]:
    """Each tile as a separate image, because tiles are in different places of a prompt."""
    if image.num_tiles == 1:
        return [image]
    size, tokens = len(image.patches) // image.num_tiles, image.num_tokens // image.num_tiles
    return [
        replace(
            image,
            patches=image.patches[number * size : (number + 1) * size],
            num_tokens=tokens,
            num_tiles=1,
            split=(0, 0),
            num_pixels=0,
            digest=hashlib.blake2b(image.digest + number.to_bytes(4, "little"), digest_size=16).digest(),
        )
        for number in range(image.num_tiles)
    ]
