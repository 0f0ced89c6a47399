"""Tokenises texts word by word, with a cache of the tokens of words.

A BERT tokenizer first splits a text at spaces, so the tokens of a text are those of its words. A cached word
costs one look-up. A new word is split at punctuation, as in the tokenizer, and its parts are looked up in the
vocabulary. This takes a tenth of the tokenizer's time. The tokens are always equal to the tokenizer's own:
words with non-ASCII letters are passed to it, and texts with control characters, unusual letters or special
tokens are tokenised whole.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from penstock.inputs.token_rows import TokenRows
from penstock.types import Ints

MAX_TEXT_CHARS = 1 << 14  # longer texts are tokenised whole
_MAX_CACHED_WORDS = 1 << 17
_MAX_LEARNED_PARTS = 1 << 16  # cached parts of words that are not tokens of the vocabulary
# A text is tokenised whole if it has more unknown parts than this, and more than half as many as words. Only
# this many of its parts are cached.
_MANY_NEW_PARTS = 8
_MAX_WORD_CHARS = 64  # longer words are not cached, because they rarely repeat
_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_PARTS = re.compile("[a-zA-Z0-9]+|[^a-zA-Z0-9]")  # parts of an ASCII word: tokenizers isolate punctuation
_PLAIN = bytes((*b"\t\n\r", *range(32, 127)))
# Letters and punctuation of European scripts, without spaces, control characters and combining accents.
_LETTERS = (
    "\u00a1-\u00ac\u00ae-\u02ff"  # Latin, without the soft hyphen, which tokenizers remove
    "\u0391-\u03a1\u03a3-\u03ff\u0400-\u0482\u048a-\u052f"  # Greek, Cyrillic
    "\u2010-\u2027\u2030-\u205e\u20ac"  # dashes, quotation marks, the euro sign
)


class _NewWords(NamedTuple):
    """Words that are not cached and have unknown parts."""

    words: dict[str, list[str]]  # word → all of its parts
    parts: dict[str, None]  # the unknown parts


class WordTokenizer:
    """Tokenises texts, without special tokens. Thread-safe."""

    def __init__(
        self,
        rust: RustTokenizer,
        encode: Callable[[list[str]], list[Ints]],
        added: Iterable[str],
        *,
        matches_raw_text: bool,
    ) -> None:
        """`rust` tokenises words, and `encode` whole texts.

        Texts with a token of `added` are tokenised whole. `matches_raw_text`: the tokenizer searches for
        these tokens before it normalises the text.
        """
        self._rust = rust
        self._encode = encode
        added = sorted(added)
        self._marks = bytes({ord(next(char for char in token if char in _MARKS)) for token in added})
        self._mark_chars = self._marks.decode("ascii")
        self._unmarked = bytes(set(_PLAIN) - set(self._marks))
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)", re.IGNORECASE)
        self._lower_added = [token.lower() for token in added]
        codes = _PLAIN if matches_raw_text else self._unmarked
        plain = "".join(re.escape(chr(code)) for code in codes)
        self._not_plain = re.compile(f"[^{plain}{_LETTERS}]")
        self._lowercases = _lowercases(rust.normalizer)
        self._max_part_chars = min(_MAX_WORD_CHARS, rust.model.max_input_chars_per_word)
        self._first_pieces, self._next_pieces = _read_pieces(rust, self._max_part_chars)
        self._max_piece_chars = max(map(len, [*self._first_pieces, *self._next_pieces]), default=0)
        self._parts = dict(self._first_pieces)
        self._tokens_of_part = self._parts.get
        self._max_parts = len(self._parts) + _MAX_LEARNED_PARTS
        self._clear_cache()

    @classmethod
    def of(cls, rust: RustTokenizer, encode: Callable[[list[str]], list[Ints]]) -> WordTokenizer | None:
        """Create one; None if the tokenizer is not BERT's, or if plain words may contain special tokens."""
        is_bert = (
            _normalizes_like_bert(rust.normalizer)
            and isinstance(rust.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and isinstance(rust.model, models.WordPiece)
        )
        if not is_bert:
            return None
        tokens = rust.get_added_tokens_decoder().values()
        added = [token.content for token in tokens]
        if not all(token.isascii() and token.split() == [token] for token in added):
            return None
        if any(_MARKS.isdisjoint(token) for token in added):
            return None
        return cls(rust, encode, added, matches_raw_text=not any(token.normalized for token in tokens))

    def encode(self, texts: Sequence[str]) -> TokenRows:
        rows = self.encode_rows(texts)
        lengths = np.fromiter(map(len, rows), np.int32, len(rows)) // 4
        return TokenRows(np.frombuffer(b"".join(rows), dtype=np.int32), lengths)

    def encode_rows(self, texts: Sequence[str]) -> list[bytes]:
        """The tokens of each text, as the bytes of int32."""
        rows: list[bytes] = []
        missing: list[tuple[int, list[str] | None]] = []  # index of a text, and its words if it is plain
        tokens_of = self._tokens_of
        for text in texts:
            words = text.split() if self._is_plain(text) else None
            if words is not None:
                try:
                    rows.append(b"".join(map(tokens_of, words)))  # type: ignore[arg-type]
                    continue
                except TypeError:  # a word is not cached
                    pass
            missing.append((len(rows), words))
            rows.append(b"")
        if missing:
            self._fill(texts, rows, missing)
        return rows

    def _is_plain(self, text: str) -> bool:
        """Whether the tokens of a text certainly are those of its words."""
        if not text.isascii():
            return self._not_plain.search(text) is None and self._added.search(text) is None
        if text.isprintable():  # of ASCII: no control characters
            return not self._has_added(text)
        rest = text.encode("ascii").translate(None, self._unmarked)
        return not rest or (not rest.translate(None, self._marks) and not self._has_added(text))

    def _has_added(self, text: str) -> bool:
        """Whether `_added` finds something in a text in ASCII, in a quarter of its time."""
        for mark in self._mark_chars:
            if mark in text:
                break
        else:
            return False
        lower = text.lower()
        for token in self._lower_added:  # noqa: SIM110 — `any` would take twice as long
            if token in lower:
                return True
        return False

    def _fill(
        self, texts: Sequence[str], rows: list[bytes], missing: list[tuple[int, list[str] | None]]
    ) -> None:
        """Tokenise the texts without a row, and cache the new words of plain texts."""
        cached, found = self._cache, dict[str, bytes]()
        new = _NewWords({}, {})
        whole: list[int] = []
        plain: list[tuple[int, list[str]]] = []
        for index, words in missing:
            if words is None:
                whole.append(index)
                continue
            of_text = self._look_up([word for word in words if word not in cached], found)
            if len(of_text.parts) > max(_MANY_NEW_PARTS, len(words) // 2):
                whole.append(index)
                new.parts.update(islice(of_text.parts.items(), _MANY_NEW_PARTS))
            else:
                plain.append((index, words))
                new.parts.update(of_text.parts)
                new.words.update(of_text.words)
        if whole:
            for index, row in zip(whole, self._encode([texts[index] for index in whole]), strict=True):
                rows[index] = row.tobytes()
        learned = self._encode_new(new.parts)
        for word, parts in new.words.items():
            tokens = (learned[part] if part in learned else self._tokens_of_part(part) for part in parts)
            found[word] = b"".join(tokens)  # type: ignore[arg-type]
        for index, words in plain:  # another thread may replace the cache; `cached` stays valid
            rows[index] = b"".join([found[word] if word in found else cached[word] for word in words])
        self._add(found, learned)

    def _look_up(self, words: Iterable[str], found: dict[str, bytes]) -> _NewWords:
        """Add the tokens of words whose parts are known to `found`. Return the other words."""
        new = _NewWords({}, {})
        for word in words:
            if word in found:
                continue
            parts = self._split(word)
            try:
                found[word] = b"".join(map(self._tokens_of_part, parts))  # type: ignore[arg-type]
            except TypeError:  # a part is unknown
                new.words[word] = parts
                new.parts.update({part: None for part in parts if self._tokens_of_part(part) is None})
        return new

    def _split(self, word: str) -> list[str]:
        """Split a word as the tokenizer does, into runs of letters and digits, and single punctuation marks.

        A word with non-ASCII letters is not split here.
        """
        if not word.isascii():
            return [word]
        if self._lowercases:
            word = word.lower()
        return [word] if word.isalnum() else _PARTS.findall(word)

    def _encode_new(self, parts: Iterable[str]) -> dict[str, bytes]:
        """The tokens of each part of a word that is not itself in the vocabulary."""
        rows: dict[str, bytes] = {}
        others: list[str] = []
        for part in parts:
            if part.isascii() and (row := self._pieces(part)) is not None:
                rows[part] = row
            else:
                others.append(part)
        if others:
            rows |= self._encode_parts(others)
        return rows

    def _pieces(self, part: str) -> bytes | None:
        """Apply WordPiece to an ASCII part: the longest first token, then the longest continuations.

        For a few parts this is faster than a call of the tokenizer. None: the part has no tokens.
        """
        if len(part) > self._max_part_chars:
            return None
        row, begin, tokens = b"", 0, self._first_pieces
        while begin < len(part):
            for end in range(min(len(part), begin + self._max_piece_chars), begin, -1):
                if (piece := tokens.get(part[begin:end])) is not None:
                    break
            else:
                return None
            row, begin, tokens = row + piece, end, self._next_pieces
        return row

    def _encode_parts(self, parts: list[str]) -> dict[str, bytes]:
        """The tokens of each part, from one call of the tokenizer."""
        encoded = self._rust.encode(parts, is_pretokenized=True, add_special_tokens=False)
        rows: list[list[int]] = [[] for _ in parts]
        for token, owner in zip(encoded.ids, encoded.word_ids, strict=True):
            assert owner is not None  # only special tokens have no owner
            rows[owner].append(token)
        return {part: array("i", row).tobytes() for part, row in zip(parts, rows, strict=True)}

    def _add(self, words: dict[str, bytes], parts: dict[str, bytes]) -> None:
        """Cache the tokens of words and parts.

        A full cache of words is cleared. A full cache of parts keeps its entries: the vocabulary, and the
        earliest parts, which repeat most.
        """
        if len(self._cache) + len(words) > _MAX_CACHED_WORDS:
            self._clear_cache()
        self._cache.update({word: row for word, row in words.items() if len(word) <= _MAX_WORD_CHARS})
        if len(self._parts) + len(parts) <= self._max_parts:
            self._parts.update({part: row for part, row in parts.items() if len(part) <= _MAX_WORD_CHARS})

    def _clear_cache(self) -> None:
        """Start an empty cache. Other threads may still read the old one."""
        self._cache: dict[str, bytes] = {}
        self._tokens_of = self._cache.get


def _normalizes_like_bert(normalizer: normalizers.Normalizer | None) -> bool:
    """Whether the normalizer is BERT's, alone or after lower-casing, which many embedders add.

    Both work character by character, and neither adds nor removes spaces.
    """
    if isinstance(normalizer, normalizers.Sequence):
        steps = msgspec.json.decode(normalizer.__getstate__())["normalizers"]
        return [step["type"] for step in steps] == ["Lowercase", "BertNormalizer"]
    return isinstance(normalizer, normalizers.BertNormalizer)


def _lowercases(normalizer: normalizers.Normalizer | None) -> bool:
    if isinstance(normalizer, normalizers.BertNormalizer):
        return bool(normalizer.lowercase)
    return True  # a sequence that begins with lower-casing


def _read_pieces(rust: RustTokenizer, max_chars: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The vocabulary's tokens that can begin, and those that can continue, an ASCII part of a word.

    A part has letters and digits, or is a punctuation mark. First tokens have at most `max_chars` characters.
    """
    first, following = dict[str, bytes](), dict[str, bytes]()
    prefix = rust.model.continuing_subword_prefix
    for token, number in rust.get_vocab(with_added_tokens=False).items():
        if not token.isascii():
            continue
        row, rest = number.to_bytes(4, sys.byteorder), token.removeprefix(prefix)
        if (token.isalnum() or token in _MARKS) and len(token) <= max_chars:
            first[token] = row
        if token.startswith(prefix) and rest.isalnum():
            following[rest] = row
    return first, following
