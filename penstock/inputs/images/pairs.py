"""Pairs with images for rerankers that read query and document together: each pair is one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.checkpoint.score import ScoreSpec
from penstock.errors import BadValue
from penstock.inputs.images.content import ContentRows, content_items, images_of
from penstock.inputs.tokenizer import Tokenizer
from penstock.types import Content, Ints, Request

FillTemplate = Callable[[str, str], list[str]]  # the texts of a query and a document → parts of the prompt


def joint_rows(
    tokenizer: Tokenizer, content: ContentRows, score: ScoreSpec, pairs: Sequence[Any], fill: FillTemplate
) -> tuple[list[Ints], list[Content]]:
    """The tokens of each pair in the model's own prompt, and its images in the order of placeholders."""
    opening, closing = tokenizer.frame
    opening, closing = opening[: None if score.opened else 0], closing[: None if score.closed else 0]
    rows: list[Ints] = []
    images: list[Content] = []
    for pair in pairs:
        sides = content_items(pair)
        texts = [content.prompts.text(side.parts, inline_only=True) for side in sides]
        tokens = tokenizer.encode(fill(texts[0], texts[1]), False)
        rows.append(np.concatenate([opening, *tokens, closing]))
        images.append(Content(tuple(image for side in sides for image in images_of(side))))
    return rows, images


def joint_request(
    empty: Request, content: ContentRows, rows: Sequence[Ints], images: Sequence[Content]
) -> Request:
    """Build the request of these rows, which are never truncated."""

    def make(tokens: list[Ints]) -> Request:
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        if int(lengths.max()) > content.max_model_len:
            raise BadValue(
                f"a query and a document have {int(lengths.max())} tokens together, but the model takes at "
                f"most {content.max_model_len}; shorten them or send smaller images",
                param="documents",
            )
        return replace(empty, token_ids=np.concatenate(tokens), lengths=lengths)

    return content.join(rows, images, None, make, pools=False)
