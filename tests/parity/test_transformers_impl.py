"""Architectures without a native implementation, run by their transformers module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import Tensor

from penstock import Engine
from penstock.checkpoint.describe import describe
from penstock.config import EngineConfig, PoolerConfig
from penstock.errors import ConfigError, ModelLoadError, PenstockError
from tests.checkpoints import wordpiece_tokenizer, wordpiece_vocabulary, write_json
from tests.parity.reference import randomise

TEXTS = ["the water was long", "a", "people write many letters now and then", "find the oil " * 12]
PAIRS = [("the water", "was long"), ("a", "people write many letters"), ("oil", "find the oil and now then")]
SIZES = {
    "vocab_size": len(wordpiece_vocabulary()),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}
_BART = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in
         (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "Bart": {"d_model": 32, "is_encoder_decoder": True} | _BART,
    "BigBird": {"attention_type": "original_full"},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    "Electra": {"embedding_size": 16},
    "Longformer": {"attention_window": [8, 8], "max_position_embeddings": 65},
    "MobileBert": {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
}


def write(folder: Path, name: str, kind: str, **settings: Any) -> Any:
    """Write a checkpoint with the tests' tokenizer; returns its module."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | MORE.get(name, {}) | settings))
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    randomise(model, seed=3)
    model.save_pretrained(folder)
    wordpiece_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    limit = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    write_json(folder / "tokenizer_config.json", special | limit)
    return model


def opened(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, model_impl="transformers", **options)


@torch.inference_mode()
def logits_of(model: Any, texts: list[str]) -> list[Tensor]:
    """The logits of each text, run alone."""
    rows = [wordpiece_tokenizer().encode(text).ids for text in texts]
    return [
        model(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row))).logits[0] for row in rows
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mobilebert"
    write(folder, "MobileBert", "Model")
    return folder


