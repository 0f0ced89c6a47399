"""One adapter of a parametrised checkpoint is merged while the tensors are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ModelLoadError
from penstock.weights.adapters import Adapter, MergedSource
from penstock.weights.stream import SafetensorsSource

CPU = torch.device("cpu")
SECOND = Adapter(number=1, count=3, rank=2, scale=0.5)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "roberta.embeddings.words.parametrizations.weight.original": (7, 4),
        "roberta.embeddings.words.parametrizations.weight.0.lora_A": (3, 7, 2),
        "roberta.embeddings.words.parametrizations.weight.0.lora_B": (3, 2, 4),
        "roberta.up.parametrizations.weight.original": (5, 4),
        "roberta.up.parametrizations.weight.0.lora_A": (3, 2, 4),
        "roberta.up.parametrizations.weight.0.lora_B": (3, 5, 2),
        "roberta.up.bias": (5,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def source(folder: Path, tensors: dict[str, Tensor], adapter: Adapter | None) -> MergedSource:
    save_file(tensors, folder / "model.safetensors")
    return MergedSource(SafetensorsSource(folder, torch.float32, CPU), adapter)


def test_without_an_adapter_weights_are_the_original_ones(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    weights = source(tmp_path, tensors, None)
    assert weights.prefix_of("embeddings.words.weight") == "roberta."
    assert weights.has("roberta.up.weight")
    assert weights.has("roberta.up.bias")
    assert not weights.has("roberta.down.weight")
    original = tensors["roberta.up.parametrizations.weight.original"]
    assert torch.equal(weights.take("roberta.up.weight", 5, 4), original)
    assert torch.equal(weights.take("roberta.up.bias", 5), tensors["roberta.up.bias"])


def test_an_adapter_changes_layers_and_tables(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    weights = source(tmp_path, tensors, SECOND)
    for name, shape, order in (("up", (5, 4), "BA"), ("embeddings.words", (7, 4), "AB")):
        place = f"roberta.{name}.parametrizations.weight."
        left, right = (tensors[f"{place}0.lora_{letter}"][1] for letter in order)
        expected = tensors[place + "original"] + 0.5 * left @ right
        torch.testing.assert_close(weights.take(f"roberta.{name}.weight", *shape), expected)


def test_a_tensor_that_was_never_read_is_still_an_error(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    weights = source(tmp_path, tensors, SECOND)
    weights.take("roberta.up.weight", 5, 4)
    with pytest.raises(ModelLoadError, match="embeddings"):
        weights.check_all_read([])


def test_adapters_of_another_count_are_an_error(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    weights = source(tmp_path, tensors, Adapter(number=0, count=4, rank=2, scale=1.0))
    with pytest.raises(ModelLoadError, match="lora_B"):
        weights.take("roberta.up.weight", 5, 4)
