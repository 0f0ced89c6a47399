"""Static embeddings, and modules in subfolders, against sentence-transformers and model2vec."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer

from penstock import Engine
from penstock.errors import BadValue, ConfigError, ModelLoadError
from penstock.types import Task
from tests.checkpoints import wordpiece_tokenizer
from tests.parity.reference import FAMILIES, Vectors, make_texts, unigram, write_sentence_transformer

# Words inside and outside the vocabulary, several kinds of spaces, and characters that start special tokens.
TEXTS = [
    *make_texts(60),
    "the\twater\n the",
    "the\x0bwater",
    "the [MASK] water",
    " ",
    "[CLS]",
    "The WATER, the",
]
DIM = 24


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)


def table(tokenizer: Tokenizer, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokenizer.get_vocab_size(), DIM, generator=torch.Generator().manual_seed(seed))


def write_reference(folder: Path, tokenizer: Tokenizer, *more: torch.nn.Module) -> SentenceTransformer:
    static = modules.StaticEmbedding(tokenizer, embedding_weights=table(tokenizer))
    reference = SentenceTransformer(modules=[static, *more], device="cpu")
    reference.save(str(folder), create_model_card=False)
    return reference


def move_into_a_folder(folder: Path, name: str, files: tuple[str, ...]) -> None:
    """Make the layout of older releases, with the first module in its own folder."""
    (folder / name).mkdir()
    for file in files:
        shutil.move(folder / file, folder / name / file)
    rows = json.loads((folder / "modules.json").read_text())
    rows[0]["path"] = name
    (folder / "modules.json").write_text(json.dumps(rows))


@pytest.mark.parametrize("make_tokenizer", [wordpiece_tokenizer, unigram])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_static_embedding_equals_sentence_transformers(
    tmp_path: Path, make_tokenizer: Any, has_folder: bool
) -> None:
    reference = write_reference(tmp_path, make_tokenizer(), modules.Normalize())
    if has_folder:
        move_into_a_folder(tmp_path, "0_StaticEmbedding", ("model.safetensors", "tokenizer.json"))
    assert not (tmp_path / "config.json").exists()
    with open_engine(tmp_path) as engine:
        assert engine.spec.tasks == (Task.EMBED, Task.TOKEN_EMBED, Task.SCORE)
        for texts in (TEXTS, TEXTS[:1], TEXTS):  # the last time, all words are cached
            np.testing.assert_allclose(engine.embed(texts), reference.encode(texts), atol=2e-7)
        ours, theirs = engine.embed(TEXTS, dimensions=8), reference.encode(TEXTS, truncate_dim=8)
        norms = np.linalg.norm(theirs, axis=1, keepdims=True)
        np.testing.assert_allclose(ours, theirs / np.maximum(norms, 1e-12), atol=2e-7)


def test_a_text_without_tokens_has_a_vector_of_zeros(tmp_path: Path) -> None:
    write_reference(tmp_path, wordpiece_tokenizer(), modules.Normalize())
    with open_engine(tmp_path) as engine:
        vectors = engine.embed(["", "the water", " \n"])
        scores = engine.score("", ["the water"])
    assert not vectors[[0, 2]].any() and np.isclose(np.linalg.norm(vectors[1]), 1)
    assert np.isfinite(scores).all()


def test_token_vectors_are_rows_of_the_table(tmp_path: Path) -> None:
    tokenizer = wordpiece_tokenizer()
    write_reference(tmp_path, tokenizer)
    ids = tokenizer.encode("the water", add_special_tokens=False).ids
    with open_engine(tmp_path) as engine:
        (vectors,) = engine.token_embed(["the water"], normalize=False)
    np.testing.assert_array_equal(vectors, table(tokenizer)[ids].numpy())


def test_modules_after_the_table_run_in_their_order(tmp_path: Path) -> None:
    torch.manual_seed(1)
    norm = modules.LayerNorm(12)
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    chain = [modules.Normalize(), modules.Dense(DIM, 12), norm, modules.Dense(12, 9, use_residual=True)]
    reference = write_reference(tmp_path, wordpiece_tokenizer(), *chain)
    with open_engine(tmp_path) as engine:
        assert engine.spec.embed_dim == 9
        np.testing.assert_allclose(engine.embed(TEXTS), reference.encode(TEXTS), atol=2e-6)


def write_model2vec(folder: Path, tokenizer: Tokenizer, **config: Any) -> dict[str, torch.Tensor]:
    """Write the newer layout: int8 rows shared by tokens, and a weight for each token."""
    draw, size = torch.Generator().manual_seed(3), tokenizer.get_vocab_size()
    tensors = {
        "embeddings": torch.randint(-128, 128, (17, DIM), generator=draw, dtype=torch.int8),
        "mapping": torch.randint(0, 17, (size,), generator=draw),
        "weights": torch.rand(size, generator=draw),
    }
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def by_model2vec(
    tensors: dict[str, torch.Tensor], tokenizer: Tokenizer, unknown: int | None, max_length: int | None
) -> Vectors:
    """model2vec's steps: no special tokens, truncate, drop unknown tokens, average, normalise."""
    rows = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:max_length]
        ids = [token for token in ids if token != unknown]
        values = tensors["embeddings"].float()[tensors["mapping"][ids]] * tensors["weights"][ids][:, None]
        rows.append(values.mean(0).numpy() if ids else np.zeros(DIM, dtype=np.float32))
    found = np.stack(rows)
    return np.asarray(found / (np.linalg.norm(found, axis=1, keepdims=True) + 1e-32))


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_model2vec_folder_equals_its_steps(tmp_path: Path, kind: str) -> None:
    tokenizer = wordpiece_tokenizer() if kind == "wordpiece" else unigram()
    unknown = tokenizer.token_to_id("[UNK]" if kind == "wordpiece" else "<unk>")
    tensors = write_model2vec(tmp_path, tokenizer, normalize=True, embedding_dtype="int8", max_length=30)
    with open_engine(tmp_path) as engine:
        assert engine.spec.max_model_len == 30
        with pytest.raises(BadValue, match="at most 30"):
            engine.embed(TEXTS)
        ours = engine.embed(TEXTS, truncate_prompt_tokens=-1)
    assert any(unknown in tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS)
    np.testing.assert_allclose(ours, by_model2vec(tensors, tokenizer, unknown, 30), atol=2e-7)


