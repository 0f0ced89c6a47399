"""Rows of texts and of images, for models with separate towers for texts and for images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from penstock.checkpoint.dual import DualSpec
from penstock.errors import BadValue, NotPossible
from penstock.types import Content, Ints, PreparedImage, Request, RequestImages, cumulative

InputItem = str | Sequence[int] | PreparedImage | Content
_WITH_IMAGES = (PreparedImage, Content)


def has_images(inputs: Any) -> bool:
    """Whether the inputs of a call contain an image. Every call checks this, so it avoids Python loops."""
    if type(inputs) is str:
        return False
    if not isinstance(inputs, list | tuple):
        return isinstance(inputs, _WITH_IMAGES)
    if not inputs or type(inputs[0]) is int:  # token ids of one text
        return False
    return any(issubclass(kind, _WITH_IMAGES) for kind in set(map(type, inputs)))


def pairs_have_images(pairs: Iterable[Iterable[Any]]) -> bool:
    """Whether a query or a document is or has an image."""
    return any(issubclass(kind, _WITH_IMAGES) for kind in set(map(type, chain.from_iterable(pairs))))


def input_items(inputs: Any) -> list[Any]:
    """The inputs of a call as a list."""
    return list(inputs) if isinstance(inputs, list | tuple) else [inputs]


class DualRows:
    """Lays out the rows of a model with two towers: each row is a text or an image.

    An image has as many tokens as its tower reads, so that scheduling accounts for its cost. Its last token
    has its vector.
    """

    def __init__(self, dual: DualSpec) -> None:
        self.dual = dual

    def split(self, items: Sequence[Any]) -> tuple[list[Any], dict[int, PreparedImage]]:
        """Separate texts, in their order, from images, by row. Raise `BadValue` for an input with both."""
        texts: list[Any] = []
        images: dict[int, PreparedImage] = {}
        for row, item in enumerate(items):
            parts = item.parts if isinstance(item, Content) else (item,)
            if len(parts) != 1:
                raise BadValue(
                    f"input {row} has {len(parts)} parts; this model embeds a text or an image, not both in "
                    "one vector. Send them as separate inputs",
                    param="input",
                )
            if isinstance(parts[0], PreparedImage):
                images[row] = parts[0]
            else:
                texts.append(parts[0])
        return texts, images

    def insert(self, texts: Request, images: dict[int, PreparedImage]) -> Request:
        """Insert images into a request of texts, which may be empty, at the given rows."""
        num_rows = len(images) + texts.num_rows
        is_text = np.ones(num_rows, dtype=bool)
        is_text[list(images)] = False
        lengths = np.empty(num_rows, dtype=np.int32)
        lengths[is_text] = texts.lengths
        for row, image in images.items():
            lengths[row] = len(image.patches) + self.dual.class_tokens
        token_ids = np.zeros(int(lengths.sum()), dtype=np.int32)
        token_ids[np.repeat(is_text, lengths)] = texts.token_ids
        placed = [(row, int(lengths[row]) - 1, image) for row, image in sorted(images.items())]
        return replace(
            texts, token_ids=token_ids, lengths=lengths, images=RequestImages.of(placed, are_rows=True)
        )


def refuse_images(name: str) -> NotPossible:
    return NotPossible(f"model {name} reads no images; send texts or token ids", param="input")


def frame_texts(token_ids: Ints, lengths: Ints, dual: DualSpec) -> tuple[Ints, Ints]:
    """Lay out rows of token ids for the text tower.

    They are cut after the token whose state is their vector, or padded to the length of the training.
    """
    if dual.end_token is not None:
        return _cut_behind(token_ids, lengths, dual.end_token)
    if dual.padded_length is None:
        return token_ids, lengths
    padded = np.full((len(lengths), dual.padded_length), dual.pad_token, dtype=np.int32)
    columns = np.arange(dual.padded_length, dtype=np.int32)[None, :]
    if dual.pads_left:
        padded[columns >= dual.padded_length - lengths[:, None]] = token_ids
    else:
        padded[columns < lengths[:, None]] = token_ids
    return padded.reshape(-1), np.full_like(lengths, dual.padded_length)


def _cut_behind(token_ids: Ints, lengths: Ints, end_token: int) -> tuple[Ints, Ints]:
    """Cut rows after their first end token, because later tokens do not affect its state."""
    starts = cumulative(lengths)
    ends = np.flatnonzero(token_ids == end_token)
    first = np.searchsorted(ends, starts[:-1])
    found = np.append(ends, len(token_ids))[first]
    if (missing := np.flatnonzero(found >= starts[1:])).size:
        raise BadValue(
            f"input {int(missing[0])} has no end token; the model's vector is the state of token "
            f"{end_token}. Add it, or leave add_special_tokens on",
            param="input",
        )
    kept = (found - starts[:-1] + 1).astype(np.int32)
    if (kept == lengths).all():
        return token_ids, lengths
    index = np.arange(len(token_ids)) - np.repeat(starts[:-1], lengths)
    return token_ids[index < np.repeat(kept, lengths)], kept
