"""Tokenises texts word by word, with a cache of the tokens of words.

A BERT tokenizer splits a text at spaces first, so the tokens of a text are those of its words. A cached word
costs one look-up; new words go to the tokenizer. This takes a tenth of the tokenizer's time. The tokens are
always the tokenizer's own: texts with control characters, unusual letters or special tokens are tokenised
whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from penstock.inputs.token_rows import TokenRows
from penstock.types import Ints

MAX_TEXT_CHARS = 1 << 14  # longer texts go to the tokenizer whole
_MAX_CACHED_WORDS = 1 << 17
# A text with more new words than this, if they are over half of its words, is tokenised whole. Only this many
# of its new words are cached.
_MANY_NEW_WORDS = 8
_MAX_WORD_CHARS = 64  # longer words are not cached, because they rarely repeat
_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_PLAIN = bytes((*b"\t\n\r", *range(32, 127)))
# Letters and punctuation of European scripts, without spaces, control characters and combining accents.
_LETTERS = (
    "\u00a1-\u00ac\u00ae-\u02ff"  # Latin, without the soft hyphen, which tokenizers remove
    "\u0391-\u03a1\u03a3-\u03ff\u0400-\u0482\u048a-\u052f"  # Greek, Cyrillic
    "\u2010-\u2027\u2030-\u205e\u20ac"  # dashes, quotation marks, the euro sign
)


class WordTokenizer:
    """Tokens of whole texts without special tokens. Safe to call from several threads."""

    def __init__(
        self,
        rust: RustTokenizer,
        encode: Callable[[list[str]], list[Ints]],
        added: Iterable[str],
        *,
        matches_raw_text: bool,
    ) -> None:
        """`rust` tokenises words, and `encode` whole texts. Texts with a token of `added` are tokenised
        whole. `matches_raw_text`: the tokenizer looks for these tokens before it normalises the text."""
        self._rust = rust
        self._encode = encode
        added = sorted(added)
        self._marks = bytes({ord(next(char for char in token if char in _MARKS)) for token in added})
        self._unmarked = bytes(set(_PLAIN) - set(self._marks))
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)", re.IGNORECASE)
        codes = _PLAIN if matches_raw_text else self._unmarked
        plain = "".join(re.escape(chr(code)) for code in codes)
        self._not_plain = re.compile(f"[^{plain}{_LETTERS}]")
        self._clear_cache()

    @classmethod
    def of(cls, rust: RustTokenizer, encode: Callable[[list[str]], list[Ints]]) -> WordTokenizer | None:
        """None if the tokenizer is not BERT's, or if plain words may contain special tokens."""
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
        missing: list[tuple[int, list[str] | None]] = []  # text, and its words if it is plain
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
        """Whether the tokens of a text are certain to be those of its words."""
        if not text.isascii():
            return self._not_plain.search(text) is None and self._added.search(text) is None
        if not (rest := text.encode("ascii").translate(None, self._unmarked)):
            return True
        return not rest.translate(None, self._marks) and self._added.search(text) is None

    def _fill(
        self, texts: Sequence[str], rows: list[bytes], missing: list[tuple[int, list[str] | None]]
    ) -> None:
        """Tokenise the texts that have no row yet, and cache the new words of plain texts."""
        cached, new = self._cache, dict[str, None]()
        whole: list[int] = []
        plain: list[tuple[int, list[str]]] = []
        for index, words in missing:
            uncached = [word for word in words or () if word not in cached]
            if words is None or len(uncached) > max(_MANY_NEW_WORDS, len(words) // 2):
                whole.append(index)
                uncached = uncached[:_MANY_NEW_WORDS]
            else:
                plain.append((index, words))
            new.update(dict.fromkeys(uncached))
        if whole:
            for index, row in zip(whole, self._encode([texts[index] for index in whole]), strict=True):
                rows[index] = row.tobytes()
        found = self._encode_new(new)
        for index, words in plain:  # another thread may replace the cache meanwhile; `cached` stays as it is
            rows[index] = b"".join([found[word] if word in found else cached[word] for word in words])
        self._add({word: row for word, row in found.items() if len(word) <= _MAX_WORD_CHARS})

    def _encode_new(self, words: Iterable[str]) -> dict[str, bytes]:
        """The tokens of each word, from one call, because a call costs more than a word."""
        if not (listed := list(words)):
            return {}
        encoded = self._rust.encode(listed, is_pretokenized=True, add_special_tokens=False)
        rows: list[list[int]] = [[] for _ in listed]
        for token, owner in zip(encoded.ids, encoded.word_ids, strict=True):
            assert owner is not None  # it would be a special token
            rows[owner].append(token)
        return {word: array("i", row).tobytes() for word, row in zip(listed, rows, strict=True)}

    def _add(self, found: dict[str, bytes]) -> None:
        if len(self._cache) + len(found) > _MAX_CACHED_WORDS:
            self._clear_cache()
        self._cache.update(found)

    def _clear_cache(self) -> None:
        """Start an empty cache. Other threads may still read the old one."""
        self._cache: dict[str, bytes] = {}
        self._tokens_of = self._cache.get


def _normalizes_like_bert(normalizer: normalizers.Normalizer | None) -> bool:
    """Whether the normalizer is BERT's, alone or after lower-casing, which many embedders add. Both work
    character by character and neither add nor remove spaces."""
    if isinstance(normalizer, normalizers.Sequence):
        steps = msgspec.json.decode(normalizer.__getstate__())["normalizers"]
        return [step["type"] for step in steps] == ["Lowercase", "BertNormalizer"]
    return isinstance(normalizer, normalizers.BertNormalizer)
