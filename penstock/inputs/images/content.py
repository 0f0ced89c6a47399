"""Rows of texts and images for models that read both in one prompt.

`texts` gives what is tokenised for each input, `join` makes the request of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.errors import BadValue
from penstock.inputs.images.prompts import ImagePrompts, ImageRow, Part
from penstock.types import Content, Ints, PreparedImage, Request

Parts = tuple[Part, ...]


def content_parts(items: Sequence[Any]) -> list[Parts]:
    """The texts and images of each input. Token ids cannot stand beside images."""
    found: list[Parts] = []
    for index, item in enumerate(items):
        parts: Parts = item.parts if isinstance(item, Content) else (item,)
        if not parts or not all(isinstance(part, str | PreparedImage) for part in parts):
            raise BadValue(
                f"input {index} is neither a text nor an image; requests with images have no token ids",
                param="input",
            )
        found.append(parts)
    return found


def images_of(parts: Parts) -> list[PreparedImage]:
    return [part for part in parts if isinstance(part, PreparedImage)]


class ContentRows:
    """Lays out the rows of one model."""

    def __init__(self, prompts: ImagePrompts, max_model_len: int) -> None:
        self.prompts = prompts
        self.max_model_len = max_model_len

    def text(self, parts: Parts, prompt: str, end: str) -> str:
        """What is tokenised for an input with images."""
        return self.prompts.text(parts, prompt, end)

    def adds_special_tokens(self, parts: Parts) -> bool:
        """Whether the tokenizer's own tokens stand around this input, if the request wants them."""
        return not self.prompts.is_page(parts) or self.prompts.prompt.adds_special_tokens

    def join(
        self,
        rows: Sequence[Ints],
        parts: Sequence[Parts],
        limit: int | None,
        make: Callable[[list[Ints]], Request],
    ) -> Request:
        """The request of all rows. `make` lays out rows of tokens; rows with images are never cut."""
        placed: list[ImageRow | None] = []
        tokens: list[Ints] = []
        for index, (row, own) in enumerate(zip(rows, parts, strict=True)):
            images = images_of(own)
            found = self.prompts.row(row, images, index) if images else None
            placed.append(found)
            tokens.append(row if found is None else found.token_ids)
            if found is not None:
                self._check_length(index, len(found.token_ids), limit)
        request = make(tokens)
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        if any(
            found is not None and size != whole
            for found, size, whole in zip(placed, request.lengths, lengths, strict=True)
        ):
            raise BadValue("this model marks texts in a way that images do not allow", param="input")
        made = self.prompts.request_images(placed, request.lengths)
        return replace(request, images=made.images, rope_positions=made.rope_positions)

    def _check_length(self, index: int, length: int, limit: int | None) -> None:
        allowed = min(self.max_model_len, limit or self.max_model_len)
        if length > allowed:
            raise BadValue(
                f"input {index} has {length} tokens with its images, but at most {allowed} are possible, and "
                "an image cannot be cut; send a smaller image or fewer",
                param="input",
            )
