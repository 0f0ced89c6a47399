"""Which adapter files are refused before any weights are read, and where the files may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.checkpoint import expressions
from penstock.checkpoint.adapter_files import find_adapter
from penstock.checkpoint.adapters import PREFIX, match_modules, read_lora
from penstock.errors import AdapterNotFound, BadValue, ModelLoadError

MODULE = "base_model.model.encoder.layer.0.attention.self.query"
ENDLESS = r"((\w+\.?)+)+!"


def write(folder: Path, dtype: Any = np.float32, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"A": (2, 8), "B": (8, 2)}
    save_file(
        {f"{MODULE}.lora_{part}.weight": np.ones(shape, dtype) for part, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def test_a_folder_without_the_kind_of_its_adapter_is_refused_as_in_peft(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no peft_type; supported: LORA"):
        read_lora(write(tmp_path, peft_type=None), "a")


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"rank_pattern": {ENDLESS: 2}},
        {"alpha_pattern": {ENDLESS: 2}},
        {"layers_pattern": [ENDLESS], "layers_to_transform": [0]},
    ],
    ids=lambda config: next(iter(config)),
)
def test_an_expression_that_never_ends_is_refused(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "TIME_LIMIT_S", 0.5)
    with pytest.raises(ModelLoadError, match="takes too long to match"):
        read_lora(write(tmp_path, **config), "a")


@pytest.mark.parametrize(
    "expression",
    [
        r".*layer\.\d+\.(attention|output)\..*(query|key)",
        r"(?:.*?(?:layer|language).*?(?:self|attention|mlp).*?(?:query|key|value|dense).*?)",
        r"(\w+\.)*query",
        r"^(?!.*visual).*query$",
    ],
)
def test_expressions_as_trainers_write_them_are_read(expression: str, tmp_path: Path) -> None:
    assert read_lora(write(tmp_path, target_modules=expression), "a").kinds == ("query",)


@pytest.mark.parametrize(
    "config",
    [{"use_rslora": "false"}, {"use_dora": "no"}, {"rank_pattern": {"query": 2.5}}, {"lora_alpha": "16"}],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"{next(iter(config))} = .*; it has to be "):
        read_lora(write(tmp_path, **config), "a")


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    assert read_lora(write(tmp_path / "half", np.float16), "a").rank == 2
    with pytest.raises(ModelLoadError, match="of type I32; it has to be of floats"):
        read_lora(write(tmp_path / "whole", np.int32), "a")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
def test_a_path_that_no_file_can_have_is_refused(path: str, tmp_path: Path) -> None:
    for root in (None, str(tmp_path)):
        with pytest.raises((BadValue, AdapterNotFound)):
            find_adapter(path, root)


def test_a_tensor_with_and_without_the_prefix_is_refused(tmp_path: Path) -> None:
    tensors = load_file(file := write(tmp_path) / "adapter_model.safetensors")
    name = f"{MODULE}.lora_A.weight"
    save_file(tensors | {name.removeprefix(PREFIX): tensors[name]}, file)
    with pytest.raises(ModelLoadError, match=r"query\.lora_A\.weight' twice, with and without the prefix"):
        read_lora(tmp_path, "a")


def test_an_empty_pattern_of_layers_is_none(tmp_path: Path) -> None:
    read_lora(write(tmp_path, layers_to_transform=[0], layers_pattern=""), "a")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_links_out_of_the_root_are_refused(name: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside")
    (write(root / "a") / name).unlink()
    (root / "a" / name).symlink_to(outside / name)
    with pytest.raises(BadValue, match=rf"{name} of the adapter 'a' is not below --lora-root"):
        find_adapter("a", str(root))
    (root / "a" / name).unlink()
    (root / "a" / name).symlink_to(write(root / "b") / name)
    assert find_adapter("a", str(root)) == root / "a"


def test_layers_of_another_tower_are_not_those_of_the_language_model() -> None:
    layer = "layers.0.self_attn.q_proj"
    wrapped = {f"{name}.{layer}": layer for name in ("model", "model.language_model", "0.auto_model")}
    towers = [f"{name}.{layer}" for name in ("vision_tower.vision_model.encoder", "model.audio_tower")]
    assert match_modules([*wrapped, *towers], [layer]) == wrapped
