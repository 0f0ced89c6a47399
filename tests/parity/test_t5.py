"""T5 encoders of sentence-transformers: a Dense module, prompts left out of the mean, no position limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, processors
from torch import nn

from penstock import Engine
from penstock.checkpoint.describe import read_spec
from penstock.errors import ModelLoadError
from tests.parity.encoders import BACKBONES, opened
from tests.parity.reference import Family, make_texts, unigram, write_sentence_transformer

TEXTS = [text for text in make_texts(30) if text and len(text) < 60]
PROMPT = "Represent the letter for people: "


def t5_tokenizer() -> Tokenizer:
    tokenizer = unigram()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


SENTENCE_T5 = Family(
    transformers.T5Config,
    transformers.T5EncoderModel,
    t5_tokenizer,
    512,
    sizes={"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    more={"pad_token_id": 1, "eos_token_id": 2, "feed_forward_proj": "gated-gelu"},
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[SentenceTransformer, Path]:
    folder = tmp_path_factory.mktemp("models")
    dense = {"out_features": 32, "bias": False, "activation_function": nn.Identity()}
    return write_sentence_transformer(folder, SENTENCE_T5, dense=dense), folder / "model"


def test_sentence_t5_gives_the_references_vectors(saved: tuple[SentenceTransformer, Path]) -> None:
    reference, folder = saved
    with Engine(str(folder), device="cpu") as engine:
        np.testing.assert_allclose(engine.embed(TEXTS), reference.encode(TEXTS), atol=2e-5)


def test_instructor_leaves_its_instruction_out_of_the_mean(
    saved: tuple[SentenceTransformer, Path], tmp_path: Path
) -> None:
    """The model is recognised by its name, because its files have no `include_prompt`."""
    reference, folder = saved
    own = tmp_path / "models--hkunlp--instructor-large" / "snapshots" / "0a1b"
    shutil.copytree(folder, own)
    file = next(own.glob("*Pooling/config.json"))
    values = json.loads(file.read_text())
    values.pop("include_prompt")
    file.write_text(json.dumps(values))
    with Engine(str(own), device="cpu") as engine:
        vectors = engine.embed(TEXTS, prompt=PROMPT)
    with_prompt = reference.encode(TEXTS, prompt=PROMPT)
    reference.set_pooling_include_prompt(False)
    try:
        expected = reference.encode(TEXTS, prompt=PROMPT)
    finally:
        reference.set_pooling_include_prompt(True)
    np.testing.assert_allclose(vectors, expected, atol=2e-5)
    assert np.abs(expected - with_prompt).max() > 0.05


def test_rows_are_limited_by_the_files_else_by_the_trained_length(tmp_path: Path) -> None:
    BACKBONES["t5"].write(tmp_path)
    spec = read_spec(tmp_path, "t5")
    assert (spec.max_model_len, spec.max_positions) == (512, 32_768)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    assert read_spec(tmp_path, "t5").max_model_len == 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "double-gelu"}, "feed_forward_proj = 'double-gelu'"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"relative_attention_max_distance": 4}, "relative_attention_max_distance = 4"),
        ({"architectures": ["T5ForConditionalGeneration"]}, r"not supported.*; supported: .*T5Encoder\*"),
    ],
)
def test_an_unsupported_option_is_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    BACKBONES["t5"].write(tmp_path)
    with pytest.raises(ModelLoadError, match=message), opened(tmp_path, change):
        pass
