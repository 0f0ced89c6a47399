"""Token ids to text while they come: what is given out is never half a character, and never taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # tokens of the prompt that decide how the first new one is written
_HELD = 16  # tokens that may wait for the rest of a character; no character has so many
_SILENT = 64  # tokens without text that are kept as context


class Decodes(Protocol):
    """What is asked of a tokenizer."""

    @property
    def byte_level(self) -> bool: ...
    def token_bytes(self, number: int) -> bytes: ...
    def is_special(self, number: int) -> bool: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class Detokenizer(Protocol):
    def push(self, number: int) -> str:
        """The text that is certain with this token, often empty."""

    def finish(self) -> str:
        """What was held back, as it is."""


def detokenizer(
    tokenizer: Decodes, prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> Detokenizer:
    if tokenizer.byte_level:
        return _Bytes(tokenizer, skip_special_tokens)
    return _Window(tokenizer, prompt, skip_special_tokens)


class _Bytes:
    """Byte-level vocabularies: the bytes of the tokens through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Decodes, skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, number: int) -> str:
        if self._skip and self._tokenizer.is_special(number):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(number))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Other vocabularies: the last tokens are decoded with and without the new one, and the rest is new.

    A token's text may depend on those before it (a space that only the first word drops, bytes that
    make a character together), never on those long before it; so the window stays short.
    """

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids = [int(number) for number in prompt[-_CONTEXT:]]
        self._told = len(self._ids)  # of these, whose text is out
        self._before = self._decode()

    def push(self, number: int) -> str:
        self._ids.append(number)
        text = self._decode()
        held = len(self._ids) - self._told
        if text.endswith(_BROKEN) and held <= _HELD:
            return ""
        return self._advance(text, held)

    def finish(self) -> str:
        return self._advance(self._decode(), _SILENT)

    def _advance(self, text: str, held: int) -> str:
        new = text[len(self._before) :]
        if new or held >= _SILENT:
            self._ids = self._ids[self._told :] or self._ids
            self._told = len(self._ids)
            self._before = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip) if self._ids else ""
