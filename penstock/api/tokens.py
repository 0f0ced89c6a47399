"""Decodes token ids to text, for every dialect that has such a route."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.api.state import ServedModel
from penstock.errors import BadValue, BodyTooLarge

MAX_INLINE_IDS = 1024  # up to this many are decoded on the event loop
MAX_DECODED_IDS = 1 << 20  # in one request


async def decode_ids(
    model: ServedModel,
    rows: list[Any],
    *,
    skip_special_tokens: bool,
    name: str = "tokens",
    limit: int = MAX_DECODED_IDS,
) -> list[str]:
    """The text of each row of token ids, which a body has under `name`. Many ids are checked and decoded on
    another thread."""
    num_ids = sum(len(row) for row in rows if isinstance(row, list))
    if num_ids > limit:
        raise BodyTooLarge(f"{name} has {num_ids} ids; one request takes at most {limit}", param=name)
    decode = partial(_decoded, model, rows, name, skip_special_tokens)
    return decode() if num_ids <= MAX_INLINE_IDS else await model.text.batcher.call(decode, num_ids)


def _decoded(model: ServedModel, rows: list[Any], name: str, skip_special_tokens: bool) -> list[str]:
    vocab_size = model.text.tokenizer.vocab_size
    for index, row in enumerate(rows):
        if not isinstance(row, list) or not set(map(type, row)) <= {int}:
            raise BadValue(f"{name} {index} is not a list of token ids", param=name)
        if row and (min(row) < 0 or max(row) >= vocab_size):
            wrong = min(row) if min(row) < 0 else max(row)
            raise BadValue(
                f"{name} {index} has the id {wrong}; the tokenizer's ids are 0 to {vocab_size - 1}",
                param=name,
            )
    return model.text.tokenizer.decode_rows(rows, skip_special_tokens)
