"""Folders without tokenizer.json: a separate process converts them once, and the result is cached."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from penstock.checkpoint import convert
from penstock.checkpoint.convert import tokenizer_file
from penstock.errors import ModelLoadError
from penstock.inputs.tokenizer import Tokenizer
from tests.checkpoints import BERT_CONFIG, wordpiece_tokenizer, wordpiece_vocabulary, write_json

TEXTS = ["The water is looking", "unknown ☃ signs", "", "a-b c'd (e) 1234", "Éàß ждать"]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the hf extra"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def vocabulary_folder(folder: Path, **options: object) -> Path:
    folder.mkdir()
    write_json(folder / "config.json", BERT_CONFIG)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"} | options)
    (folder / "vocab.txt").write_text("\n".join(wordpiece_vocabulary()) + "\n")
    return folder


def no_conversion(*_: object, **__: object) -> None:
    raise AssertionError("converted again")


def test_an_existing_tokenizer_json_is_used_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_convert", no_conversion)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "vocab.txt").write_text("a")
    assert tokenizer_file(tmp_path) == tmp_path / "tokenizer.json"


@needs_transformers
def test_a_vocabulary_is_converted_once_for_its_settings_and_gives_the_same_tokens(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = vocabulary_folder(tmp_path / "model", do_lower_case=True)
    before = sorted(folder.iterdir())
    tokenizer = Tokenizer(folder)
    assert "no tokenizer.json: converting its vocabulary once" in caplog.text
    reference = wordpiece_tokenizer()
    for text in TEXTS:
        assert tokenizer.encode([text])[0].tolist() == reference.encode(text).ids
    assert sorted(folder.iterdir()) == before, "the model's folder is not written to"

    with monkeypatch.context() as patched:
        patched.setattr(convert, "_convert", no_conversion)
        kept = tokenizer_file(folder)
    assert kept.is_relative_to(own_cache)
    np.testing.assert_array_equal(Tokenizer(folder).encode(TEXTS[:1])[0], tokenizer.encode(TEXTS[:1])[0])

    cased = Tokenizer(vocabulary_folder(tmp_path / "cased", do_lower_case=False))  # the same vocabulary
    assert cased.encode(["Water"])[0].tolist() == wordpiece_tokenizer(False).encode("Water").ids
    assert tokenizer.encode(["Water"])[0].tolist() == reference.encode("Water").ids
    assert tokenizer_file(tmp_path / "cased") != kept == tokenizer_file(folder)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json and no vocabulary"):
        tokenizer_file(tmp_path)


def test_without_transformers_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"penstock\[hf\]"):
        tokenizer_file(vocabulary_folder(tmp_path / "model"))


@needs_transformers
def test_a_failed_conversion_gives_the_reason_and_leaves_no_file(tmp_path: Path, own_cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"not a sentencepiece model")
    with pytest.raises(ModelLoadError, match=r"could not be converted: .+"):
        tokenizer_file(folder)
    assert [file for file in own_cache.rglob("*") if file.is_file()] == []


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(tmp_path)
