"""Tokenises texts word by word, with the tokens of known words from memory.

A BERT tokenizer splits a text at its spaces before anything else looks at it, so its tokens are those of its
words. A word that was seen before costs one look-up; new ones are given to the tokenizer itself. This takes a
tenth of the tokenizer's time. The tokens are always the tokenizer's own: a text for which this cannot be
known beforehand, because it has control characters, unusual letters or a special token, is tokenised whole.
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

MAX_TEXT_CHARS = 1 << 14  # longer texts are left to the tokenizer
_MAX_WORDS = 1 << 17  # known words
_MANY_WORDS = 8  # that are new, and half of a text's: it is tokenised whole, and as many are learnt
_MAX_WORD_CHARS = 64  # of a word that is kept; longer ones hardly come again
_MARKS = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_PLAIN = bytes((*b"\t\n\r", *range(32, 127)))
# Letters and marks of European scripts: none is a space, a control character or an accent of its own.
_LETTERS = (
    "\u00a1-\u00ac\u00ae-\u02ff"  # Latin; a soft hyphen is left out of words
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
        finds_as_given: bool,
    ) -> None:
        """`rust` gives the tokens of words, and `encode` those of texts. Texts with a token of `added` are
        tokenised whole. `finds_as_given`: they are looked for in the text itself, before its accents are
        gone."""
        self._rust = rust
        self._encode = encode
        added = sorted(added)
        self._marks = bytes({ord(next(char for char in token if char in _MARKS)) for token in added})
        self._unmarked = bytes(set(_PLAIN) - set(self._marks))
        self._added = re.compile("|".join(map(re.escape, added)) or "(?!)", re.IGNORECASE)
        codes = _PLAIN if finds_as_given else self._unmarked
        plain = "".join(re.escape(chr(code)) for code in codes)
        self._not_plain = re.compile(f"[^{plain}{_LETTERS}]")
        self._forget()

    @classmethod
    def of(cls, rust: RustTokenizer, encode: Callable[[list[str]], list[Ints]]) -> WordTokenizer | None:
        """None if the tokenizer is of another kind, or special tokens may hide in plain words."""
        is_bert = (
            _is_berts(rust.normalizer)
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
        return cls(rust, encode, added, finds_as_given=not any(token.normalized for token in tokens))

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
                except TypeError:  # a word is not known
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
        """Tokenise the texts that have no row yet, and learn new words of plain ones."""
        known, new = self._known, dict[str, None]()
        whole: list[int] = []
        plain: list[tuple[int, list[str]]] = []
        for index, words in missing:
            own = [word for word in words or () if word not in known]
            if words is None or len(own) > max(_MANY_WORDS, len(words) // 2):
                whole.append(index)
                own = own[:_MANY_WORDS]
            else:
                plain.append((index, words))
            new.update(dict.fromkeys(own))
        if whole:
            for index, row in zip(whole, self._encode([texts[index] for index in whole]), strict=True):
                rows[index] = row.tobytes()
        found = self._encode_new(new)
        for index, own in plain:  # another thread may forget all words meanwhile, but not those of `known`
            rows[index] = b"".join([found[word] if word in found else known[word] for word in own])
        self._learn({word: row for word, row in found.items() if len(word) <= _MAX_WORD_CHARS})

    def _encode_new(self, words: Iterable[str]) -> dict[str, bytes]:
        """The tokens of each word, all from one call: a call takes longer than a word."""
        if not (listed := list(words)):
            return {}
        encoded = self._rust.encode(listed, is_pretokenized=True, add_special_tokens=False)
        rows: list[list[int]] = [[] for _ in listed]
        for token, owner in zip(encoded.ids, encoded.word_ids, strict=True):
            assert owner is not None  # it would be a special token
            rows[owner].append(token)
        return {word: array("i", row).tobytes() for word, row in zip(listed, rows, strict=True)}

    def _learn(self, found: dict[str, bytes]) -> None:
        if len(self._known) + len(found) > _MAX_WORDS:
            self._forget()
        self._known.update(found)

    def _forget(self) -> None:
        """Know no words. What another thread reads stays as it is."""
        self._known: dict[str, bytes] = {}
        self._tokens_of = self._known.get


def _is_berts(normalizer: normalizers.Normalizer | None) -> bool:
    """Whether texts are normalised as BERT's are, or lower-cased and then so, as the settings of many
    embedders ask. Both look at one character at a time, and no space comes or goes."""
    if isinstance(normalizer, normalizers.Sequence):
        steps = msgspec.json.decode(normalizer.__getstate__())["normalizers"]
        return [step["type"] for step in steps] == ["Lowercase", "BertNormalizer"]
    return isinstance(normalizer, normalizers.BertNormalizer)
