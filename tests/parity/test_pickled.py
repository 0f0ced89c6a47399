"""Checkpoints published as pickles, against the reference libraries on the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentence_transformers")

import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from penstock import Engine
from penstock.errors import ModelLoadError
from tests.checkpoints import write_json, write_modules
from tests.parity.reference import FAMILIES, cosines, write_sentence_transformer, write_transformer
from tests.pickles import pickle_weights, write_malicious

TEXTS = ["the water of the people", "a long search for oil", "she said"]
HEADS = {"sparse_linear.pt": 1, "colbert_linear.pt": 64}


def open_engine(folder: Path, **options: str) -> Engine:
    return Engine(str(folder), device="cpu", threads=1, **options)  # type: ignore[arg-type]


@pytest.fixture
def m3(tmp_path: Path) -> Path:
    """BGE-M3 as published: pytorch_model.bin and two heads in separate files."""
    folder = write_transformer(tmp_path / "m3", FAMILIES["xlm-roberta"], seed=4)
    pickle_weights(folder)
    write_modules(folder, [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
    write_json(folder / "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    torch.manual_seed(6)
    for name, outputs in HEADS.items():
        torch.save(torch.nn.Linear(64, outputs).state_dict(), folder / name)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bge_m3_as_published_gives_the_references_vectors_and_weights(m3: Path, dtype: str) -> None:
    model = transformers.AutoModel.from_pretrained(m3).eval()
    heads = {name: torch.load(m3 / name, weights_only=True) for name in HEADS}
    with open_engine(m3, dtype=dtype) as engine:
        rows = engine.tokenize(TEXTS)
        found = engine.outputs(TEXTS, ["embed", "sparse", "token_embed"])
    bound = 1 - 1e-6 if dtype == "float32" else 0.999
    for row, vector, weights, tokens in zip(
        rows, found["embed"], found["sparse"], found["token_embed"], strict=True
    ):
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([row])).last_hidden_state[0]
            lexical, multi = (hidden @ head["weight"].T + head["bias"] for head in heads.values())
        assert cosines(vector[None], hidden[:1].numpy()).min() > bound
        assert cosines(tokens, multi[1:].numpy()).min() > bound
        if dtype == "float32":
            theirs: dict[int, float] = {}
            for token, weight in zip(row, lexical[:, 0].tolist(), strict=True):
                theirs[token] = max(weight, theirs.get(token, 0.0))
            assert weights and all(
                weights[token] == pytest.approx(theirs[token], abs=1e-4) for token in weights
            )


def test_an_old_sentence_transformers_folder_with_a_pickled_dense_layer(tmp_path: Path) -> None:
    write_sentence_transformer(tmp_path, FAMILIES["bert"], dense={"out_features": 24})
    folder = tmp_path / "model"
    pickle_weights(folder, legacy=True)
    torch.save(load_file(folder / "2_Dense/model.safetensors"), folder / "2_Dense/pytorch_model.bin")
    (folder / "2_Dense/model.safetensors").unlink()
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    with open_engine(folder) as engine:
        np.testing.assert_allclose(engine.embed(TEXTS), theirs, atol=1e-5)
    write_malicious(folder / "2_Dense/pytorch_model.bin", tmp_path / "mark")
    with pytest.raises(ModelLoadError, match=r"2_Dense/pytorch_model\.bin was not loaded"):
        open_engine(folder)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("impl", ["penstock", "transformers"])
def test_a_malicious_checkpoint_runs_nothing_in_an_engine(m3: Path, tmp_path: Path, impl: str) -> None:
    write_malicious(m3 / "pytorch_model.bin", tmp_path / "mark")
    with pytest.raises(ModelLoadError, match="pytorch_model"):
        open_engine(m3, model_impl=impl)
    assert not (tmp_path / "mark").exists()


def test_a_malicious_head_runs_nothing_in_an_engine(m3: Path, tmp_path: Path) -> None:
    write_malicious(m3 / "sparse_linear.pt", tmp_path / "mark")
    with pytest.raises(ModelLoadError, match=r"sparse_linear\.pt was not loaded"):
        open_engine(m3)
    assert not (tmp_path / "mark").exists()
