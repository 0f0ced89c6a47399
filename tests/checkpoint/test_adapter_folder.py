"""An adapter that a request selects runs with the model's tokens, pooling and layers. An adapter that was
trained with others is refused."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertModel

from penstock.checkpoint.adapter_folder import check_folder
from penstock.checkpoint.describe import read_spec
from penstock.checkpoint.spec import ModelSpec
from penstock.config import PoolerConfig
from penstock.errors import ModelLoadError
from tests.checkpoints import wordpiece_tokenizer, write_bert, write_json, write_late, write_modules
from tests.parity.lora import write_adapter

KINDS = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]


def write_files(
    folder: Path, kinds: list[tuple[str, str]] = KINDS, method: str = "mean", seed: int = 0
) -> Path:
    """Write the modules of a sentence-transformers folder, without the model."""
    folder.mkdir(exist_ok=True)
    write_modules(folder, kinds)
    write_json(folder / "1_Pooling/config.json", {"pooling_mode": method, "embedding_dimension": 32})
    write_json(folder / "2_Dense/config.json", {"in_features": 32, "out_features": 8, "bias": False})
    weight = torch.randn((8, 32), generator=torch.Generator().manual_seed(seed))
    save_file({"linear.weight": weight}, folder / "2_Dense/model.safetensors")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    return read_spec(write_files(write_bert(tmp_path / "base", modules=False)), "bert")


def test_the_same_modules_and_none_are_accepted(model: ModelSpec, tmp_path: Path) -> None:
    check_folder(write_files(tmp_path / "same"), model)
    (tmp_path / "none").mkdir()
    check_folder(tmp_path / "none", model)


@pytest.mark.parametrize(
    ("base", "is_reported"),
    [("org/other", True), ("org/Served", False), ("copies/served", False), ("../served", False)],
)
def test_a_base_model_of_another_name_on_the_hub_is_reported(
    base: str, is_reported: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = tmp_path / "models--org--served/snapshots/0123"
    served.parent.mkdir(parents=True)
    spec = read_spec(write_bert(served, modules=False), "org/served")
    write_json(tmp_path / "adapter/adapter_config.json", {"base_model_name_or_path": base})
    with caplog.at_level(logging.WARNING, "penstock.adapters"):
        check_folder(tmp_path / "adapter", spec)
    assert (f"was trained on {base}" in caplog.text) is is_reported
    assert ("loaded on org/served" in caplog.text) is is_reported


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"method": "cls"},
            r"trained with cls pooling, Dense \(32 → 8, tanh\), normalised, .* has mean pooling",
        ),
        ({"kinds": KINDS[:2]}, r"with mean pooling, as its modules\.json says; bert has mean pooling, Dense"),
        (
            {"kinds": [KINDS[0], KINDS[2]]},
            r"with mean pooling, Dense \(32 → 8, tanh\), as its modules\.json says",
        ),
        ({"kinds": KINDS[:3]}, r"with mean pooling, Dense \(32 → 8, tanh\), as its modules\.json says"),
        ({"seed": 1}, r"weights in \S+2_Dense that are not those of bert"),
    ],
    ids=["pooling", "no Dense", "no Pooling", "not normalised", "other weights"],
)
def test_other_modules_are_refused_by_name(
    changes: dict[str, Any], words: str, model: ModelSpec, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        check_folder(write_files(tmp_path / "adapter", **changes), model)


def test_the_pooling_that_the_caller_chose_for_the_model_counts(tmp_path: Path) -> None:
    """A model without modules.json uses its family's default pooling."""
    base = write_bert(tmp_path / "base", modules=False)
    adapter = write_files(tmp_path / "adapter", KINDS[:2], "mean")
    with pytest.raises(ModelLoadError, match=r"trained with mean pooling, .* has cls pooling"):
        check_folder(adapter, read_spec(base, "bert", pooler=PoolerConfig(pooling_type="cls")))
    check_folder(adapter, read_spec(base, "bert", pooler=PoolerConfig(pooling_type="mean")))


def test_a_projection_of_tokens_that_was_trained_too_is_refused(tmp_path: Path) -> None:
    spec = read_spec(write_late(tmp_path / "base"), "colbert")
    adapter = write_files(tmp_path / "adapter", [KINDS[0], KINDS[2]])
    with pytest.raises(
        ModelLoadError, match=r"Dense \(32 → 8, identity\), .* has Dense \(32 → 16, identity\)"
    ):
        check_folder(adapter, spec)


def test_prompts_that_the_model_lacks_are_reported(
    model: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"query": "Find: ", "document": ""}
    adapter = write_files(tmp_path / "adapter")
    write_json(adapter / "config_sentence_transformers.json", {"prompts": prompts})
    with caplog.at_level(logging.WARNING, "penstock.adapters"):
        check_folder(adapter, model)
    assert "prompts that bert does not have: query." in caplog.text
    shutil.copy(adapter / "config_sentence_transformers.json", model.root_path)
    caplog.clear()
    check_folder(adapter, read_spec(model.root_path, "bert"))
    assert not caplog.records


def test_tokens_that_the_model_lacks_are_refused_if_the_adapter_trained_them(
    model: ModelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = BertModel.from_pretrained(model.folder)
    tokenizer = wordpiece_tokenizer()
    for name, more in (("trained", {"modules_to_save": ["word_embeddings"]}), ("others", {})):
        write_adapter(base, tmp_path / name, target_modules=["query"], **more)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        check_folder(tmp_path / name, model)
    tokenizer.add_special_tokens(["[PAD]", "<tenant>"])
    for name in ("trained", "others"):
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    with pytest.raises(
        ModelLoadError, match=r"word_embeddings\.weight and .* tokens that bert .*: <tenant>\."
    ):
        check_folder(tmp_path / "trained", model)
    assert "lacks" not in caplog.text
    check_folder(tmp_path / "others", model)
    assert "has tokens that bert lacks: <tenant>" in caplog.text
