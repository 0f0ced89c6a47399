"""Tokenises texts with the model's own `tokenizer.json`, in batches and without holding the GIL."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from penstock.checkpoint.convert import tokenizer_file
from penstock.checkpoint.files import optional_json
from penstock.checkpoint.tokenizer_settings import (
    BertNormalization,
    TextFrame,
    read_bert_normalization,
    read_prefix_space,
    read_text_frame,
)
from penstock.errors import BadValue, ModelLoadError
from penstock.inputs.long_texts import (
    MAX_WINDOW_CHARS,
    RowLimit,
    max_chars,
    needed_pieces,
    num_chars,
    windows,
)
from penstock.inputs.words import MAX_TEXT_CHARS, WordTokenizer
from penstock.types import Ints

log = logging.getLogger(__name__)
TokenStyle = Literal["byte_level", "metaspace", "wordpiece", "plain"]
_MAX_THREAD_CHARS = 1024  # up to this size, texts are tokenised one by one on the caller's thread
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte-fallback token


class EncodedText(NamedTuple):
    """The tokens of a text with their character offsets."""

    ids: Ints  # [tokens]
    offsets: Ints  # [tokens, 2], characters; (0, 0) for special tokens
    words: Ints  # [tokens], index of the word; -1 for special tokens


class EncodedWords(NamedTuple):
    """The tokens of a text that was already split into words."""

    ids: Ints  # [tokens]
    words: Ints  # [tokens], index of the word


class PairFrame(NamedTuple):
    """The special tokens before, between and after the two texts of a pair."""

    before: Ints
    between: Ints
    after: Ints
    segments: Ints  # segment id of each of those tokens and of the two texts, in order

    @property
    def size(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class Tokenizer:
    """Encodes whole texts. `truncation` truncates rows, because the limit differs by request."""

    def __init__(self, folder: Path) -> None:
        file = tokenizer_file(folder)
        try:
            self._rust = RustTokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{file} is not a tokenizer: {error}") from None
        self._warn_of_truncation(folder, file)
        self._rust.no_truncation()
        self._rust.no_padding()
        if (wanted := read_bert_normalization(folder)) is not None:
            self._normalize_as(wanted, file)
        if (adds := read_prefix_space(folder)) is not None:
            self._begin_with_space(adds, file)
        if (frame := read_text_frame(folder)) is not None:
            self._add_frame(frame, file)
        self.vocab_size = self._rust.get_vocab_size(with_added_tokens=True)
        self.prefix, self.suffix = self._special_frame()
        self._token_bytes: dict[int, bytes] = {}

    def _normalize_as(self, wanted: BertNormalization, file: Path) -> None:
        """Use the options of tokenizer_config.json if tokenizer.json has BERT's normaliser with others."""
        found = self._rust.normalizer
        if not isinstance(found, normalizers.BertNormalizer):
            return
        given = BertNormalization(found.lowercase, found.strip_accents, found.handle_chinese_chars)
        if given == wanted:
            return
        log.warning(
            "%s has the options %s, but tokenizer_config.json asks for %s. Texts are read as it asks, as "
            "transformers does",
            file,
            given._asdict(),
            wanted._asdict(),
        )
        self._rust.normalizer = normalizers.BertNormalizer(clean_text=found.clean_text, **wanted._asdict())

    def _warn_of_truncation(self, folder: Path, file: Path) -> None:
        """Warn about files that set truncation on the left, which only requests can select here."""
        named = optional_json(folder / "tokenizer_config.json").get("truncation_side")
        named = named or (self._rust.truncation or {}).get("direction", "right")
        if str(named).lower() == "left":
            log.warning(
                "%s is meant to truncate texts on the left, which transformers does. Requests that truncate "
                "have to say so: truncation_side = left",
                file.parent,
            )

    def _begin_with_space(self, adds: bool, file: Path) -> None:
        found = self._rust.pre_tokenizer
        if not isinstance(found, pre_tokenizers.ByteLevel) or found.add_prefix_space == adds:
            return
        log.warning(
            "%s has add_prefix_space = %s, but tokenizer_config.json asks for %s. Texts are read as it asks, "
            "as transformers does",
            file,
            found.add_prefix_space,
            adds,
        )
        self._rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds, use_regex=found.use_regex)

    @property
    def max_token_id(self) -> int:
        """The largest token id that a text can contain. Added tokens may have ids beyond `vocab_size`."""
        return max(self.vocab_size - 1, *self._rust.get_added_tokens_decoder(), -1)

    def lower_case(self) -> None:
        """Lower-case texts before any other normalisation. Special tokens in a text are not changed."""
        first, rest = normalizers.Lowercase(), self._rust.normalizer
        self._rust.normalizer = first if rest is None else normalizers.Sequence([first, rest])
        self.__dict__.pop("words", None)

    def strip_punctuation(self) -> None:
        """Remove ASCII punctuation and extra white space before any other normalisation."""
        steps = [
            normalizers.Replace(Regex(rf"[{re.escape(string.punctuation)}]"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
        rest = self._rust.normalizer
        self._rust.normalizer = normalizers.Sequence(steps if rest is None else [*steps, rest])
        self.__dict__.pop("words", None)

    def without_special_tokens(self) -> None:
        """Never add special tokens to a text, even if a caller requests them."""
        self._rust.post_processor = processors.TemplateProcessing(
            single="$A", pair="$A $B", special_tokens=[]
        )
        self.prefix = self.suffix = 0
        for name in ("frame", "_frame_bytes"):
            self.__dict__.pop(name, None)

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of the unknown token; None if there is none."""
        if hasattr(self._rust.model, "unk_token"):
            token = self._rust.model.unk_token
            return None if token is None else self.token_id(token)
        unknown: int | None = msgspec.json.decode(self._rust.to_str())["model"].get("unk_id")  # Unigram
        return unknown

    @cached_property
    def words(self) -> WordTokenizer | None:
        """Tokenises texts word by word, without special tokens; None if this tokenizer cannot be split so."""
        return WordTokenizer.of(self._rust, partial(self._encode_whole, add_special_tokens=False))

    def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, limit: RowLimit | None = None
    ) -> list[Ints]:
        """The tokens of each text.

        With a limit, a text that is far too long is rejected or only partly tokenised. A partial row has the
        tokens that truncation keeps, and at least one more.
        """
        if (size := num_chars(texts)) <= (MAX_WINDOW_CHARS if limit is None else limit.max_whole_chars):
            return self._encode(texts, add_special_tokens, size)
        rows: list[Ints] = []
        for window in windows(texts):
            if max_chars(window) <= _max_whole_chars(limit):
                new = self._encode(window, add_special_tokens)
            else:
                new = [
                    self._encode_long(text, add_special_tokens, limit, len(rows) + at)
                    if len(text) > _max_whole_chars(limit)
                    else self._encode([text], add_special_tokens)[0]
                    for at, text in enumerate(window)
                ]
            if limit is not None and not limit.truncates:  # stop early if a row is too long
                limit.reject_long(new, len(rows))
            rows += new
        return rows

    def _encode(
        self, texts: Sequence[str], add_special_tokens: bool, max_size: int | None = None
    ) -> list[Ints]:
        """The tokens of texts, word by word if possible.

        `max_size` is an upper bound on the characters of a text; None: unknown.
        """
        if max_size is None or max_size > MAX_TEXT_CHARS:
            max_size = max_chars(texts)
        if self.words is None or max_size > MAX_TEXT_CHARS:
            return self._encode_whole(texts, add_special_tokens)
        rows = self.words.encode_rows(texts)
        if add_special_tokens:
            begin, end = self._frame_bytes
            return [np.frombuffer(begin + row + end, dtype=np.int32) for row in rows]
        return [np.frombuffer(row, dtype=np.int32) for row in rows]

    def _encode_whole(self, texts: Sequence[str], add_special_tokens: bool) -> list[Ints]:
        encode = partial(self._rust.encode_batch_fast, add_special_tokens=add_special_tokens)
        try:
            if num_chars(texts) > _MAX_THREAD_CHARS:
                encodings = encode(list(texts))
            else:  # for a list of several texts, the tokenizer uses other threads, which takes longer
                encodings = [encoding for text in texts for encoding in encode([text])]
        except (TypeError, UnicodeEncodeError) as error:
            raise BadValue(f"the text cannot be encoded: {error}", param="input") from None
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _encode_long(self, text: str, add_special_tokens: bool, limit: RowLimit | None, index: int) -> Ints:
        pieces = needed_pieces(self._encode_bare, text, limit, index)
        ids = [piece.ids for piece in pieces]
        return np.concatenate([self.frame[0], *ids, self.frame[1]] if add_special_tokens else ids)

    def _encode_bare(self, texts: list[str]) -> list[Ints]:
        return self._encode(texts, add_special_tokens=False)

    def encode_with_offsets(
        self, texts: Sequence[str], add_special_tokens: bool = True, limit: RowLimit | None = None
    ) -> list[EncodedText]:
        """Token ids with their character offsets. This is slower than `encode`."""
        if limit is None or num_chars(texts) <= limit.max_whole_chars:
            return self._encode_located(texts, add_special_tokens)
        rows: list[EncodedText] = []
        for window in windows(texts):
            for text in window:
                if len(text) > limit.max_whole_chars:
                    rows.append(self._locate_long(text, add_special_tokens, limit, len(rows)))
                else:
                    rows += self._encode_located([text], add_special_tokens)
        return rows

    def _encode_located(self, texts: Sequence[str], add_special_tokens: bool) -> list[EncodedText]:
        try:
            encodings = self._rust.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadValue(f"the text cannot be encoded: {error}", param="input") from None
        return [
            EncodedText(
                np.array(encoding.ids, dtype=np.int32),
                np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
                np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int32),
            )
            for encoding in encodings
        ]

    def _locate_long(self, text: str, add_special_tokens: bool, limit: RowLimit, index: int) -> EncodedText:
        ((start, end, _),) = needed_pieces(self._encode_bare, text, limit, index)
        (found,) = self._encode_located([text[start:end]], add_special_tokens)
        return EncodedText(
            found.ids, np.where(found.words[:, None] < 0, 0, found.offsets + start), found.words
        )

    def encode_words(self, rows: Sequence[Sequence[str]]) -> list[EncodedWords]:
        """The tokens of lists of words, which are tokenised one by one, without special tokens."""
        try:
            encodings = self._rust.encode_batch(
                [list(row) for row in rows], is_pretokenized=True, add_special_tokens=False
            )
        except (TypeError, UnicodeEncodeError) as error:
            raise BadValue(f"the text cannot be encoded: {error}", param="input") from None
        return [
            EncodedWords(np.array(each.ids, dtype=np.int32), np.array(each.word_ids, dtype=np.int32))
            for each in encodings
        ]

    def add_special_tokens(self, tokens: Sequence[str]) -> None:
        """Add tokens with the next free ids. Tokens that the vocabulary already has are not changed."""
        self._rust.add_special_tokens(list(tokens))
        self.__dict__.pop("words", None)
        self.vocab_size = self._rust.get_vocab_size(with_added_tokens=True)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_rows(self, rows: Sequence[list[int]], skip_special_tokens: bool = False) -> list[str]:
        """The text of each row. Unlike `decode`, this releases the GIL."""
        return self._rust.decode_batch(list(rows), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._rust.token_to_id(token)
        return token_id

    def token_strings(self, ids: Sequence[int]) -> list[str | None]:
        return [self._rust.id_to_token(int(i)) for i in ids]

    @cached_property
    def byte_level(self) -> bool:
        """Whether a text's bytes are the concatenated bytes of its tokens."""
        return isinstance(self._rust.decoder, decoders.ByteLevel)

    @cached_property
    def token_style(self) -> TokenStyle:
        """How the vocabulary represents spaces, parts of words and bytes."""
        decoder = self._rust.decoder
        if decoder is None:
            return "wordpiece" if type(self._rust.model).__name__ == "WordPiece" else "plain"
        settings = msgspec.json.decode(decoder.__getstate__())
        kinds = {part["type"]: part for part in settings.get("decoders", [settings])}
        if "ByteLevel" in kinds:
            return "byte_level"
        if "WordPiece" in kinds:
            return "wordpiece"
        space_mark = kinds.get("Replace", {}).get("pattern", {}).get("String")
        return "metaspace" if "Metaspace" in kinds or space_mark == "\u2581" else "plain"

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token, table = self._rust.id_to_token(token_id) or "", byte_table()
            is_encoded = all(char in table for char in token)  # an added token may be plain text
            found = bytes(table[char] for char in token) if is_encoded else token.encode()
            self._token_bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """A token's text within a sentence, with its leading space."""
        text = self.decode([token_id])
        needs_space = (self._rust.id_to_token(token_id) or "").startswith("\u2581") and not text.startswith(
            " "
        )
        return f" {text}" if needs_space else text

    def token_raw_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be only part of a character."""
        if self.byte_level:
            return self.token_bytes(token_id)
        if found := _BYTE.fullmatch(self._rust.id_to_token(token_id) or ""):
            return bytes([int(found.group(1), 16)])
        return self.token_text(token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_ids.tolist())

    @cached_property
    def special_ids(self) -> Ints:
        """Ids of special tokens, such as [CLS] and [UNK]."""
        added = self._rust.get_added_tokens_decoder()
        return np.array(sorted(number for number, token in added.items() if token.special), dtype=np.int32)

    @cached_property
    def frame(self) -> tuple[Ints, Ints]:
        """The special tokens before and after a text."""
        ids = np.array(self._rust.encode("a", add_special_tokens=True).ids, dtype=np.int32)
        return ids[: self.prefix], ids[len(ids) - self.suffix :]

    @cached_property
    def _frame_bytes(self) -> tuple[bytes, bytes]:
        begin, end = self.frame
        return begin.tobytes(), end.tobytes()

    @cached_property
    def pair_frame(self) -> PairFrame:
        """The special tokens of the tokenizer's own pair template."""
        first, second = (self._rust.encode(text, add_special_tokens=False).ids for text in ("a", "b"))
        whole = self._rust.encode("a", "b", add_special_tokens=True)
        ids, kinds = whole.ids, whole.type_ids
        at = _find(ids, first, 0)
        then = -1 if at < 0 else _find(ids, second, at + len(first))
        if then < 0:
            raise ModelLoadError(
                "the tokenizer's pair template changes the tokens of the texts; this is not supported"
            )
        ends = at + len(first), then + len(second)
        before, between, after = ids[:at], ids[ends[0] : then], ids[ends[1] :]
        segments = kinds[: at + 1] + kinds[ends[0] : then + 1] + kinds[ends[1] :]
        return PairFrame(*(np.array(part, dtype=np.int32) for part in (before, between, after, segments)))

    def truncate(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """The texts, each truncated to its first `max_tokens` tokens."""
        limit = RowLimit(max_tokens, truncates=True, name="text")
        found = self.encode_with_offsets(texts, add_special_tokens=False, limit=limit)
        return [
            text if len(row.ids) <= max_tokens else text[: int(row.offsets[max_tokens - 1, 1])]
            for text, row in zip(texts, found, strict=True)
        ]

    def begin_with(self, token: str) -> None:
        """Add only this token, before each text, instead of the special tokens in the model's files."""
        if (number := self._rust.token_to_id(token)) is None:
            raise ModelLoadError(
                f"the tokenizer has no token {token!r}, with which texts begin", param="model"
            )
        self._set_frame([token], [], {token: number})
        self.prefix, self.suffix = 1, 0
        self.__dict__.pop("frame", None)

    def _add_frame(self, frame: TextFrame, file: Path) -> None:
        """Frame texts as tokenizer_config.json requires, instead of as tokenizer.json does."""
        ids: dict[str, int] = {}
        for token in {frame.bos, frame.eos} - {None}:
            if (number := self._rust.token_to_id(str(token))) is None:
                raise ModelLoadError(f"{file} has no token {token!r}, which tokenizer_config.json adds")
            ids[str(token)] = number
        before, after = ([token] if token else [] for token in (frame.bos, frame.eos))
        bare = self._rust.encode("a", add_special_tokens=False).ids
        wanted = [*(ids[token] for token in before), *bare, *(ids[token] for token in after)]
        if (given := self._rust.encode("a").ids) == wanted:
            return
        log.warning(
            "%s frames a text as %s, but add_bos_token and add_eos_token of tokenizer_config.json ask for "
            "%s. Texts are framed as they ask: transformers 4 did so when such models were made, but "
            "transformers 5 does not",
            file,
            " ".join(map(str, self.token_strings(given))),
            " ".join(map(str, self.token_strings(wanted))),
        )
        self._set_frame(before, after, ids)

    def _set_frame(self, before: list[str], after: list[str], ids: dict[str, int]) -> None:
        first, second = (
            [*(f"{t}:{n}" for t in before), text, *(f"{t}:{n}" for t in after)]
            for n, text in enumerate(("$A:0", "$B:1"))
        )
        template = processors.TemplateProcessing(first, [*first, *second], list(ids.items()))
        existing = self._rust.post_processor
        trims = isinstance(existing, processors.ByteLevel)  # trims the offsets of byte-level tokens
        self._rust.post_processor = processors.Sequence([existing, template]) if trims else template

    def _special_frame(self) -> tuple[int, int]:
        """The number of special tokens before and after a text."""
        bare = self._rust.encode("a", add_special_tokens=False).ids
        full = self._rust.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return start, len(full) - len(bare) - start
        raise ModelLoadError("the tokenizer's template changes the tokens of the text; this is not supported")


def _max_whole_chars(limit: RowLimit | None) -> int:
    """Maximum characters of a text that is tokenised whole; longer texts are tokenised in pieces."""
    return MAX_WINDOW_CHARS if limit is None else limit.max_whole_chars


@cache
def byte_table() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary.

    Printable bytes are written as themselves, others as characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _find(ids: list[int], part: list[int], start: int) -> int:
    """The index of `part` in `ids` at or after `start`; -1 if there is none."""
    for at in range(start, len(ids) - len(part) + 1):
        if ids[at : at + len(part)] == part:
            return at
    return -1
