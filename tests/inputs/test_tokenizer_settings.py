"""Options of tokenizer_config.json that change the token ids, against transformers on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as RustTokenizer

from penstock.errors import ModelLoadError
from penstock.inputs.tokenizer import Tokenizer
from tests.checkpoints import wordpiece_tokenizer, write_json
from tests.parity.reference import byte_level_bpe

TEXT = "Été the WATER can't, 的是 said it"
BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
ROBERTA = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
ROBERTA |= {"unk_token": "<unk>", "pad_token": "<pad>"}


def cased() -> RustTokenizer:
    return wordpiece_tokenizer(lowercase=False)


def write(
    folder: Path, make: Callable[[], RustTokenizer], model_type: str, settings: dict[str, Any] | None
) -> Path:
    make().save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", {"model_type": model_type})
    if settings is not None:
        write_json(folder / "tokenizer_config.json", settings)
    return folder


@pytest.mark.parametrize(
    ("make", "model_type", "settings"),
    [
        (wordpiece_tokenizer, "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
        (wordpiece_tokenizer, "bert", {"tokenizer_class": "BertTokenizerFast", "strip_accents": False}),
        (wordpiece_tokenizer, "bert", {"tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": False}),
        (wordpiece_tokenizer, "distilbert", {"do_lower_case": False}),
        (wordpiece_tokenizer, "electra", {"tokenizer_class": "ElectraTokenizer", "do_lower_case": False}),
        (wordpiece_tokenizer, "modernbert", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        (cased, "bert", {"tokenizer_class": "BertTokenizer", "do_lower_case": True}),
        (cased, "bert", {"tokenizer_class": "BertTokenizer"}),
        (cased, "modernbert", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}),
        (byte_level_bpe, "roberta", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
        (byte_level_bpe, "gpt2", {"add_prefix_space": True}),
        (byte_level_bpe, "roberta", {"tokenizer_class": "RobertaTokenizerFast"}),
        (byte_level_bpe, "qwen3", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_text_has_the_tokens_that_transformers_gives_it(
    make: Callable[[], RustTokenizer], model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    special = ROBERTA if make is byte_level_bpe else BERT
    folder = write(tmp_path, make, model_type, special | settings)
    wanted = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    assert Tokenizer(folder).encode([TEXT])[0].tolist() == wanted


def test_an_option_that_is_no_flag_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path, wordpiece_tokenizer, "bert", {"do_lower_case": "yes"})
    with pytest.raises(ModelLoadError, match="do_lower_case = 'yes'"):
        Tokenizer(folder)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_a_model_that_truncates_on_the_left_is_reported(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, wordpiece_tokenizer, "bert", {"truncation_side": "left"})
    if place == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink()
        file = folder / place
        options = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"truncation": options}))
    Tokenizer(folder)
    assert "truncation_side = left" in caplog.text