def test_vectors_equal_those_of_sentence_transformers(folder: Path) -> None:
    # One text at a time, because MobileBERT reads the padding after the last token.
    reference = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)
    with opened(folder) as engine:
        together = engine.embed(TEXTS)
        alone = np.concatenate([engine.embed([text]) for text in TEXTS])
        tokens = engine.token_embed(TEXTS)
    np.testing.assert_allclose(together, reference, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose([rows.mean(0) for rows in tokens], together, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Bart", "BigBird", "Deberta", "Electra", "Longformer", "MobileBert"])
def test_sequence_classifiers_give_the_references_logits(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name, "ForSequenceClassification", num_labels=5)
    expected = torch.stack(logits_of(model, TEXTS)).numpy()
    assert expected.std(0).min() > 0.01
    with opened(tmp_path) as engine:
        np.testing.assert_allclose(
            engine.classify(TEXTS, use_activation=False), expected, rtol=1e-3, atol=1e-3
        )
        with pytest.raises(PenstockError, match="embed"):
            engine.embed(TEXTS)


@pytest.mark.parametrize("name", ["BigBird", "Deberta", "Electra", "Longformer", "MobileBert"])
def test_token_classifiers_give_the_references_logits(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, name, "ForTokenClassification", num_labels=5)
    with opened(tmp_path) as engine:
        found = engine.token_classify(TEXTS, use_activation=False)
    for got, expected in zip(found, logits_of(model, TEXTS), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("names", [["input_ids"], ["input_ids", "token_type_ids"]])
def test_a_cross_encoder_scores_pairs_as_the_reference(names: list[str], tmp_path: Path) -> None:
    """Token type ids are used only if the tokenizer's settings list them."""
    write(tmp_path, "BigBird", "ForSequenceClassification", num_labels=1)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write_json(
        tmp_path / "tokenizer_config.json", settings | {"model_input_names": [*names, "attention_mask"]}
    )
    expected = CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS)
    with opened(tmp_path) as engine:
        scores = [engine.score(query, [text])[0] for query, text in PAIRS]
    np.testing.assert_allclose(np.ravel(scores), expected, atol=1e-5)
    assert np.std(expected) > 0.01


def test_a_masked_language_model_gives_splade_weights(tmp_path: Path) -> None:
    model = write(tmp_path, "BigBird", "ForMaskedLM")
    expected = [torch.log1p(torch.relu(logits)).amax(dim=0) for logits in logits_of(model, TEXTS)]
    with opened(tmp_path, pooler_config=PoolerConfig(pooling_type="splade")) as engine:
        found = engine.sparse(TEXTS)
    for row, weights in zip(found, expected, strict=True):
        dense = torch.zeros_like(weights)
        dense[list(row)] = torch.tensor(list(row.values()))
        torch.testing.assert_close(dense, weights, atol=1e-4, rtol=1e-4)


def test_a_projection_of_token_vectors_is_applied(tmp_path: Path) -> None:
    """PyLate's layout has a Dense module after the backbone, and no pooling."""
    write(tmp_path, "MobileBert", "Model")
    modules = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(zip(("", "1_Dense"), modules, strict=True))
    ]
    write_json(tmp_path / "modules.json", entries)
    sizes = {"in_features": 32, "out_features": 8, "bias": False}
    write_json(
        tmp_path / "1_Dense" / "config.json",
        sizes | {"activation_function": "torch.nn.modules.linear.Identity"},
    )
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, tmp_path / "1_Dense" / "model.safetensors")
    plain = {"query_prefix": "", "document_prefix": "", "skiplist_words": [], "model_type": "ColBERT"}
    write_json(tmp_path / "config_sentence_transformers.json", plain)
    row = wordpiece_tokenizer().encode(TEXTS[0]).ids
    with torch.inference_mode():
        states = transformers.AutoModel.from_pretrained(tmp_path)(torch.tensor([row])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(states @ weight.T, dim=-1)
    with opened(tmp_path) as engine:
        found = engine.token_embed(TEXTS[:1])[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_head_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    """transformers would initialise it randomly."""
    write(tmp_path, "BigBird", "ForSequenceClassification")
    file = tmp_path / "model.safetensors"
    tensors = {name: x for name, x in load_file(file).items() if "classifier.out_proj" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"no tensors for classifier\.out_proj\.bias"):
        opened(tmp_path)


def test_a_model_without_sizes_is_refused_with_the_key_to_set(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"MobileBertModel is not supported.*no hidden_size or n_embd"):
        opened(folder, hf_overrides={"hidden_size": None})


def limit_of(folder: Path) -> int:
    return describe(EngineConfig(model=str(folder), model_impl="transformers")).max_model_len


def test_the_limit_of_a_text_may_come_from_the_tokenizer_alone(tmp_path: Path) -> None:
    write(tmp_path, "MobileBert", "Model")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("max_position_embeddings")
    write_json(tmp_path / "config.json", config)
    assert limit_of(tmp_path) == 64
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelLoadError, match="how long a text may be"):
        limit_of(tmp_path)


def test_positions_counted_from_the_padding_token_shorten_the_limit(tmp_path: Path) -> None:
    write(tmp_path, "Longformer", "Model", max_position_embeddings=50)
    assert limit_of(tmp_path) == 49


def test_without_model_impl_transformers_the_error_lists_supported_classes(folder: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'MobileBertModel' is not supported.*Bert\*.*--model-impl transformers"
    ):
        Engine(str(folder), device="cpu")


def test_a_classifier_that_reads_a_decoder_is_refused_with_the_flag_that_runs_it(tmp_path: Path) -> None:
    write(tmp_path, "Bart", "ForSequenceClassification")
    with pytest.raises(ModelLoadError, match="which only --model-impl transformers runs"):
        Engine(str(tmp_path), device="cpu")


@pytest.mark.parametrize("option", [{"quantization": "int8"}, {"load_format": "dummy"}])
def test_options_that_need_a_native_model_are_refused(folder: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs a native model"):
        opened(folder, **option)
