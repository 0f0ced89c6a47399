"""Character offsets of tokens in the caller's text, for outputs that refer to the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import BadValue
from penstock.inputs.processor import InputOptions, InputProcessor, split_inputs
from penstock.inputs.tokenizer import EncodedText
from penstock.inputs.truncation import truncate_rows, truncation_limit
from penstock.types import Ints, PoolingParams, Request


@dataclass(frozen=True, slots=True, eq=False)
class TokenOffsets:
    """The tokens of a request's texts, in the order of `Request.token_ids`."""

    texts: list[str]
    chars: Ints  # [tokens, 2], characters within the token's text
    words: Ints  # [tokens], index of the word within the text; -1 for tokens outside the text


def require_texts(inputs: Any, *, allow_empty_text: bool = True) -> list[str]:
    texts, _ = split_inputs(inputs, allow_empty_text=allow_empty_text)
    if texts is None:
        raise BadValue(
            "input has token ids, but this answer has character offsets; give texts", param="input"
        )
    return texts


def join_with_offsets(
    processor: InputProcessor,
    request_id: str,
    texts: list[str],
    encoded: list[EncodedText],
    params: PoolingParams,
    options: InputOptions,
) -> tuple[Request, TokenOffsets]:
    request = processor.join(request_id, [row.ids for row in encoded], params, options, from_text=True)
    offsets = text_offsets(processor, [row.offsets for row in encoded], options)
    words = truncate_like_rows(processor, [row.words for row in encoded], options)
    flat = np.concatenate(offsets)
    flat_words = np.where(flat[:, 1] > 0, np.concatenate(words), -1)
    return request, TokenOffsets(texts, np.maximum(flat, 0), flat_words.astype(np.int32))


def text_offsets(processor: InputProcessor, offsets: list[Ints], options: InputOptions) -> list[Ints]:
    """Offsets of the tokens that remain after truncation, relative to the text.

    Prompt tokens end at 0 or below.
    """
    prompt_chars = len(processor.prompt(options))
    return [row - prompt_chars for row in truncate_like_rows(processor, offsets, options)]


def truncate_like_rows(processor: InputProcessor, values: list[Ints], options: InputOptions) -> list[Ints]:
    """Truncate per-token values exactly as the rows are truncated."""
    tokenizer, limit = processor.tokenizer, processor.spec.max_model_len
    frame = (tokenizer.prefix, tokenizer.suffix) if options.add_special_tokens else (0, 0)
    cut_at = truncation_limit(options.truncate_prompt_tokens, limit)
    return truncate_rows(values, cut_at, limit, frame, options.truncation_side)
