"""`penstock info`: facts about the default model and about folders that the tests write."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.checkpoint.find import default_folder
from tests.checkpoints import write_bert, write_json
from tests.cli.runs import error_of, invoke
from tests.generation.families import write


def facts(*args: object) -> dict[str, Any]:
    result = invoke("info", *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the default model's folder without its weights, for tests to change."""
    return Path(
        shutil.copytree(default_folder(), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    )


def write_weights(file: Path, **shapes: tuple[int, ...]) -> int:
    """Write a safetensors file of zeros, and return its number of values."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    return offset // 4


def test_the_default_model_is_described_completely() -> None:
    found = facts("--device", "cpu")
    assert found["tasks"] == ["embed", "token_embed", "score"]
    assert (found["layers"], found["hidden"], found["heads"], found["vocabulary"]) == (6, 384, 12, 30522)
    assert found["parameters"] == 22_713_216
    assert found["file_bytes"] == (default_folder() / "model.safetensors").stat().st_size
    assert found["pooling"] == {"methods": ["mean"], "include_prompt": True, "normalize": True, "dense": []}
    assert (found["max_tokens"], found["embedding_dimension"], found["similarity"]) == (256, 384, "cosine")
    assert (found["load"]["device"], found["load"]["dtype"]) == ("cpu", "float32")


def test_the_text_shows_the_same_facts() -> None:
    shown = invoke("info", "--device", "null").stdout
    for words in (
        "all-MiniLM-L6-v2",
        "BertModel",
        "22,713,216",
        "mean, normalize",
        "1,024 tokens",
        "on null",
    ):
        assert words in shown


def test_flags_change_what_would_be_loaded() -> None:
    load = facts("--device", "null", "--max-model-len", 64, "--max-num-batched-tokens", 99)["load"]
    assert (load["max_model_len"], load["max_num_batched_tokens"]) == (64, 99)
    pooling = facts("--device", "null", "--pooler-config", '{"pooling_type": "cls"}')["pooling"]
    assert pooling["methods"] == ["cls"]


def test_torch_is_not_imported_for_the_null_device() -> None:
    program = (
        "import sys; from penstock.cli.main import app\n"
        "try: app(['info', '--device', 'null'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_parameters_are_counted_over_shards_and_dense_layers(model: Path) -> None:
    count = write_weights(model / "a.safetensors", first=(3, 5), position_ids=(1, 512)) - 512
    count += write_weights(model / "b.safetensors", second=(7,))
    write_weights(model / "other.safetensors", unused=(100,))  # not in the index, so not part of the model
    index = {
        "weight_map": {"first": "a.safetensors", "position_ids": "a.safetensors", "second": "b.safetensors"}
    }
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    count += write_weights(model / "2_Dense" / "model.safetensors", weight=(16, 384))
    dense = {
        "in_features": 384,
        "out_features": 16,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (model / "2_Dense" / "config.json").write_text(json.dumps(dense))
    modules = json.loads((model / "modules.json").read_text())
    modules.insert(
        2, {"idx": 9, "name": "9", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    )
    (model / "modules.json").write_text(json.dumps(modules))
    found = facts(model, "--device", "null")
    assert found["parameters"] == count
    assert found["pooling"]["dense"] == [{"in": 384, "out": 16, "activation": "tanh"}]
    assert found["embedding_dimension"] == 16
    assert "dense 384 → 16 (tanh)" in invoke("info", model, "--device", "null").stdout


def test_prompts_and_a_missing_weight_file_are_shown(model: Path) -> None:
    table = {"prompts": {"query": "query: ", "passage": "p: "}, "default_prompt_name": "query"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(table))
    shown = invoke("info", model, "--device", "null").stdout
    assert "query (default), passage" in shown and "no weight files" in shown
    assert facts(model, "--device", "null")["parameters"] is None


def test_errors_about_models_are_one_line(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"not weights at all")
    assert "is not a readable safetensors file" in error_of("info", model, "--device", "null")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in error_of("info", tmp_path / "empty")
    assert "neither a folder nor a hub id" in error_of("info", "no such/model/here")
    assert "dtype 'int4' is unknown" in error_of("info", "--device", "null", "--dtype", "int4")


def test_an_unsupported_architecture_is_described_only_for_transformers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"architectures": ["NoSuchModel"]}
    (model / "config.json").write_text(json.dumps(config))
    assert "'NoSuchModel' is not supported" in error_of("info", model, "--device", "cpu")
    found = facts(model, "--device", "cpu", "--model-impl", "transformers")
    assert found["architecture"] == "NoSuchModel"


def test_a_late_interaction_model_shows_its_token_vectors(tmp_path: Path) -> None:
    config = {"architectures": ["HF_ColBERT"], "dim": 16}
    write_bert(tmp_path, config=config, modules=False)
    write_json(tmp_path / "artifact.metadata", {"query_maxlen": 24})
    found = facts(tmp_path, "--device", "cpu")
    assert found["tasks"] == ["token_embed", "score"]
    assert found["late_interaction"] == {"dimension": 16, "query_length": 24, "document_length": None}
    shown = invoke("info", tmp_path, "--device", "cpu").stdout
    assert "16 numbers; queries of 24 tokens, documents of 64" in shown and "pooling" not in shown


def test_a_draft_model_is_named(tmp_path: Path) -> None:
    model, draft = write("llama", tmp_path / "llama"), write("qwen3", tmp_path / "a-draft")
    args = (model, "--device", "cpu", "--speculative-config", json.dumps({"model": str(draft)}))
    assert facts(*args)["draft_model"] == "a-draft"
    lines = [line.split() for line in invoke("info", *args).stdout.splitlines()]
    assert ["draft", "model", "a-draft"] in lines
    assert facts(model, "--device", "cpu")["draft_model"] is None
    assert "draft model" not in invoke("info", model, "--device", "cpu").stdout
