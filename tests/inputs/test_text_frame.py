"""Which special tokens frame a text, by family: those used in the model's training, whatever tokenizer.json
adds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import processors

from penstock.errors import ModelLoadError
from penstock.inputs.tokenizer import Tokenizer
from penstock.inputs.truncation import truncate_rows
from tests.parity.reference import byte_level_bpe

REMOTE = {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]}
ENDS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


class Files(NamedTuple):
    settings: dict[str, Any]  # tokenizer_config.json
    given: str  # the frame of tokenizer.json
    fed: str  # the frame that the model gets


def files(given: str, fed: str, kind: str = "LlamaTokenizer", **settings: Any) -> Files:
    return Files({"tokenizer_class": kind, **ENDS, **settings}, given, fed)


PUBLISHED = {
    "e5-mistral, SFR, Linq": files("<s> $A", "<s> $A </s>", add_bos_token=True, add_eos_token=True),
    "the same without add_bos_token": files(
        "<s> $A", "<s> $A </s>", "LlamaTokenizerFast", add_eos_token=True
    ),
    "Mistral and Llama 2": files("<s> $A", "<s> $A", add_bos_token=True, add_eos_token=False),
    "a Llama without a beginning": files("<s> $A", "$A", add_bos_token=False),
    "Gemma": files("<s> $A", "<s> $A", "GemmaTokenizer", add_bos_token=True, add_eos_token=False),
    "gte-Qwen2-instruct": files("$A", "$A </s>", "Qwen2Tokenizer", add_eos_token=True, auto_map=REMOTE),
    "Qwen2, which ignores the key": files("$A", "$A", "Qwen2Tokenizer", add_eos_token=True),
    "Qwen3-Embedding": files("$A </s>", "$A </s>", "Qwen2Tokenizer", add_bos_token=False),
    "Llama 3": files("<s> $A", "<s> $A", "PreTrainedTokenizerFast"),
    "no key at all": files("$A </s>", "$A </s>"),
}


def write(folder: Path, settings: dict[str, Any], given: str = "<s> $A") -> Tokenizer:
    rust = byte_level_bpe()
    byte_level = processors.ByteLevel(trim_offsets=False)
    frame = processors.TemplateProcessing(given, f"{given} $B:1", [("<s>", 0), ("</s>", 2)])
    rust.post_processor = byte_level if given == "$A" else frame
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


@pytest.mark.parametrize("family", PUBLISHED)
def test_texts_are_framed_as_the_models_authors_framed_them(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings, given, fed = PUBLISHED[family]
    with caplog.at_level(logging.WARNING):
        tokenizer = write(tmp_path, settings, given)
    text = Rust.from_file(str(tmp_path / "tokenizer.json")).encode("the water", add_special_tokens=False).ids
    ids = {"<s>": [0], "$A": text, "</s>": [2]}
    expected = [token for name in fed.split() for token in ids[name]]
    assert tokenizer.encode(["the water"])[0].tolist() == expected
    assert tokenizer.encode(["the water"], add_special_tokens=False)[0].tolist() == text
    assert ("transformers 5 does not" in caplog.text) == (given != fed)
    assert ("tokenizer.json alone decides" in caplog.text) == (family == "Qwen2, which ignores the key")


def test_a_truncated_text_keeps_the_end_token(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, *PUBLISHED["e5-mistral, SFR, Linq"][:2])
    rows = tokenizer.encode(["the water was long " * 40])
    (row,) = truncate_rows(rows, 16, 64, (tokenizer.prefix, tokenizer.suffix), "right")
    assert len(row) == 16 and row[0] == 0 and row[-1] == 2 and not np.isin(row[1:-1], [0, 2]).any()


def test_pairs_are_framed_too(tmp_path: Path) -> None:
    frame = write(tmp_path, *PUBLISHED["e5-mistral, SFR, Linq"][:2]).pair_frame
    assert [part.tolist() for part in frame[:3]] == [[0], [2, 0], [2]]


def test_offsets_of_byte_level_tokens_stay_as_they_were(tmp_path: Path) -> None:
    family = PUBLISHED["gte-Qwen2-instruct"]
    (framed,) = write(tmp_path, *family[:2]).encode_with_offsets(["a water"])
    (bare,) = write(tmp_path, {}, "$A").encode_with_offsets(["a water"])
    assert framed.offsets[:-1].tolist() == bare.offsets.tolist()


def test_a_tokenizer_with_unknown_code_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = write(tmp_path, {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}})
    assert tokenizer.encode(["the"])[0][0] == 0
    assert "tokenization_own.OwnTokenizer" in caplog.text and "is not run" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"add_eos_token": "yes", **ENDS}, "add_eos_token = 'yes'; it has to be true or false"),
        ({"add_eos_token": True, "bos_token": "<s>"}, "names no eos_token"),
        ({"add_eos_token": True, "bos_token": "<s>", "eos_token": "<end>"}, "has no token '<end>'"),
    ],
)
def test_unusable_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        write(tmp_path, {"tokenizer_class": "LlamaTokenizer", **settings})
