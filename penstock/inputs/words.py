"""Tokenises texts word by word, with the tokens of known words from memory.

A BERT tokenizer splits a text at its spaces before anything else looks at it, so its tokens are those of its
words. A word that was seen before costs one look-up; new ones are given to the tokenizer itself. For models
that do little else than tokenise this is several times faster. The tokens are always the tokenizer's own: a
text for which this cannot be known beforehand, because it has accents, control characters or may contain a
special token, is tokenised whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from penstock.inputs.token_rows import TokenRows
from penstock.types import Ints

MAX_TEXT_CHARS = 1 << 14  # longer texts are left to the tokenizer
_MAX_WORDS = 1 << 17  # known words
_MAX_WORD_CHARS = 8 << 20  # of all known words together
_WHOLE = "\0"  # begins the key of a text that is tokenised whole; no word begins with it
_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


class WordTokenizer:
    """Tokens of whole texts without special tokens. Safe to call from several threads."""

    def __init__(self, encode: Callable[[list[str]], list[Ints]], marks: str) -> None:
        """`encode` gives the tokens of texts. Texts with one of `marks` are tokenised whole."""
        self._encode = encode
        self._is_plain = np.zeros(256, dtype=bool)
        plain = [code for code in (*b"\t\n\r", *range(32, 127)) if chr(code) not in marks]
        self._is_plain[plain] = True
        self._not_plain = re.compile(f"[^{re.escape(''.join(map(chr, plain)))}]")
        self._lock = Lock()
        self._reset()

    @classmethod
    def of(cls, rust: RustTokenizer, encode: Callable[[list[str]], list[Ints]]) -> WordTokenizer | None:
        """None if the tokenizer is of another kind, or special tokens may hide in plain words."""
        is_bert = (
            isinstance(rust.normalizer, normalizers.BertNormalizer)
            and isinstance(rust.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(rust.model, models.WordPiece)
        )
        if not is_bert:
            return None
        marks = ""
        for token in rust.get_added_tokens_decoder().values():
            if all(ord(char) < 128 and char not in _MARKS for char in token.content):
                return None
            marks += next((char for char in token.content if char in _MARKS), "")
        return cls(encode, marks)

    def encode(self, texts: Sequence[str]) -> TokenRows:
        words = [text.split() for text in texts]
        for index in self._unusual(texts):
            words[index] = [_WHOLE + texts[index]]
        counts = np.fromiter(map(len, words), np.int64, len(words))
        with self._lock:
            if len(self._index) > _MAX_WORDS or self._num_chars > _MAX_WORD_CHARS:
                self._reset()
            found = np.fromiter(
                map(self._index.__getitem__, chain.from_iterable(words)), np.int64, counts.sum()
            )
            self._learn()
            lengths, starts = self._lengths[found], self._starts[found]
            ends = np.concatenate(([0], np.cumsum(lengths)))
            token_ids = self._ids[np.repeat(starts - ends[:-1], lengths) + np.arange(ends[-1])]
        row_ends = ends[np.concatenate(([0], np.cumsum(counts)))]
        return TokenRows(token_ids, np.diff(row_ends).astype(np.int32))

    def _unusual(self, texts: Sequence[str]) -> list[int]:
        """The texts that are tokenised whole. One look at all of them rules out most lists."""
        if all(map(str.isascii, texts)):
            chars = np.frombuffer(" ".join(texts).encode("ascii"), dtype=np.uint8)
            if self._is_plain[chars].all():
                return []
        return [index for index, text in enumerate(texts) if self._not_plain.search(text) is not None]

    def _reset(self) -> None:
        self._index = _WordIndex()
        self._num_chars = 0
        self._ids = np.empty(0, dtype=np.int32)  # tokens of all known words
        self._starts = np.empty(0, dtype=np.int64)  # [words], of each in `_ids`
        self._lengths = np.empty(0, dtype=np.int64)

    def _learn(self) -> None:
        """Tokenise the words that were new."""
        if not (new := self._index.new):
            return
        self._index.new = []
        try:
            rows = self._encode([word.removeprefix(_WHOLE) for word in new])
        except BaseException:
            self._reset()  # words without tokens must not stay known
            raise
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        starts = len(self._ids) + np.cumsum(lengths) - lengths
        self._starts = np.concatenate((self._starts, starts))
        self._lengths = np.concatenate((self._lengths, lengths))
        self._ids = np.concatenate((self._ids, *rows))
        self._num_chars += sum(map(len, new))


class _WordIndex(dict[str, int]):
    """The number of each word. A word that is asked for the first time gets the next number."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self.new.append(word)
        self[word] = number = len(self)
        return number
