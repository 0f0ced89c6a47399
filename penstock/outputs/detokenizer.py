"""Incremental detokenisation. Returned text never ends in half a character and is never revised."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_NUM_PROMPT_TOKENS = 6  # last prompt tokens, kept as context for the first new token
_MAX_HELD = 16  # tokens held back for the rest of a character; no character has that many
_MAX_SILENT = 64  # tokens without text that are kept as context


class TokenDecoder(Protocol):
    """The tokenizer methods that a detokenizer needs."""

    @property
    def byte_level(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now final, which is often empty."""

    def finish(self) -> str:
        """Return the text that was held back, even if it ends in half a character."""


def detokenizer(
    tokenizer: TokenDecoder, prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    if tokenizer.byte_level:
        return _ByteLevelDetokenizer(tokenizer, skip_special_tokens)
    return _WindowDetokenizer(tokenizer, prompt, skip_special_tokens)


class _ByteLevelDetokenizer:
    """For byte-level vocabularies: feeds the bytes of the tokens to an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """For other vocabularies: decodes a window of the last tokens with and without the new one.

    A token's text may depend on the tokens just before it: only the first word drops its space, and several
    byte tokens make one character. It never depends on earlier tokens, so the window stays short.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = [int(token_id) for token_id in prompt[-_NUM_PROMPT_TOKENS:]]
        self._num_returned = len(self._ids)  # leading tokens of the window whose text was returned
        self._returned = self._decode()  # the text of these tokens

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        num_held = len(self._ids) - self._num_returned
        if text.endswith(_INCOMPLETE) and num_held <= _MAX_HELD:
            return ""
        return self._advance(text, num_held)

    def finish(self) -> str:
        return self._advance(self._decode(), _MAX_SILENT)

    def _advance(self, text: str, num_held: int) -> str:
        new = text[len(self._returned) :]
        if new or num_held >= _MAX_SILENT:
            self._ids = self._ids[self._num_returned :] or self._ids
            self._num_returned = len(self._ids)
            self._returned = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip_special_tokens) if self._ids else ""
