"""Token ids to text for every dialect that has it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.api.state import ServedModel
from penstock.errors import BadValue

MAX_INLINE_IDS = 1024  # fewer are decoded on the event loop


async def decode_ids(
    model: ServedModel, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool
) -> list[str]:
    """The text of each row of token ids; many ids are decoded on another thread."""
    decode = partial(_decoded, model, rows, skip_special_tokens)
    num_ids = sum(map(len, rows))
    return decode() if num_ids <= MAX_INLINE_IDS else await model.text.batcher.call(decode, num_ids)


def _decoded(model: ServedModel, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
    vocab_size = model.text.tokenizer.vocab_size
    for row in rows:
        if row and (min(row) < 0 or max(row) >= vocab_size):
            wrong = min(row) if min(row) < 0 else max(row)
            raise BadValue(
                f"tokens has the id {wrong}; the tokenizer's ids are 0 to {vocab_size - 1}", param="tokens"
            )
    return model.text.tokenizer.decode_rows([list(row) for row in rows], skip_special_tokens)
