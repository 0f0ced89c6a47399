"""Tokenising word by word gives the tokenizer's own tokens."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from penstock.inputs import words as module
from penstock.inputs.words import WordTokenizer
from penstock.types import Ints
from tests.checkpoints import WORDS, wordpiece_tokenizer

ODD = [
    "\t",
    "\n",
    "\r",
    "\x00",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x1f",
    "\x7f",
    "\x85",
    "\xa0",
    "\u3000",
    "\u200b",
    "\u00ad",
    "\u0301",
    "\u202f",
    "\u2028",
    "é",
    "Ü",
    "ß",
    "ΣΑΣ",
    "Ж",
    "“",
    "—",
    "…",
    "İ",
    "的",
]
MARKS = ["[MASK]", "[mask]", "[MA", "SK]", "[unk]", "[", "]", "'", ".", ",", "##", "-", "_", "x" * 120]


def words_of(rust: Tokenizer) -> WordTokenizer | None:
    def encode(texts: list[str]) -> list[Ints]:
        found = rust.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in found]

    return WordTokenizer.of(rust, encode)


def random_texts(seed: int, count: int = 400) -> list[str]:
    draw = random.Random(seed)
    parts = [*WORDS, *map(str.upper, WORDS), *ODD, *MARKS]
    return [
        "".join(draw.choice(parts) + draw.choice(["", " ", "  "]) for _ in range(draw.randrange(12)))
        for _ in range(count)
    ]


def check(words: WordTokenizer, rust: Tokenizer, texts: list[str]) -> None:
    rows = words.encode(texts)
    expected = [each.ids for each in rust.encode_batch(texts, add_special_tokens=False)]
    assert [row.tolist() for row in rows] == expected
    assert rows.lengths.tolist() == list(map(len, expected)) and rows.token_ids.dtype == np.int32


@pytest.mark.parametrize(
    "options", [{}, {"lowercase": False}, {"clean_text": False}, {"strip_accents": True}]
)
def test_tokens_by_words_are_those_of_the_text(options: dict[str, bool]) -> None:
    rust = wordpiece_tokenizer()
    rust.normalizer = normalizers.BertNormalizer(**options)
    words = words_of(rust)
    assert words is not None
    for seed in range(4):
        check(words, rust, random_texts(seed))
        check(words, rust, [text for text in random_texts(seed) if text.isascii()])


def test_texts_that_settings_lower_case_are_tokenised_word_by_word() -> None:
    """Many embedders set this in sentence_bert_config.json, although their tokenizer lower-cases already."""
    for after in ({}, {"lowercase": False}, {"strip_accents": False}):
        rust = wordpiece_tokenizer()
        bert = normalizers.BertNormalizer(**after)
        rust.normalizer = normalizers.Sequence([normalizers.Lowercase(), bert])
        words = words_of(rust)
        assert words is not None
        for seed in range(4):
            check(words, rust, random_texts(seed))
    rust.normalizer = normalizers.Sequence([bert, normalizers.Replace("a", " ")])
    assert words_of(rust) is None


def test_words_of_european_texts_are_cached() -> None:
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    check(words, rust, ["Grüße — “l’été” of water… (naïve) [1]", "[CLS] the Грязь", "水 の 流れ"])
    assert {"Grüße", "“l’été”", "[1]"} <= words._cache.keys()
    assert words._cache.keys().isdisjoint(["[CLS]", "Грязь", "水", "の"])


def test_added_tokens_with_accents_are_found() -> None:
    rust = wordpiece_tokenizer()
    rust.add_tokens([AddedToken("[the]", normalized=True)])
    words = words_of(rust)
    assert words is not None
    check(words, rust, ["[the] water", "[thé] water", "[THÉ]water", "thé water", "Thé [MÁSK]"])
    assert "thé" in words._cache


def note_parts(words: WordTokenizer) -> list[list[str]]:
    """Record the parts of words that the tokenizer has to encode, one list per call."""
    asked: list[list[str]] = []
    encode_new = words._encode_new

    def note(new: Iterable[str]) -> dict[str, bytes]:
        if listed := list(new):
            asked.append(listed)
        return encode_new(listed)

    words._encode_new = note  # type: ignore[method-assign]
    return asked


def test_words_of_the_vocabulary_are_looked_up_and_other_parts_are_tokenised_once() -> None:
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    asked = note_parts(words)
    check(words, rust, ["the water, The (WATER); the-water", "water's?"])
    assert not asked
    check(words, rust, ["waterish, the Zebra"])
    assert asked == [["waterish", "zebra"]]
    check(words, rust, ["zebra! (waterish) ZEBRA-waterish"])
    assert len(asked) == 1
    assert {"The", "(WATER);", "the-water", "Zebra", "zebra!"} <= words._cache.keys()


def test_long_words_are_not_cached() -> None:
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    asked = note_parts(words)
    long = "y" * (module._MAX_WORD_CHARS + 1)
    check(words, rust, [f"the water, {long} the", f"the {long}"])
    check(words, rust, [f"the {long}"])
    assert asked == [[long], [long]]
    assert long not in words._cache and long not in words._parts


def test_texts_with_many_unknown_parts_are_tokenised_whole() -> None:
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    asked = note_parts(words)
    many = [f"water{number}" for number in range(module._MANY_NEW_PARTS + 1)]
    check(words, rust, [" ".join(many)])  # too many new parts, so the text is tokenised whole
    check(words, rust, [" ".join(many)])
    assert asked == [many[:-1], many[-1:]]


@pytest.mark.parametrize("lowercase", [True, False])
def test_parts_of_any_length_are_those_of_the_tokenizer(lowercase: bool) -> None:
    """Includes tokens longer than the longest word that the model splits. It never uses those."""
    rust = wordpiece_tokenizer(lowercase)
    assert isinstance(rust.model, models.WordPiece)
    vocabulary = rust.get_vocab(with_added_tokens=False)
    for token in ("a" * 70, "##" + "a" * 63, "ab" * 30, "##ba", "Water", "wa", "##ter1", "12", "##34", "a-b"):
        vocabulary[token] = len(vocabulary)
    rust.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    draw = random.Random(0)
    parts = [
        "a",
        "ab",
        "water",
        "Water",
        "WATER",
        "1",
        "12",
        "34",
        "a" * 63,
        "a" * 64,
        "-",
        "'s",
        "#",
        "##",
        "é",
    ]
    texts = [
        " ".join("".join(draw.choices(parts, k=draw.randrange(1, 5))) for _ in range(6)) for _ in range(300)
    ]
    for max_chars in (100, 64, 10, 3, 0):
        rust.model.max_input_chars_per_word = max_chars
        words = words_of(rust)
        assert words is not None
        check(words, rust, texts)
        check(words, rust, texts)


def test_a_vocabulary_without_a_letter_gives_the_unknown_token() -> None:
    rust = wordpiece_tokenizer()
    vocabulary = {token: at for at, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "water", "##s", "."])}
    rust.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    words = words_of(rust)
    assert words is not None
    check(words, rust, ["water waters. waterz, z ; swater", "waterz waterz."])


def test_learned_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LEARNED_PARTS", 30)
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    size = len(words._parts)
    for at in range(40):
        check(words, rust, [f"the{at} water{at}, the"])
    assert size < len(words._parts) <= size + 30


def test_the_word_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CACHED_WORDS", 50)
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    for at in range(20):
        texts = [f"the{at} water{at}{number}" for number in range(40)]
        check(words, rust, texts)
        assert len(words._cache) <= 50


def test_threads_share_the_word_cache() -> None:
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(5):
                check(words, rust, random_texts(seed, 50))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_tokenizers_are_left_alone() -> None:
    split = wordpiece_tokenizer()
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    hidden = wordpiece_tokenizer()
    hidden.add_tokens([AddedToken("water", normalized=True)])
    accented = wordpiece_tokenizer()
    accented.add_tokens([AddedToken("[é]", normalized=True)])
    spaced = wordpiece_tokenizer()
    spaced.add_tokens([AddedToken("[a b]", normalized=True)])
    assert all(words_of(rust) is None for rust in (split, hidden, accented, spaced))
