"""Architectures that are not native, through the Hugging Face module."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import ElectraConfig, ElectraModel

from penstock import Engine
from penstock.errors import ConfigError, ModelLoadError
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_json

TEXTS = ["the water was long", "a", "people write many letters now and then", "find the oil " * 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "electra"
    torch.manual_seed(3)
    config = ElectraConfig(
        vocab_size=len(wordpiece_vocabulary()),
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    ElectraModel(config).save_pretrained(folder)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    write_json(folder / "tokenizer_config.json", special | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def test_vectors_equal_those_of_sentence_transformers(folder: Path) -> None:
    reference = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with Engine(str(folder), device="cpu", model_impl="transformers") as engine:
        together = engine.embed(TEXTS)
        alone = np.concatenate([engine.embed([text]) for text in TEXTS])
        tokens = engine.token_embed(TEXTS)
    np.testing.assert_allclose(together, reference, atol=1e-5)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose([rows.mean(0) for rows in tokens], together, atol=1e-5)


def test_without_model_impl_transformers_the_error_lists_supported_classes(folder: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'ElectraModel' is not supported.*Bert\*.*--model-impl transformers"
    ):
        Engine(str(folder), device="cpu")


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"load_format": "dummy"}])
def test_options_that_need_a_native_model_are_refused(folder: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs a native model"):
        Engine(str(folder), device="cpu", model_impl="transformers", **option)
