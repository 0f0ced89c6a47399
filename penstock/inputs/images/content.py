"""Rows of texts and images for models that read both in one prompt.

`text` returns the text to tokenise for each input, and `join` builds the request from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import BadValue
from penstock.inputs.images.prompts import ImagePrompts, ImageRow
from penstock.types import Content, Ints, PreparedImage, Request


@dataclass(frozen=True, slots=True, eq=False)
class Rendered(Content):
    """A text that already has the placeholders of its images, for example from a chat template.

    No prompt is added. `parts` are its images.
    """

    text: str = ""


def content_items(items: Sequence[Any]) -> list[Content]:
    """The texts and images of each input. An input with images cannot have token ids."""
    found: list[Content] = []
    for index, item in enumerate(items):
        content = item if isinstance(item, Content) else Content((item,))
        is_empty = not content.parts and not isinstance(content, Rendered)
        if is_empty or not all(isinstance(part, str | PreparedImage) for part in content.parts):
            raise BadValue(
                f"input {index} is neither a text nor an image; requests with images have no token ids",
                param="input",
            )
        found.append(content)
    return found


def images_of(content: Content) -> list[PreparedImage]:
    return [part for part in content.parts if isinstance(part, PreparedImage)]


def _without_end(row: ImageRow) -> ImageRow:
    """Cut the row after the end token of its image.

    With causal attention, later tokens do not change the mean of the image's tokens.
    """
    return row._replace(token_ids=row.token_ids[: row.starts[0] + row.images[0].num_tokens + 1])


class ContentRows:
    """Lays out the rows of one model."""

    def __init__(self, prompts: ImagePrompts, max_model_len: int) -> None:
        self.prompts = prompts
        self.max_model_len = max_model_len

    def text(self, content: Content, prompt: str, end: str) -> str:
        """The text to tokenise for an input with images."""
        if self.prompts.prompt.is_alone and (isinstance(content, Rendered) or len(content.parts) > 1):
            raise BadValue(
                "this model embeds a text or one image, not both in one input. Send them as separate inputs",
                param="input",
            )
        if isinstance(content, Rendered):
            return self.prompts.fill(content.text, images_of(content))
        return self.prompts.text(content.parts, prompt, end)

    def adds_special_tokens(self, content: Content) -> bool:
        """Whether special tokens are added to this input, if the request adds them."""
        is_page = not isinstance(content, Rendered) and self.prompts.is_page(content.parts)
        return not is_page or self.prompts.prompt.adds_special_tokens

    def join(
        self,
        rows: Sequence[Ints],
        contents: Sequence[Content],
        limit: int | None,
        make: Callable[[list[Ints]], Request],
        *,
        pools: bool,
    ) -> Request:
        """Build the request of all rows. `make` lays out rows of tokens.

        Rows with images are never truncated. `pools`: the request computes one vector for each row.
        """
        placed = [
            self.prompts.row(row, images, index) if (images := images_of(content)) else None
            for index, (row, content) in enumerate(zip(rows, contents, strict=True))
        ]
        is_cut = pools and self.prompts.prompt.pools_image
        if is_cut:
            placed = [None if row is None else _without_end(row) for row in placed]
        tokens = [row if found is None else found.token_ids for row, found in zip(rows, placed, strict=True)]
        self._check_lengths(placed, limit)
        request = make(tokens)
        for found, row, length in zip(placed, tokens, request.lengths.tolist(), strict=True):
            if found is not None and length != len(row):
                raise BadValue("this model marks texts in a way that images do not allow", param="input")
        made = self.prompts.request_images(placed, np.asarray(request.lengths, dtype=np.int32))
        request = replace(request, images=made.images, rope_positions=made.rope_positions)
        if is_cut:
            before = [0 if row is None else row.starts[0] - 1 for row in placed]
            request = replace(request, skip=np.array(before, dtype=np.int32))
        return request

    def _check_lengths(self, rows: Sequence[ImageRow | None], limit: int | None) -> None:
        allowed = min(self.max_model_len, limit or self.max_model_len)
        for index, row in enumerate(rows):
            if row is not None and len(row.token_ids) > allowed:
                raise BadValue(
                    f"input {index} has {len(row.token_ids)} tokens with its images, but at most {allowed} "
                    "are possible, and an image cannot be cut; send a smaller image or fewer",
                    param="input",
                )
