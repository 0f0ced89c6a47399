"""Tokens by words are the tokenizer's own."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

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
    "é",
    "的",
]
MARKS = ["[MASK]", "[unk]", "[", "]", "'", ".", ",", "##", "-", "_", "x" * 120]


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


def test_known_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_WORDS", 50)
    rust = wordpiece_tokenizer()
    words = words_of(rust)
    assert words is not None
    for at in range(20):
        texts = [f"the{at} water{number}" for number in range(40)]
        check(words, rust, texts)
        assert len(words._index) <= 50 + 41


def test_threads_share_the_known_words() -> None:
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
    assert words_of(split) is None and words_of(hidden) is None
