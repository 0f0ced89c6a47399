from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors

from penstock.inputs.tokenizer import Tokenizer
from tests.checkpoints import wordpiece_tokenizer


def saved(folder: Path, rust: RustTokenizer) -> Tokenizer:
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def word_level() -> RustTokenizer:
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4, "<x>": 5}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    return rust


@pytest.mark.parametrize(
    ("template", "frame"),
    [("$A", (0, 0)), ("<s> $A </s>", (1, 1)), ("$A </s>", (0, 1)), ("<s> <x> $A </s>", (2, 1))],
)
def test_special_tokens_before_and_after_a_text_are_counted(
    tmp_path: Path, template: str, frame: tuple[int, int]
) -> None:
    rust = word_level()
    rust.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 3), ("</s>", 4), ("<x>", 5)]
    )
    tokenizer = saved(tmp_path, rust)
    assert (tokenizer.prefix, tokenizer.suffix) == frame


def test_truncation_and_padding_saved_in_the_file_are_switched_off(tmp_path: Path) -> None:
    rust = wordpiece_tokenizer()
    rust.enable_truncation(4)
    rust.enable_padding(length=10)
    tokenizer = saved(tmp_path, rust)
    assert [len(row) for row in tokenizer.encode(["the " * 9, "the"])] == [11, 3]


def test_a_batch_is_encoded_like_its_texts(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, wordpiece_tokenizer())
    texts = ["the water", "", "one two", "ждать 的"]
    batch = [row.tolist() for row in tokenizer.encode(texts)]
    assert batch == [wordpiece_tokenizer().encode(text).ids for text in texts]


@pytest.mark.parametrize("cased", [True, False])
def test_lower_casing_comes_first_and_leaves_special_tokens_alone(tmp_path: Path, cased: bool) -> None:
    tokenizer = saved(tmp_path, wordpiece_tokenizer(lowercase=not cased))
    tokenizer.lower_case()
    reference = wordpiece_tokenizer()
    for text in ("THE Water", "the [SEP] Water [MASK]", ""):
        assert tokenizer.encode([text])[0].tolist() == reference.encode(text).ids


def test_lower_casing_works_letter_by_letter_as_in_tokenizers(tmp_path: Path) -> None:
    """Python's lower() would end a Greek word with a final sigma, which the model was not trained on."""
    vocabulary = {"[UNK]": 0, "σασ": 1, "σας": 2}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = saved(tmp_path, rust)
    tokenizer.lower_case()
    assert "ΣΑΣ".lower() == "σας"
    assert tokenizer.encode(["ΣΑΣ"])[0].tolist() == [1]


def test_ids_decode_to_the_text(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, wordpiece_tokenizer())
    ids = tokenizer.encode(["the water"])[0].tolist()
    assert tokenizer.decode(ids) == "[CLS] the water [SEP]"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the water"
    assert tokenizer.token_strings([*ids, 10**6]) == ["[CLS]", "the", "water", "[SEP]", None]


def test_added_tokens_count_towards_the_vocabulary(tmp_path: Path) -> None:
    rust = wordpiece_tokenizer()
    before = rust.get_vocab_size()
    rust.add_tokens(["brandnew"])
    assert saved(tmp_path, rust).vocab_size == before + 1