def test_a_folder_of_model2vec_is_read_as_sentence_transformers_reads_it_if_it_has_modules(
    tmp_path: Path,
) -> None:
    """sentence-transformers also averages unknown tokens; model2vec does not."""
    write_model2vec(tmp_path, wordpiece_tokenizer(), model_type="model2vec", architectures=["StaticModel"])
    rows = [{"idx": 0, "name": "0", "path": ".", "type": "sentence_transformers.models.StaticEmbedding"}]
    (tmp_path / "modules.json").write_text(json.dumps(rows))
    theirs = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with open_engine(tmp_path) as engine:
        np.testing.assert_allclose(engine.embed(TEXTS), theirs, atol=2e-5)


def test_a_transformer_in_a_folder_of_its_own_is_found(tmp_path: Path) -> None:
    reference = write_sentence_transformer(tmp_path, FAMILIES["bert"])
    names = [file.name for file in (tmp_path / "model").iterdir() if file.is_file()]
    kept = ("modules.json", "config_sentence_transformers.json", "README.md")
    move_into_a_folder(tmp_path / "model", "0_Transformer", tuple(name for name in names if name not in kept))
    texts = TEXTS[:20]
    with open_engine(tmp_path / "model") as engine:
        ours = engine.embed(texts, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(ours, reference.encode(texts), atol=2e-5)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"table": torch.zeros(3, 2)}, "no table embeddings"),
        ({"embeddings": torch.zeros(3, 2), "weights": torch.zeros(4)}, "do not fit one another"),
        ({"embeddings": torch.zeros(3, 2), "bias": torch.zeros(2)}, "do not use: bias"),
        ({"embeddings": torch.zeros(3, 2, dtype=torch.int32)}, "stores embeddings as I32"),
    ],
)
def test_tensors_that_are_not_understood_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    write_model2vec(tmp_path, wordpiece_tokenizer(), model_type="model2vec")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        open_engine(tmp_path)


def test_settings_that_mean_nothing_to_a_table_are_refused(tmp_path: Path) -> None:
    write_reference(tmp_path, wordpiece_tokenizer())
    with pytest.raises(ConfigError, match="does not apply to static embeddings"):
        open_engine(tmp_path, quantization="int8")
    with pytest.raises(ModelLoadError, match="static embeddings are averaged"):
        open_engine(tmp_path, pooler_config={"pooling_type": "cls"})
    with pytest.raises(ModelLoadError, match="--model-impl transformers cannot run"):
        open_engine(tmp_path, model_impl="transformers")
